"""A job resumes from the newest checkpoint that is whole, and says which it has passed over."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.training

from training.checkpoints import resume  # noqa: E402
from training.errors import JobError  # noqa: E402
from training.processes import Processes  # noqa: E402


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three whole checkpoints: 2, 9 and 10."""
    for step in (2, 9, 10):
        shards = tmp_path / f"checkpoint-{step}" / f"global_step{step}"
        shards.mkdir(parents=True)
        (shards / "rank_0.pt").write_bytes(b"x" * 100)
        (shards.parent / "trainer_state.json").write_text("{}")
        resume.mark_complete(shards.parent, step, world_size=2)
    return tmp_path


def test_the_newest_is_that_of_the_highest_step(folder: Path) -> None:
    checkpoint, skipped = resume.newest_complete(folder)
    assert (checkpoint, skipped) == (resume.Checkpoint(folder / "checkpoint-10", 10, 2), ())


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "global_step10" / "rank_0.pt").write_bytes(b"x" * 99), "has 99 bytes, 100 were written"),
        (lambda path: (path / "global_step10" / "rank_0.pt").unlink(), "rank_0.pt is missing"),
        (lambda path: (path / resume.MARKER).unlink(), "ended while writing it"),
        (lambda path: (path / resume.MARKER).write_text('{"files": '), "cannot be read"),
    ],
)
def test_a_damaged_one_is_passed_over_and_said(folder: Path, damage: object, reason: str) -> None:
    damage(folder / "checkpoint-10")  # type: ignore[operator]
    checkpoint, skipped = resume.newest_complete(folder)
    assert checkpoint == resume.Checkpoint(folder / "checkpoint-9", 9, 2)
    assert len(skipped) == 1
    assert str(folder / "checkpoint-10") in skipped[0]
    assert reason in skipped[0]


def test_without_any_the_job_begins_anew(tmp_path: Path) -> None:
    assert resume.newest_complete(tmp_path / "nothing") == (None, ())


def test_by_hand_nothing_resumes_unless_asked(folder: Path) -> None:
    assert resume.choose(folder, None, automatic=False) == (None, ())
    assert resume.choose(folder, "false", automatic=True) == (None, ())
    assert resume.choose(folder, "true", automatic=False)[0] == resume.Checkpoint(folder / "checkpoint-10", 10, 2)
    assert resume.choose(folder, str(folder / "checkpoint-2"), automatic=True)[0] == resume.Checkpoint(
        folder / "checkpoint-2", 2, 2
    )


def test_a_damaged_one_that_is_asked_for_by_name_is_an_error(folder: Path) -> None:
    (folder / "checkpoint-2" / "trainer_state.json").unlink()
    with pytest.raises(JobError, match=r"trainer_state\.json is missing"):
        resume.choose(folder, str(folder / "checkpoint-2"), automatic=True)


def test_zero_shards_of_another_world_size_are_refused(folder: Path) -> None:
    checkpoint, _ = resume.newest_complete(folder)
    assert checkpoint
    resume.refuse_other_world_size(checkpoint, Processes(0, 0, 2, 2, "torchrun"), 3)
    resume.refuse_other_world_size(checkpoint, Processes(0, 0, 4, 4, "torchrun"), None)
    with pytest.raises(JobError, match="is of 2 processes, this start has 4"):
        resume.refuse_other_world_size(checkpoint, Processes(0, 0, 4, 4, "torchrun"), 2)


def test_old_checkpoints_go_and_the_last_whole_one_always_stays(folder: Path) -> None:
    (folder / "checkpoint-10" / resume.MARKER).unlink()
    resume.remove_old(folder, keep=1)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-10", "checkpoint-9"]
    resume.remove_old(folder, keep=0)
    assert resume.newest_complete(folder)[0] == resume.Checkpoint(folder / "checkpoint-9", 9, 2)
