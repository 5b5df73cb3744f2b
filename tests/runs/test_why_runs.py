"""`runner why RUN`: what the scheduler, the run folder and the logs of the newest attempt say together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.runs.metrics import Metrics, pace
from runner.runs.run import SUBMITTED, Run, save
from runner.runs.status import RunStatus
from runner.runs.why.explain import Answer, _state_text, _waiting, explain_run
from tests.lab.slurm import SlurmLab
from tests.waiting import until

ERROR = "Traceback (most recent call last):\n  File \"/home/u/train.py\", line 3, in main\n    f()\nKeyError: 'text'\n"


def make_run(folder: Path, name: str = "sft-0001", **values: Any) -> Run:
    """A run that ended long ago, without a scheduler unless told."""
    settings = {"scheduler": "local", "job_ids": ("local-999999999",), "process": "gone", "state": SUBMITTED, **values}
    run = Run(name, folder / name, "sft", "generic-slurm", created="2026", **settings)
    run.folder.mkdir(parents=True)
    save(run)
    return run


def attempt(run: Run, number: int, **texts: str) -> Path:
    folder = run.folder / "attempts" / str(number)
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


def why(folder: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environ = {**(env or os.environ), "RUNNER_RUNS": str(folder)}
    argv = (sys.executable, "-m", "runner", "why", "--site", "generic-slurm", *words)
    return subprocess.run(argv, env=environ, cwd=folder, capture_output=True, text=True, timeout=600)


def test_only_the_newest_attempt_is_explained_and_line_numbers_are_those_of_the_file(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt(run, 1, exit_code="1\n")
    attempt(run, 2, exit_code="1\n")
    run.log.write_text(
        f"job.sbatch: attempt 1 on nid001\nCUDA out of memory. Tried\njob.sbatch: attempt 2 on nid001\n{ERROR}"
    )
    answer = explain_run(run)
    assert answer.cause is not None and answer.cause.code == "key-missing"
    assert answer.evidence == f"{run.log}:7" and "attempt 2" in answer.state


def test_the_fix_for_an_own_script_names_no_environment_of_runner(tmp_path: Path) -> None:
    """It has none: `runner shell 'batch script'` does not exist."""
    for number, (line, code, fix) in enumerate(
        (
            ("slurm_script: line 4: pythonx: command not found", "127", "run `command -v pythonx` in the script"),
            ("ModuleNotFoundError: No module named 'trl'", "1", "after its `module load` and `activate` lines"),
            ("PermissionError: [Errno 13] Permission denied: '/d'", "1", "also in the container (`ls -ld"),
        )
    ):
        run = make_run(tmp_path, f"own-000{number}", environment="batch script")
        (run.folder / "submit.sh").write_text("#!/bin/bash\n")
        attempt(run, 1, exit_code=f"{code}\n")
        run.log.write_text(f"{line}\n")
        cause = explain_run(run).cause
        assert cause is not None and fix in cause.fix and "runner shell" not in cause.fix, cause


def test_why_earlier_attempts_were_followed_is_noted(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt(run, 1, exit_code="1\n", next="in_place\nnid002 is lost: nid003 takes its place\nnid001,nid003\n")
    attempt(run, 2, exit_code="1\n")
    run.log.write_text(f"job.sbatch: attempt 2 on nid001\n{ERROR}")
    assert explain_run(run).notes == ("attempt 1: nid002 is lost: nid003 takes its place",)


def test_an_exit_code_is_that_of_the_attempt_that_has_ended(tmp_path: Path) -> None:
    """While a run waits for its next attempt, or is between two, the code is of the attempt before."""
    run = make_run(tmp_path)
    attempt(run, 1, exit_code="1\n")
    attempt(run, 2, exit_code="1\n")
    ended = "after attempt 2 ended with exit code 1"
    assert _state_text(RunStatus(run, "PENDING", "BeginTime", 1)) == f"PENDING (BeginTime), {ended}"
    assert _state_text(RunStatus(run, "RUNNING", exit_code=1)) == f"RUNNING, {ended}"
    assert _state_text(RunStatus(run, "RUNNING")) == "RUNNING, attempt 2"
    assert _state_text(RunStatus(run, "FAILED", "x", 1)) == "FAILED, exit code 1, attempt 2 (x)"


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("", "pending-none"),
        ("launch failed requeued held", "pending-held-requeue"),
        ("launch_failed_requeued_held", "pending-held-requeue"),
        ("job requeued in held state", "pending-held-requeue"),
        ("SomethingNew", "pending-unknown"),
    ],
)
def test_a_reason_of_several_words_is_known_with_blanks_and_with_underscores(
    reason: str, code: str, tmp_path: Path
) -> None:
    cause = _waiting(Answer("sft-0001"), RunStatus(make_run(tmp_path), "PENDING", reason)).cause
    assert cause is not None and cause.code == code


def test_the_rank_follows_from_torchruns_folders(tmp_path: Path) -> None:
    run = make_run(tmp_path, nodes=2, processes_per_node=2)
    folder = attempt(run, 1, exit_code="1\n") / "node-1" / "17_x" / "attempt_0" / "1"
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_text(ERROR)
    answer = explain_run(run)
    assert answer.rank == 3 and answer.cause is not None and answer.cause.code == "key-missing"


def test_where_no_log_speaks_the_exit_code_does(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt(run, 1, exit_code="137\n", first_failure="137 task 5 node 1\n")
    run.log.write_text("step 1\n")
    answer = explain_run(run)
    assert answer.cause is not None and (answer.cause.code, answer.rank) == ("exit-killed", 5)


def test_the_rank_that_the_run_folder_noted_completes_the_evidence(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt(run, 1, exit_code="1\n", first_failure="1 task 6 node 1\n")
    run.log.write_text(ERROR)
    assert explain_run(run).rank == 6


def test_a_run_that_ended_well_has_no_cause_but_may_have_been_slow(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt(run, 1, exit_code="0\n")
    run.log.write_text(f"{ERROR}nid001:1:1 [0] NCCL INFO Using network Socket\n")
    answer = explain_run(run)
    assert answer.fine and answer.cause is None and [each.cause.code for each in answer.slow] == ["nccl-over-sockets"]


EPILOGUE = """\
job.sbatch: attempt 1 ended with exit code {code}
job.sbatch: no further attempt: ended by script_failure for time 1, and the job file allows 0 restarts after that
"""
SRUN = "srun: error: nid002: task 1: Exited with exit code {code}\nsrun: Terminating StepId=9.0\n"
CANCELLED = """\
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
slurmstepd-nid001: error: *** JOB 9 ON nid001 CANCELLED AT 2026-11-21T16:40:26 ***
slurmstepd-nid001: error: *** STEP 9.0 ON nid001 CANCELLED AT 2026-11-21T16:40:26 ***
"""


def ended(folder: Path, code: int, log: str, **values: Any) -> Run:
    run = make_run(folder, **values)
    attempt(run, 1, exit_code=f"{code}\n")
    run.log.write_text(log + EPILOGUE.format(code=code))
    return run


def test_our_own_last_words_and_sruns_summary_are_not_the_cause(tmp_path: Path) -> None:
    run = ended(tmp_path, 3, "mytool: fatal: no flux\n" + SRUN.format(code=3))
    answer = explain_run(run)
    assert answer.cause is None and [each.text for each in answer.telling] == ["mytool: fatal: no flux"]
    assert {each.cause.code for each, _ in answer.followed} == {"task-exit", "restarts-used-up"}


@pytest.mark.parametrize(("code", "cause"), [(2, "exit-usage"), (137, "exit-killed"), (139, "exit-segmentation-fault")])
def test_an_exit_code_tells_more_than_our_own_last_words(tmp_path: Path, code: int, cause: str) -> None:
    run = ended(tmp_path, code, SRUN.format(code=code) + CANCELLED.splitlines()[0] + "\n")
    answer = explain_run(run)
    assert answer.cause is not None and (answer.cause.code, answer.line) == (cause, f"exit code {code}")


def test_a_batch_script_that_was_killed_is_not_called_cancelled(tmp_path: Path) -> None:
    answer = explain_run(ended(tmp_path, 137, CANCELLED))
    assert answer.cause is not None and answer.cause.code == "exit-killed"


def test_where_only_a_summary_is_known_it_is_the_answer(tmp_path: Path) -> None:
    answer = explain_run(ended(tmp_path, 3, SRUN.format(code=3)))
    assert answer.cause is not None and answer.cause.code == "task-exit"


def test_of_a_cancelled_run_the_cancel_is_the_cause(tmp_path: Path) -> None:
    run = ended(tmp_path, 143, CANCELLED, state="cancelled")
    answer = explain_run(run)
    assert answer.cause is not None and answer.cause.code == "cancelled"
    assert answer.evidence == f"{run.log}:2" and answer.first is not None and answer.first.time is not None
    assert "restarts-used-up" in {each.cause.code for each, _ in answer.followed}


def test_an_error_before_the_cancel_is_noted(tmp_path: Path) -> None:
    run = ended(tmp_path, 143, "torch.OutOfMemoryError: CUDA out of memory. Tried\n" + CANCELLED, state="cancelled")
    answer = explain_run(run)
    assert answer.cause is not None and answer.cause.code == "cancelled"
    assert f"before that, {run.log}:1 shows gpu-out-of-memory: " in answer.notes[0]


def test_a_cancelled_run_without_a_log_says_so(tmp_path: Path) -> None:
    answer = explain_run(make_run(tmp_path, state="cancelled"))
    assert answer.cause is not None and (answer.cause.code, answer.evidence) == ("cancelled", "run.json")
    assert "sacct" not in answer.cause.fix  # without a scheduler, there is none


def test_a_run_whose_dependency_failed_was_not_cancelled_by_somebody(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run.folder / "not-started").write_text("prep-0001 ended with exit code 1\n")
    answer = explain_run(run)
    assert answer.cause is not None and answer.cause.code == "pending-dependency-never"


def test_a_run_that_the_scheduler_has_lost_says_so(tmp_path: Path) -> None:
    """The fix submits it again, as its folder allows."""
    for name, file, by_hand in (
        ("sft-0001", "job.sbatch", "cd {} && bash job.sbatch >> job.log 2>&1"),
        ("own-0001", "submit.sh", "bash {}/submit.sh"),
    ):
        run = make_run(tmp_path, name)
        (run.folder / file).touch()
        attempt(run, 1)
        answer = explain_run(run)
        assert answer.cause is not None and answer.cause.code == "run-lost"
        assert f"`{by_hand.format(run.folder)}`" in answer.cause.fix and "sacct" not in answer.cause.fix


def test_a_failed_run_is_never_said_to_be_fine_and_its_last_lines_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt(run, 1, exit_code="3\n")
    run.log.write_text("step 1\nstep 2\njob.sbatch: attempt 1 ended with exit code 3\n")
    said = why(tmp_path, run.name)
    assert said.returncode == 1 and "no line shows a failure" not in said.stdout
    assert "          step 1\n          step 2\n" in said.stdout and "job.sbatch" not in said.stdout
    assert f"try:      `runner logs {run.name}`" in said.stdout


@pytest.mark.parametrize("label", ["", "0: ", "[rank 1] "])
def test_an_error_of_runner_itself_is_told_with_its_own_reason_and_fix(tmp_path: Path, label: str) -> None:
    first = "runner: the mount source /data does not exist on nid001"
    others = ("  because: mounts.0 asks for /data", "  try:     create it")
    rest = "".join(f"{label if label.startswith('0') else ''}{line}\n" for line in others)
    run = ended(tmp_path, 1, f"{label}{first}\n{rest}")
    answer = explain_run(run)
    assert answer.cause is not None and answer.cause.code == "runner-message"
    assert (answer.evidence, answer.line) == (f"{run.log}:1", f"{label}{first}")
    assert (answer.cause.explanation, answer.cause.fix) == ("mounts.0 asks for /data", "create it")


def test_what_is_known_stands_in_the_commands_to_try(tmp_path: Path) -> None:
    log = "srun: lab\nslurmstepd-nid001: error: execve(): train$x: No such file or directory\n"
    answer = explain_run(ended(tmp_path, 2, log, environment="pytorch", scheduler="local"))
    assert answer.cause is not None and answer.cause.code == "program-missing"
    assert "`runner shell pytorch -- which 'train$x'`" in answer.cause.fix


def metrics(path: Path, rates: list[float], pause: float = 1.0, end: float = 1000.0) -> Path:
    times = [end - pause * (len(rates) - 1 - index) for index in range(len(rates))]
    lines = [{"step": step, "time": at, "tokens_per_second": rate}
             for step, (at, rate) in enumerate(zip(times, rates, strict=True), 1)]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9')
    return path


def test_the_metrics_tell_a_run_that_stands_still_from_one_that_is_slower_than_it_was(tmp_path: Path) -> None:
    path = metrics(tmp_path / "metrics.jsonl", [1000.0] * 60)
    assert (found := pace(Metrics.of_file(path), now=1005.0)) and not found.stuck and not found.note
    assert (found := pace(Metrics.of_file(path), now=1400.0)) and found.stuck and "400 s" in found.note
    assert (found := pace(Metrics.of_file(path), now=9000.0, running=False)) and not found.stuck
    metrics(path, [1000.0] * 60 + [400.0] * 20)
    assert (found := pace(Metrics.of_file(path), now=1001.0)) and "40%" in found.note
    assert pace(Metrics.of_file(tmp_path / "none")) is None


def test_a_long_step_is_no_standstill(tmp_path: Path) -> None:
    path = metrics(tmp_path / "metrics.jsonl", [10.0] * 30, pause=200.0)
    assert (found := pace(Metrics.of_file(path), now=2200.0)) and not found.stuck


def test_the_command_says_cause_evidence_code_and_fix_and_json_says_the_same(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    attempt(run, 1, exit_code="1\n")
    run.log.write_text(ERROR)
    said = why(tmp_path, run.name)
    assert said.returncode == 0 and not said.stderr
    assert f"evidence: {run.log}:4: KeyError: 'text'" in said.stdout
    assert "code:     /home/u/train.py:3 in main: f()" in said.stdout and "try:      " in said.stdout
    record = json.loads(why(tmp_path, "last", "--json").stdout)
    assert record["cause"]["code"] == "key-missing" and record["frame"]["line"] == 3
    assert (record["evidence"]["file"], record["evidence"]["number"]) == (str(run.log), 4)


def test_exit_codes_tell_known_from_unknown_and_from_wrong_use(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("quux: fatal: the flux capacitor failed\n")
    unknown = why(tmp_path, "--log", str(log))
    assert unknown.returncode == 1 and "cause:    unknown" in unknown.stdout and f"{log}:1: quux" in unknown.stdout
    log.write_text("all is well\n")
    assert why(tmp_path, "--log", str(log)).returncode == 0
    assert why(tmp_path, "last", "--log", str(log)).returncode == 2
    assert "because:" in why(tmp_path, "nosuch").stderr


@pytest.fixture
def submitted(plain_slurm: SlurmLab, tmp_path: Path) -> Any:
    """submitted(NAME, SCRIPT, FLAG…): a run of the lab's Slurm."""

    def submit(name: str, script: str, *flags: str) -> Run:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "job.sbatch").write_text(f"#!/bin/bash\n{script}\n")
        argv = ("sbatch", "--parsable", "--output=/dev/null", *flags, "job.sbatch")
        job_id = plain_slurm.run(argv, cwd=folder).stdout.strip()
        (folder / "job.sbatch").unlink()
        folder.rmdir()
        return make_run(tmp_path, name, scheduler="slurm", job_ids=(job_id,), process="")

    return submit


