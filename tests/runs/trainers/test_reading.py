"""The steps that a program prints are read from its logs when somebody asks, and only once."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from runner.machine import files
from runner.runs import progress, trainer
from runner.runs.metrics import newest_records, read_progress, records
from runner.runs.run import Run, load
from tests.runs.trainers.test_logs import NO_PROJECT

BEGUN = 1_700_000_000
STEPS = "job.sbatch: attempt 1 on nid1\nstep 1/9 loss 3\nstep 2/9 loss 2\n"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with one attempt, whose job names no trainer."""
    record = {
        "name": "x-0001",
        "job": "x",
        "site": "local",
        "scheduler": "local",
        "created": "2026-01-01T00:00:00+01:00",
    }
    folder = tmp_path / "x-0001"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(record))
    (folder / trainer.FILE).write_text(trainer.render(None, NO_PROJECT))
    begin(load(folder), 1, BEGUN)
    return load(folder)


def begin(run: Run, number: int, time: float) -> Path:
    """A new attempt. Returns its folder."""
    folder = run.folder / f"attempts/{number}"
    folder.mkdir(parents=True)
    (folder / "started").write_text("started 1\n")
    os.utime(folder / "started", (time, time))
    return folder


def write(run: Run, text: str | bytes, name: str = "job.log", *, time: float | None = None, mode: str = "ab") -> None:
    """Add the text to a log, and note in log-times that it had this size then."""
    path = run.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.write(text.encode() if isinstance(text, str) else text)
    if time is not None:
        with (run.folder / "attempts/1/log-times").open("a") as file:
            file.write(f"{time:.0f} {path.stat().st_size} {name}\n")


def entries(run: Run) -> list[dict[str, Any]]:
    return [dict(entry) for entry in records(progress.metrics_of(run)) if "step" in entry]


def steps(run: Run) -> list[tuple[int, int, float | None]]:
    return [(entry["attempt"], entry["step"], entry["loss"]) for entry in entries(run)]


def as_another_process() -> None:
    progress._memory.clear()


def test_what_is_read_is_like_the_metrics_of_our_own_jobs(run: Run) -> None:
    write(run, STEPS, time=BEGUN + 2)
    assert entries(run)[0] == {
        "step": 1, "total_steps": 9, "loss": 3, "attempt": 1, "time": pytest.approx(BEGUN + 1.7, abs=0.1)
    }  # fmt: skip
    found = read_progress(progress.metrics_of(run))
    assert found is not None and (found.steps_text, found.loss) == ("2/9", 2)


def test_a_program_that_writes_its_own_metrics_is_believed(run: Run) -> None:
    write(run, STEPS)
    (run.folder / "metrics.jsonl").write_text('{"step": 7, "loss": 1, "attempt": 1}\n')
    assert steps(run) == [(1, 7, 1)]
    assert not (run.folder / "progress").exists()


def test_the_log_is_not_read_if_the_job_says_so(run: Run) -> None:
    (run.folder / trainer.FILE).write_text(trainer.render(trainer.NONE, NO_PROJECT))
    write(run, STEPS)
    assert steps(run) == []


def test_a_line_counts_when_it_is_complete_or_when_the_attempt_has_ended(run: Run) -> None:
    write(run, "step 1 loss 2\rstep 2 lo")
    assert steps(run) == [(1, 1, 2)]
    write(run, "ss 3\0step 3 loss 4\nstep 4 lo")
    assert steps(run)[1:] == [(1, 2, 3), (1, 3, 4)]
    write(run, "ss 5")
    assert steps(run)[-1] == (1, 3, 4)
    (run.folder / "attempts/1/exit_code").write_text("0\n")
    assert steps(run)[-1] == (1, 4, 5)


def test_any_bytes_may_be_in_a_log(run: Run) -> None:
    write(run, bytes(range(256)) * 40 + b"\nstep 1 loss 2 \xff\xfe\xe2\x94\nstep 2 loss 3\n")
    write(run, b"x" * 3_000_000 + b"\nstep 3 loss 4\n")
    assert [step for _, step, _ in steps(run)] == [1, 2, 3]


def test_each_attempt_ends_where_the_next_one_begins(run: Run) -> None:
    write(run, STEPS)
    assert len(steps(run)) == 2
    begin(run, 2, BEGUN + 100)
    write(run, "step 3/9 loss 1\njob.sbatch: attempt 2 on nid2\nstep 2/9 loss 5\n")
    expected = [(1, 1, 3), (1, 2, 2), (1, 3, 1), (2, 2, 5)]
    assert steps(run) == expected
    begin(run, 3, BEGUN + 200)
    assert steps(run) == expected
    write(run, "job.sbatch: attempt 3 on nid2\nstep 3/9 loss 4\n")
    as_another_process()
    assert steps(run) == [*expected, (3, 3, 4)]


