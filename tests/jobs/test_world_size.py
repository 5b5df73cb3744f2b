"""A training goes on with another number of processes, from a checkpoint that is converted by itself."""

import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.training

from tests.jobs.conftest import STEPS, TRAIN, Attempt, Launcher  # noqa: E402

SAME_BATCH = "--global_batch_size=4"


def with_checkpoint(run: Path, of: Attempt, step: int) -> Path:
    """A run that has got no further than that checkpoint."""
    name = f"checkpoint-{step}"
    shutil.copytree(of.run / "checkpoints" / name, run / "checkpoints" / name)
    return run / "checkpoints" / name


def test_two_become_one(launcher: Launcher, whole: Attempt, tmp_path: Path) -> None:
    """ZeRO-2: the losses are those of two, and the converted form is kept with the checkpoint."""
    checkpoint = with_checkpoint(tmp_path, whole, 3)
    alone = launcher.sft(tmp_path, *TRAIN, SAME_BATCH, attempt=2, processes=1)
    assert alone.code == 0, alone.output
    assert f"resuming from {checkpoint} (step 3)" in alone.output
    assert "is of 2 processes, here are 1" in alone.output
    assert re.search(rf"converted to {checkpoint}/global_step3_universal in ", alone.output)
    expected = {step: loss for step, loss in whole.losses.items() if step > 3}
    assert alone.losses == pytest.approx(expected, abs=1e-5)
    assert (checkpoint / "global_step3_universal" / "complete.json").is_file()
    assert not [path for path in checkpoint.iterdir() if path.name.startswith(".")]


def test_one_becomes_two_with_zero_3_and_the_conversion_is_made_once(launcher: Launcher, tmp_path: Path) -> None:
    train = (*TRAIN, SAME_BATCH, "--deepspeed=zero3")
    first = launcher.sft(tmp_path / "one", *train, processes=1)
    assert first.code == 0, first.output
    checkpoint = with_checkpoint(tmp_path / "two", first, 3)
    for attempt in (2, 3):
        both = launcher.sft(tmp_path / "two", *train, attempt=attempt)
        assert both.code == 0, both.output
        assert ("converted to" in both.output) == (attempt == 2)
        expected = {step: loss for step, loss in first.losses.items() if step > 3}
        assert both.losses == pytest.approx(expected, abs=1e-5)
        for later in (tmp_path / "two" / "checkpoints").glob("checkpoint-*"):
            if later != checkpoint:
                shutil.rmtree(later)


def test_another_stage_is_refused_at_once(launcher: Launcher, whole: Attempt, tmp_path: Path) -> None:
    checkpoint = with_checkpoint(tmp_path, whole, 3)
    refused = launcher.sft(tmp_path, *TRAIN, "--deepspeed=zero3", attempt=2, processes=1)
    assert refused.code == 1
    assert f"\nsft: {checkpoint} was written with ZeRO-2, this start is with ZeRO-3\n  because: " in refused.output


def test_a_resumed_step_count_of_another_batch_is_said(launcher: Launcher, whole: Attempt, tmp_path: Path) -> None:
    with_checkpoint(tmp_path, whole, STEPS)
    ended = launcher.sft(tmp_path, *TRAIN, "--global_batch_size=8", attempt=2)
    assert ended.code == 0, ended.output
    assert "warning: a step was 4 sequences and is 8 now" in ended.output
