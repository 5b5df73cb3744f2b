"""A rank killed by surprise costs the steps since the last whole checkpoint, nothing else."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.training

from bench.training import kills  # noqa: E402


def test_killed_at_a_step_and_while_saving_it_goes_on_bitwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of the twenty kills of `python -m bench.training.kills`, which raises where a start resumes wrongly."""
    assert kills.run(2, seed=1, folder=tmp_path, steps=60) == 0
    assert "losses that differ: none; missing: none" in capsys.readouterr().out
