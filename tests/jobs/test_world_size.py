"""A training goes on with another number of processes, from a checkpoint that is converted by itself."""

import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.training

from tests.jobs.attempts import Start, losses  # noqa: E402
from tests.jobs.conftest import STEPS, TRAIN, Attempt, Launcher  # noqa: E402
from training import universal  # noqa: E402
from training.errors import JobError  # noqa: E402
from training.processes import ALONE  # noqa: E402
from training.resume import Checkpoint  # noqa: E402

SAME_BATCH = "--global_batch_size=4"


def with_checkpoint(run: Path, of: Path, step: int) -> Path:
    """A run that has got no further than that checkpoint."""
    name = f"checkpoint-{step}"
    shutil.copytree(of / "checkpoints" / name, run / "checkpoints" / name)
    return run / "checkpoints" / name


def after(step: int, of: dict[int, float]) -> dict[int, float]:
    return {number: loss for number, loss in of.items() if number > step}


def test_two_become_one(launcher: Launcher, whole: Attempt, tmp_path: Path) -> None:
    """ZeRO-2: the losses are those of two, and the converted form is kept with the checkpoint."""
    checkpoint = with_checkpoint(tmp_path, whole.run, 3)
    alone = Start(tmp_path, (*TRAIN, SAME_BATCH), processes=1, cache=launcher.cache, attempt=2)
    alone.finish()
    assert f"resuming from {checkpoint} (step 3)" in alone.output
    assert "was written by 2 processes, but this run has 1" in alone.output
    assert re.search(rf"converted to {checkpoint}/global_step3_universal in ", alone.output)
    assert losses(tmp_path) == pytest.approx(after(3, whole.losses), abs=1e-5)
    assert (checkpoint / "global_step3_universal" / "complete.json").is_file()
    assert not [path for path in checkpoint.iterdir() if path.name.startswith(".")]


def test_one_becomes_two_with_zero_3_and_the_conversion_is_made_once(launcher: Launcher, tmp_path: Path) -> None:
    train = (*TRAIN, SAME_BATCH, "--deepspeed=zero3", "--max_steps=8")
    one, two = tmp_path / "one", tmp_path / "two"
    Start(one, train, processes=1, cache=launcher.cache).finish()
    checkpoint = with_checkpoint(two, one, 3)
    for attempt in (2, 3):
        both = Start(two, train, processes=2, cache=launcher.cache, attempt=attempt)
        both.finish()
        assert ("converted to" in both.output) == (attempt == 2)
        assert losses(two) == pytest.approx(after(3, losses(one)), abs=1e-5)
        for later in (two / "checkpoints").glob("checkpoint-*"):
            if later != checkpoint:
                shutil.rmtree(later)


def test_processes_that_cannot_split_the_global_batch_take_another_one_and_say_so(
    launcher: Launcher, whole: Attempt, tmp_path: Path
) -> None:
    """After a node is lost, the run goes on; a first attempt would be refused."""
    with_checkpoint(tmp_path, whole.run, 9)
    shutil.copy(whole.run / "metrics.jsonl", tmp_path)
    three = Start(tmp_path, (*TRAIN, SAME_BATCH), processes=3, cache=launcher.cache, attempt=2)
    three.finish()
    assert three.output.count("because --global_batch_size 4 is not a multiple of") == 1
    assert re.search(r"warning: a step had 4 sequences, but now has \d+: .* skipped or repeated\n", three.output)
    assert sorted(losses(tmp_path)) == list(range(1, STEPS + 1))


def test_another_stage_is_refused_at_once(launcher: Launcher, whole: Attempt, tmp_path: Path) -> None:
    checkpoint = with_checkpoint(tmp_path, whole.run, 3)
    refused = Start(tmp_path, (*TRAIN, "--deepspeed=zero3"), processes=2, cache=launcher.cache, attempt=2)
    assert refused.begin().wait(300) == [1, 1]
    assert f"sft: {checkpoint} was written with ZeRO-2, but this run trains with ZeRO-3\n  because: " in refused.output
    assert "Traceback" not in refused.output


def test_steps_of_another_size_are_said(launcher: Launcher, whole: Attempt, tmp_path: Path) -> None:
    with_checkpoint(tmp_path, whole.run, STEPS)
    ended = Start(tmp_path, (*TRAIN, "--global_batch_size=8"), processes=2, cache=launcher.cache, attempt=2)
    ended.finish()
    assert "warning: a step had 4 sequences, but now has 8" in ended.output


def test_an_old_deepspeed_refuses_zero_3_with_another_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 0.18, as on NGC 24.06, the conversion loses all but the first group of parameters."""
    from types import SimpleNamespace

    monkeypatch.setattr(universal.zero3_faults, "is_supported", lambda: False)
    monkeypatch.setattr(universal.deepspeed, "stage_of", lambda config: 3)
    config = SimpleNamespace(per_device_train_batch_size=1, gradient_accumulation_steps=1)
    checkpoint = Checkpoint(tmp_path / "checkpoint-3", 3, world_size=2, zero_stage=3)
    with pytest.raises(JobError, match="written by 2 processes, but this run has 1") as caught:
        universal.prepare(checkpoint, config, ALONE)
    assert "DeepSpeed before 0.18" in caught.value.why
