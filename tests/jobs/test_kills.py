"""A rank killed by surprise costs the steps since the last whole checkpoint, nothing else."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.training, pytest.mark.slow]

from tests.jobs import kills  # noqa: E402


def test_killed_at_a_step_and_while_saving_it_goes_on_bitwise(tmp_path: Path) -> None:
    """Two of the twenty kills of `python -m tests.jobs.kills`, which raises where a start resumes wrongly."""
    found = kills.measure(tmp_path / "kills", quick=False, kills=2, seed=1, steps=60)
    assert len(found["kills"]) == 2
    assert (found["differ"], found["missing"]) == ([], [])