def test_a_run_that_waits_needs_no_patterns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`status` is often asked while a run waits: reading the patterns of all trainers would slow it down."""
    shutil.rmtree(run.folder / "attempts")
    monkeypatch.setattr(trainer, "readable", lambda _: pytest.fail("it has read the patterns"))
    assert (steps(load(run.folder)), progress.unread(load(run.folder))) == ([], "")


@pytest.mark.parametrize("size", [1, 20_000])
def test_what_was_read_is_not_read_again(run: Run, size: int) -> None:
    """In this process, and in another one if that saves time."""
    write(run, "".join(f"step {step} loss 2 {'.' * 20}\n" for step in range(1, size + 1)))
    before = steps(run)
    assert len(before) == size
    is_kept = (run.folder / "progress/1.json").exists()
    assert is_kept == (size > 1)
    if is_kept:
        as_another_process()
    with (run.folder / "job.log").open("r+b") as file:
        file.write(b"step 7 loss 9")
    write(run, f"step {size + 1} loss 4\n")
    assert steps(run) == [*before, (1, size + 1, 4)]


def many(count: int) -> str:
    return "".join(f"step {step} loss 2 {'.' * 40}\n" for step in range(1, count + 1))


def test_a_log_that_was_cut_is_read_anew(run: Run) -> None:
    write(run, many(2000))
    assert len(steps(run)) == 2000
    write(run, STEPS, mode="wb")
    assert steps(run) == [(1, 1, 3), (1, 2, 2)]
    as_another_process()
    assert steps(run) == [(1, 1, 3), (1, 2, 2)]


@pytest.mark.parametrize("name", ["1.json", "1.jsonl"])
@pytest.mark.parametrize("damage", ["empty", "other text", "deleted", "a folder", "a link", "a pipe", "a byte"])
def test_damaged_files_are_made_anew(run: Run, tmp_path: Path, name: str, damage: str) -> None:
    write(run, many(2000))
    assert len(steps(run)) == 2000
    path = run.folder / "progress" / name
    content = path.read_bytes()
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    elif damage == "a link":
        path.symlink_to(tmp_path / "none")
    elif damage == "a pipe":
        os.mkfifo(path)
    elif damage == "a byte" and name == "1.json":
        path.write_bytes(content.replace(b'"step": 2000', b'"step": 2001'))
    elif damage != "deleted":
        path.write_text("" if damage == "empty" else "{}\n")
    as_another_process()
    write(run, "step 2001 loss 2\n")
    assert [step for _, step, _ in steps(run)] == list(range(1, 2002))
    assert not (tmp_path / "none").exists()


def test_other_patterns_read_the_log_anew(run: Run) -> None:
    """A later version may understand more."""
    write(run, many(2000) + "iter 3: loss 2.5, time 12ms, mfu 1.0%\n")
    assert len(steps(run)) == 2001
    (run.folder / trainer.FILE).write_text(trainer.render("nanogpt", NO_PROJECT))
    assert steps(run) == [(1, 3, 2.5)]


def test_who_does_not_get_the_lock_reads_in_memory(run: Run) -> None:
    write(run, many(2000))
    (run.folder / "progress").mkdir()
    with files.locked(run.folder / "progress/1.json"):
        assert len(steps(run)) == len(steps(run)) == 2000
        assert not (run.folder / "progress/1.json").exists()


def test_what_another_process_has_written_meanwhile_stays(run: Run) -> None:
    write(run, many(2000))
    steps(run)
    mine = dict(progress._memory)
    as_another_process()
    write(run, many(4000)[len(many(2000)) :])
    assert len(steps(run)) == 4000
    progress._memory.update(mine)
    assert len(steps(run)) == 4000
    as_another_process()
    assert len(steps(run)) == 4000


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_run_of_another_user_is_only_read(run: Run) -> None:
    write(run, many(2000))
    os.chown(run.folder, 12345, -1)
    assert len(steps(run)) == len(steps(run)) == 2000
    assert not (run.folder / "progress").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("name", ["1.json", "1.jsonl"])
def test_files_of_a_third_user_do_not_count(run: Run, name: str) -> None:
    write(run, many(2000))
    steps(run)
    path = run.folder / "progress" / name
    if name == "1.jsonl":
        path.write_text(path.read_text().replace("2", "3"))
    os.chown(path, 12345, -1)
    as_another_process()
    assert len(steps(run)) == 2000 and steps(run)[1] == (1, 2, 2)


def test_the_newest_entries_are_found_without_reading_all(run: Run) -> None:
    write(run, many(2000))
    begin(run, 2, BEGUN + 100)
    write(run, "job.sbatch: attempt 2 on nid2\nstep 7 loss 4\nstep 8 loss 4\n")
    found = newest_records(progress.metrics_of(run), 1000)
    assert [entry["step"] for entry in found[-2:]] == [7, 8] and 2 < len(found) < 20
    assert found[-3]["step"] == 2000


# --- when a step was made


def test_the_time_of_a_step_follows_from_how_the_log_grew(run: Run) -> None:
    for step in range(1, 6):
        write(run, f"step {step} loss 2\n", time=BEGUN + 100 * step)
    assert [entry["time"] - BEGUN for entry in entries(run)] == [100, 200, 300, 400, 500]
    write(run, "".join(f"step {step} loss 2\n" for step in range(6, 10)), time=BEGUN + 600)
    later = [entry["time"] - BEGUN for entry in entries(run)][-4:]
    assert later == [599.25, 599.5, 599.75, 600]


def test_without_times_the_steps_are_spread(run: Run) -> None:
    write(run, "".join(f"step {step} loss 2\n" for step in range(1, 5)))
    os.utime(run.log, (BEGUN + 400, BEGUN + 400))
    assert [entry["time"] - BEGUN for entry in entries(run)] == pytest.approx([100, 200, 300, 400], abs=5)


def test_several_logs_are_read_in_the_order_in_which_they_were_written(run: Run) -> None:
    """The bar on stderr has the step of the loss on stdout. The first loss waits for the next bar."""
    for name in ("job.log", "job.err"):
        (run.folder / f"attempts/1/{name}").symlink_to(run.folder / f"slurm-{name}")
        (run.folder / f"slurm-{name}").touch()
        (run.folder / name).symlink_to(run.folder / f"slurm-{name}")
    (run.folder / "attempts/1/log_bytes").write_text("0\n0\n")
    for step in range(1, 5):
        bar = f"\r {25 * step}%|###   | {step}/4 [00:01<00:02,  1.10it/s]"
        write(run, bar, "job.err", time=BEGUN + 10 * step)
        write(run, f"{{'loss': 2.{step}, 'epoch': 0.{step}}}\n", "job.log", time=BEGUN + 10 * step + 2)
        write(run, bar, "job.err", time=BEGUN + 10 * step + 4)
    assert steps(run) == [(1, step, 2 + step / 10) for step in range(1, 5)]
    assert [round(entry["time"] - BEGUN) for entry in entries(run)] == [14, 22, 32, 42]


def test_the_attempts_of_a_users_own_script(run: Run) -> None:
    """Slurm writes each to a file of its own, or all to the same one."""
    for number, (name, begun) in enumerate([("a.out", 0), ("b.out", 0), ("b.out", 14)], 1):
        folder = begin(run, number, BEGUN + number) if number > 1 else run.folder / "attempts/1"
        (run.folder / name).open("a").write(f"step {number} loss {number}\n")
        (folder / "job.log").symlink_to(run.folder / name)
        (folder / "log_bytes").write_text(f"{begun}\n")
    (run.folder / "job.log").symlink_to(run.folder / "b.out")
    assert steps(run) == [(1, 1, 1), (2, 2, 2), (3, 3, 3)]


def test_the_last_rank_may_be_the_one_that_prints(run: Run) -> None:
    write(run, "nothing\n")
    for rank in (9, 10):
        write(run, f"step {rank} loss 2\n", f"attempts/1/rank-{rank}.log")
    assert steps(run) == [(1, 10, 2)]
    write(run, "step 11 loss 2\n", "attempts/1/rank-11.log")
    write(run, "step 12 loss 2\n", "attempts/1/rank-10.log")
    assert [step for _, step, _ in steps(run)] == [10, 12] or [step for _, step, _ in steps(run)] == [10, 11, 12]


def test_one_process_of_torchrun_counts_once(run: Run) -> None:
    """Its output is in job.log and in a file of its own."""
    write(run, "step 1 loss 2\n")
    write(run, "step 9 loss 2\n", "attempts/1/node-0/x/attempt_0/0/stdout.log")
    assert steps(run) == [(1, 1, 2)]
    write(run, "step 5 loss 2\n", "attempts/1/node-0/x/attempt_0/1/stdout.log")
    assert [step for _, step, _ in steps(run)] == [1, 5]


# --- a trainer that the job names, and that finds nothing

NANOGPT = "iter 1: loss 2.5, time 12ms"  # an older version, without mfu


@pytest.mark.parametrize(
    ("chosen", "text", "exit_code", "minutes", "expected"),
    [
        ("nanogpt", NANOGPT, "0", 1, "nanogpt"),
        ("nanogpt", NANOGPT, "", 11, "nanogpt"),
        ("nanogpt", NANOGPT, "", 9, ""),
        ("nanogpt", NANOGPT, "3", 11, ""),  # it may not have reached its first step
        ("nanogpt", f"{NANOGPT}, mfu 1.0%", "0", 11, ""),
        (None, "nothing", "0", 11, ""),
        (trainer.NONE, "nothing", "0", 11, ""),
    ],
)
def test_a_trainer_that_finds_nothing(
    run: Run, chosen: str | None, text: str, exit_code: str, minutes: int, expected: str
) -> None:
    (run.folder / trainer.FILE).write_text(trainer.render(chosen, NO_PROJECT))
    write(run, text + "\n")
    begun = (run.folder / "run.json").stat().st_mtime - 60 * minutes
    os.utime(run.folder / "attempts/1/started", (begun, begun))
    if exit_code:
        (run.folder / "attempts/1/exit_code").write_text(exit_code)
    assert progress.unread(run) == expected


def test_a_file_of_checkpoints_is_no_trainer_that_finds_nothing(run: Run) -> None:
    (run.folder / trainer.FILE).write_text("chosen mine\ntrainer mine\ncheckpoint_name step-*/\n")
    (run.folder / "attempts/1/exit_code").write_text("0")
    write(run, STEPS)
    assert (progress.unread(run), steps(run)) == ("", [])
