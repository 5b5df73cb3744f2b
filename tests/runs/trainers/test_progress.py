"""A program that knows nothing of runner has progress: its steps and losses are read from its log."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from runner.project import Project
from runner.runs import metrics, trainer
from runner.runs.job import Restart
from tests.runs.scripts import command_job, run_locally, write_run
from tests.waiting import until

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


def entries(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_plain_loop_that_prints(tmp_path: Path) -> None:
    text = 'for n in 1 2 3; do echo "step $n/30 | loss: 2.$n | lr 1e-4"; sleep 0.6; done'
    run = trainer_run(tmp_path, text)
    assert start(run) == 0
    assert [(entry["step"], entry["total_steps"], entry["loss"]) for entry in entries(run)] == [
        (1, 30, 2.1), (2, 30, 2.2), (3, 30, 2.3)]  # fmt: skip
    found = metrics.read_progress(run / "metrics.jsonl")
    assert found is not None and (found.steps_text, found.loss) == ("3/30", 2.3)
    assert (run / "attempts/1/trainer").read_text() == "generic\n"


def steps(run: Path) -> list[tuple[int, int]]:
    """(attempt, step) of each entry"""
    return [(entry["attempt"], entry["step"]) for entry in entries(run)]


def causes(run: Path) -> list[str]:
    return [
        (run / f"attempts/{number + 1}/cause").read_text().strip()
        for number in range(len(list(run.glob("attempts/*"))))
    ]


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


def test_one_process_of_torchrun(tmp_path: Path) -> None:
    """Its output is in job.log and in a file of its own, and counts once."""
    run = trainer_run(tmp_path, "echo nothing")
    own = run / "attempts/1/node-0/x/attempt_0/0/stdout.log"
    own.parent.mkdir(parents=True)
    own.write_text("step 9 loss 2\n")
    script = f'RUNNER_RUN={run}; RUNNER_ATTEMPT={run}/attempts/1; . "$0"; declare -A read_bytes=(); logs_to_read'
    done = subprocess.run(("bash", "-uc", script, run / "payload/trainer.sh"), capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")
    (own.parents[1] / "1").mkdir()
    (own.parents[1] / "1/stdout.log").touch()
    done = subprocess.run(("bash", "-uc", script, run / "payload/trainer.sh"), capture_output=True, text=True)
    assert done.stdout == f"{own.parents[1]}/1/stdout.log\n"


def test_all_logs_are_read_as_of_the_same_moment(tmp_path: Path) -> None:
    """Otherwise a loss is read before the progress bar that was printed before it to another log."""
    run = trainer_run(tmp_path, "true")
    (run / "a.err").write_text("bar 1\n")
    (run / "b c.out").write_text("loss 1\n")
    (run / "tail").write_text(
        "#!/bin/sh\n[ $1 != -c ] || echo 2 | tee -a a.err >>'b c.out'; exec /usr/bin/tail \"$@\"\n"
    )
    (run / "tail").chmod(0o755)
    for name, written in (("a.err", 1000.25), ("b c.out", 1000.5)):
        os.utime(run / name, (written, written))
    script = "PATH=.:$PATH RUNNER_ATTEMPT=none old_state=; . payload/trainer.sh; "
    script += "declare -A read_bytes=([a.err]=0 [b\\ c.out]=0 [missing]=7); new_text"
    done = subprocess.run(("bash", "-uc", script), cwd=run, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (
        "\1f 0 1000.250 a.err\nbar 1\n\1e\n\1f 0 1000.500 b c.out\nloss 1\n\1e\n",
        "",
    )


def test_a_hang_is_found(tmp_path: Path) -> None:
    run = trainer_run(tmp_path, "echo step 1 loss 2; echo step 2 loss 2; exec sleep 600", hang_seconds=5)
    start(run)
    assert causes(run) == ["hang"] and steps(run) == [(1, 1), (1, 2)]


def test_whatever_a_program_prints_after_its_first_step_is_a_sign_of_life(tmp_path: Path) -> None:
    """It may evaluate for long. A program that prints no step never hangs."""
    text = """echo step 1 loss 2; until [ -e ../metrics.jsonl ]; do sleep 0.1; done
    rm -f "$RUNNER_ATTEMPT/heartbeat"; echo evaluating; until [ -e "$RUNNER_ATTEMPT/heartbeat" ]; do sleep 0.1; done"""
    run = trainer_run(tmp_path / "a", text)
    assert start(run) == 0
    run = trainer_run(tmp_path / "b", "echo downloading; sleep 2; echo done")
    assert start(run) == 0 and not (run / "attempts/1/heartbeat").exists()


def test_only_checkpoints_are_progress_once_there_is_one(tmp_path: Path) -> None:
    """Each attempt gets further than the one before, but none saves again: its steps are lost."""
    text = """n=${RUNNER_ATTEMPT##*/}; echo "step $((50 + n)) loss 2"; c=../checkpoints/checkpoint-50
    [ -e $c ] || { mkdir -p $c; echo '{}' >$c/trainer_state.json; }; exit 3"""
    run = trainer_run(tmp_path, text, restart=Restart(script_failure=9, without_checkpoint=2))
    assert start(run) == 3
    assert causes(run) == ["script_failure"] * 3  # the first one saved
    assert "without a new checkpoint (crash loop)" in (run / "stopped").read_text()


def test_a_log_in_pieces(tmp_path: Path) -> None:
    """A line counts when it is complete, or when the program has ended."""
    text = r"""printf 'step 1 loss 2\rstep 2 lo'; sleep 1.5; printf 'ss 3\000step 3 loss 4\nstep 4 lo'; sleep 1.5
    printf 'ss 5'"""
    run = trainer_run(tmp_path, text)
    assert start(run) == 0
    assert [(entry["step"], entry["loss"]) for entry in entries(run)] == [(1, 2), (2, 3), (3, 4), (4, 5)]


def test_a_log_that_cannot_be_read_does_not_delay_the_exit_code(tmp_path: Path) -> None:
    """A reader that hangs, as on a file system that does not answer, is ended with all that it has started."""
    run = trainer_run(tmp_path / "run", "echo step 1 loss 2; exit 3")
    (tmp_path / "bin").mkdir()
    text = """#!/bin/sh
case $* in *trainer.awk*) sleep 1000000 & echo $$ $! >>"$RUNNER_RUN/awk"; wait ;; esac
exec /usr/bin/awk "$@"
"""
    (tmp_path / "bin/awk").write_text(text)
    (tmp_path / "bin/awk").chmod(0o755)
    path = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "RUNNER_READ_SECONDS": "1"}
    with (run / "job.log").open("ab") as log:
        environ = {**QUICK, **path}
        done = run_locally(run, extra_environ=environ, capture_output=False, stdout=log, stderr=subprocess.STDOUT)
    assert (done.returncode, (run / "attempts/1/exit_code").read_text()) == (3, "3\n")
    text = (run / "job.log").read_text()
    assert "reading the end of the log took longer than 1 s" in text and "Killed" not in text
    started = (run / "awk").read_text().split()
    assert started
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started), "the end of the reader's processes")


HOSTILE = r"""
[[lines]]
match = 'step [0-9]+|`touch pwned`|"; touch pwned; "|[$](touch pwned)|%s|/'
step = 'step '
loss = 'loss '
saved = 'saved '
[checkpoints]
name = '$(touch pwned)`touch pwned`[0-9]*/'
needs = ['$(touch pwned)|`touch pwned`|x', 'a[$(touch pwned)]|x']
tracker = '$(touch pwned)'
arguments = ['--out']
"""
HOSTILE_PROGRAM = r"""
echo "step 1 loss 2"; echo 'step 1 saved $(touch pwned)`touch pwned`7'
checkpoint='../checkpoints/$(touch pwned)`touch pwned`5'; mkdir -p "$checkpoint"; echo >"$checkpoint/x"; exit 3
"""


def test_nothing_of_a_trainer_is_ever_executed(tmp_path: Path) -> None:
    """A pattern, a name and a path are text, whatever characters they have."""
    (tmp_path / "jobs/trainers").mkdir(parents=True)
    (tmp_path / "jobs/trainers/mine.toml").write_text(HOSTILE)
    project = Project(tmp_path, tmp_path, tmp_path)
    run = trainer_run(tmp_path / "run", HOSTILE_PROGRAM, restart=Restart(script_failure=1))
    (run / trainer.FILE).write_text(trainer.render(None, project, ["--out=$(touch pwned)`touch pwned`"]))
    assert start(run) == 3
    assert (run / "attempts/2/trainer").read_text() == "mine\n" and steps(run)[0] == (1, 1)
    assert not list(tmp_path.rglob("pwned*"))


NANOGPT = "iter 1: loss 2.5, time 12ms"  # an older version, without mfu


@pytest.mark.parametrize(
    ("chosen", "text", "expected"),
    [
        ("nanogpt", f"echo '{NANOGPT}'", 1),
        ("nanogpt", f"echo '{NANOGPT}'; [ $n = 2 ] || exit 75", 1),
        ("nanogpt", f"echo '{NANOGPT}'; exit 3", 0),  # it may not have reached its first step
        ("nanogpt", f"echo '{NANOGPT}, mfu 1.0%'", 0),
        (None, "echo nothing", 0),
        (trainer.NONE, "echo nothing", 0),
    ],
)
def test_a_trainer_that_finds_nothing_is_mentioned_once(
    tmp_path: Path, chosen: str | None, text: str, expected: int
) -> None:
    run = trainer_run(tmp_path, "n=${RUNNER_ATTEMPT##*/}; " + text, chosen, restart=Restart(time_limit=5))
    start(run)
    assert (run / "job.log").read_text().count("the trainer nanogpt has found no step in the log") == expected
    assert len(list(run.glob("attempts/*/unread"))) == expected


def test_a_trainer_that_finds_nothing_is_mentioned_while_the_program_runs(tmp_path: Path) -> None:
    text = f"""echo '{NANOGPT}'; until [ -e "$RUNNER_ATTEMPT/unread" ]; do sleep 0.1; done"""
    run = trainer_run(tmp_path, text, "nanogpt")
    with (run / "job.log").open("ab") as log:
        environ = {**QUICK, "RUNNER_UNREAD_SECONDS": "0"}
        run_locally(run, extra_environ=environ, capture_output=False, stdout=log, stderr=subprocess.STDOUT)
    assert (run / "job.log").read_text().count("has found no step") == 1


@pytest.mark.parametrize("chosen", [None, "generic", "bars"])
def test_a_bar_without_a_loss_is_progress(tmp_path: Path, chosen: str | None) -> None:
    bar = r"\rTraining:  50%%|###   | %s/3 [00:01<00:01,  1.00s/it]"
    text = f"for n in 1 2 3; do printf '{bar}' $n >&2; sleep 0.6; done"
    run = trainer_run(tmp_path, text, chosen)
    assert start(run) == 0
    assert {entry["total_steps"] for entry in entries(run)} == {3} and steps(run)[-1] == (1, 3)
    found = metrics.read_progress(run / "metrics.jsonl")
    assert found is not None and (found.steps_text, found.loss) == ("3/3", None)
    assert (run / "attempts/1/trainer").read_text() == "bars\n"