def test_reasons_for_waiting_are_explained_on_a_real_cluster(
    plain_slurm: SlurmLab, submitted: Any, tmp_path: Path
) -> None:
    expected = {
        submitted("held", "true", "--hold").name: "pending-held-user",
        submitted("later", "true", "--begin=now+1hour").name: "pending-begin-time",
        submitted("after", "true", f"--dependency=afterok:{submitted('first', 'true', '--hold').job_id}").name:
            "pending-dependency",
    }  # fmt: skip
    pending = ("squeue", "--noheader", "--states=PENDING", "--format=%r")
    until(lambda: "None" not in plain_slurm.run(pending).stdout, "the pass of the scheduler that gives the reasons")
    for name, code in expected.items():
        record = json.loads(why(tmp_path, name, "--json", env=plain_slurm.environ).stdout)
        assert (record["cause"]["code"], record["evidence"]["place"]) == (code, "squeue")
        assert record["known"] and record["state"].startswith("PENDING")


def test_a_job_that_slurm_ended_is_explained_by_its_state_where_no_log_speaks(
    plain_slurm: SlurmLab, submitted: Any, tmp_path: Path
) -> None:
    run = submitted("ended", "sleep 600")
    plain_slurm.wait_for(run.job_id, "RUNNING")
    plain_slurm.run(("scancel", run.job_id))
    plain_slurm.wait_for(run.job_id, "CANCELLED")
    record = json.loads(why(tmp_path, "ended", "--json", env=plain_slurm.environ).stdout)
    assert (record["cause"]["code"], record["evidence"]["place"]) == ("cancelled", "Slurm")
