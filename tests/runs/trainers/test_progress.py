"""A program that knows nothing of runner has progress: its steps and losses are read from its log."""

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from runner.project import Project
from runner.runs import metrics, progress, trainer
from runner.runs.job import Restart
from runner.runs.run import Run
from tests.runs.scripts import command_job, run_locally, write_run

QUICK = {"RUNNER_WATCH_SECONDS": "1", "RUNNER_STACK_SECONDS": "1"}
NO_PROJECT = Project(None, Path("/none"), Path("/none"))


def trainer_run(folder: Path, text: str, chosen: str | None = None, **fields: Any) -> Path:
    """A run folder of a shell job, with the patterns of the chosen trainer, or of all."""
    launcher, tasks = fields.pop("launcher", "none"), fields.pop("tasks", 1)
    run = write_run(folder, command_job("sh", "-c", text, launcher=launcher, tasks=tasks, **fields))
    (run / trainer.FILE).write_text(trainer.render(chosen, NO_PROJECT))
    return run


def start(run: Path) -> int:
    """Run the job as the site `local` does, with its output in job.log. Returns the exit code."""
    with (run / "job.log").open("ab") as log:
        done = run_locally(run, extra_environ=QUICK, capture_output=False, stdout=log, stderr=subprocess.STDOUT)
    return done.returncode


def source(run: Path) -> metrics.Metrics:
    """What `status` and the others read."""
    return progress.metrics_of(Run("x-0001", run, "x", "local", "local", "2026-01-01T00:00:00+00:00"))


def entries(run: Path) -> list[dict[str, Any]]:
    return [dict(entry) for entry in metrics.records(source(run)) if "step" in entry]


def test_a_plain_loop_that_prints(tmp_path: Path) -> None:
    text = 'for n in 1 2 3; do echo "step $n/30 | loss: 2.$n | lr 1e-4"; sleep 0.6; done'
    run = trainer_run(tmp_path, text)
    assert start(run) == 0
    assert [(entry["step"], entry["total_steps"], entry["loss"]) for entry in entries(run)] == [
        (1, 30, 2.1), (2, 30, 2.2), (3, 30, 2.3)]  # fmt: skip
    found = metrics.read_progress(source(run))
    assert found is not None and (found.steps_text, found.loss) == ("3/30", 2.3)


def steps(run: Path) -> list[tuple[int, int]]:
    """(attempt, step) of each entry"""
    return [(entry["attempt"], entry["step"]) for entry in entries(run)]


def test_the_entries_are_like_those_of_our_own_jobs(tmp_path: Path) -> None:
    """No reader of the metrics needs to know where they come from."""
    run = trainer_run(
        tmp_path, "echo ' iteration 10/ 20 | consumed samples: 9 | lm loss: 1.0E+00 | learning rate: 1.0E-05 |'"
    )
    start(run)
    (entry,) = entries(run)
    assert entry.items() >= {"step": 10, "total_steps": 20, "loss": 1.0, "learning_rate": 1e-5, "attempt": 1}.items()
    assert isinstance(entry["time"], float) and abs(entry["time"] - time.time()) < 600


def test_each_attempt_adds_its_steps(tmp_path: Path) -> None:
    text = """n=${RUNNER_ATTEMPT##*/}; echo "step $((3 * n)) loss 2"; echo "step $((3 * n + 1)) loss 2"
    [ $n = 3 ] || exit 75"""
    run = trainer_run(tmp_path, text, restart=Restart(time_limit=5))
    assert start(run) == 0
    assert steps(run) == [(1, 3), (1, 4), (2, 6), (2, 7), (3, 9), (3, 10)]


def test_a_program_that_writes_its_own_metrics_is_left_alone(tmp_path: Path) -> None:
    """Also in later attempts, before it has written anything."""
    line = '{\\"step\\": $step, \\"loss\\": 7, \\"attempt\\": ${RUNNER_ATTEMPT##*/}}'
    text = f"""for step in 1 2 3; do echo "step $step loss 2"; echo "{line}" >>"$RUNNER_RUN/metrics.jsonl"
    sleep 0.5; done
    [ "${{RUNNER_ATTEMPT##*/}}" = 2 ] || exit 75"""
    run = trainer_run(tmp_path, text, restart=Restart(time_limit=5))
    assert start(run) == 0
    assert steps(run) == [(n, step) for n in (1, 2) for step in (1, 2, 3)]
    assert {entry["loss"] for entry in entries(run)} == {7}


def test_the_log_is_not_read_if_the_job_says_so(tmp_path: Path) -> None:
    run = trainer_run(tmp_path, "echo step 1 loss 2", trainer.NONE)
    assert start(run) == 0 and steps(run) == []


def test_the_last_rank_may_be_the_one_that_prints(tmp_path: Path) -> None:
    """As with Megatron-LM. With srun, its output is in attempts/N/rank-1.log."""
    text = '[ "$RANK" = 1 ] || exit 0; for step in 1 2; do echo "step $step/9 loss 2"; done'
    run = trainer_run(tmp_path, text, launcher="srun", tasks=2)
    assert start(run) == 0 and steps(run) == [(1, 1), (1, 2)]


def test_steps_that_every_rank_prints_are_counted_once(tmp_path: Path) -> None:
    run = trainer_run(tmp_path, 'for step in 1 2 3; do echo "step $step/9 loss 2"; done', launcher="srun", tasks=3)
    assert start(run) == 0 and steps(run) == [(1, 1), (1, 2), (1, 3)]


def test_a_log_in_pieces(tmp_path: Path) -> None:
    """A line counts when it is complete, or when the program has ended."""
    text = r"""printf 'step 1 loss 2\rstep 2 lo'; sleep 1.5; printf 'ss 3\000step 3 loss 4\nstep 4 lo'; sleep 1.5
    printf 'ss 5'"""
    run = trainer_run(tmp_path, text)
    assert start(run) == 0
    assert [(entry["step"], entry["loss"]) for entry in entries(run)] == [(1, 2), (2, 3), (3, 4), (4, 5)]


@pytest.mark.parametrize("chosen", [None, "generic", "bars"])
def test_a_bar_without_a_loss_is_progress(tmp_path: Path, chosen: str | None) -> None:
    bar = r"\rTraining:  50%%|###   | %s/3 [00:01<00:01,  1.00s/it]"
    text = f"for n in 1 2 3; do printf '{bar}' $n >&2; sleep 0.6; done"
    run = trainer_run(tmp_path, text, chosen)
    assert start(run) == 0
    assert {entry["total_steps"] for entry in entries(run)} == {3} and steps(run)[-1] == (1, 3)
    found = metrics.read_progress(source(run))
    assert found is not None and (found.steps_text, found.loss) == ("3/3", None)
