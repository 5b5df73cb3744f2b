"""What a run is doing follows from three witnesses: the scheduler, the processes, and what the attempt wrote down."""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from runner.errors import RunnerError
from runner.machine import sessions
from runner.machine.report import Quiet
from runner.runs import cancel, follow, status
from runner.runs.budget import use_of
from runner.runs.history import look
from runner.runs.run import CANCELLED, PREPARING, SUBMITTED, Run, find_run, load, save
from runner.runs.schedulers import slurm
from runner.runs.schedulers.scheduler import JobStatus

Settle = Callable[..., status.RunStatus]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run("sft-0001", tmp_path, "sft", "generic-slurm", "slurm", "2026", state=SUBMITTED, job_ids=("17",))


@pytest.fixture
def here(run: Run) -> Run:
    """A run of this machine whose process is this very test."""
    pid = os.getpid()
    mine = {"host": platform.node(), "process": sessions.identity(pid), "job_ids": (f"local-{pid}",)}
    return replace(run, scheduler="local", **mine)  # type: ignore[arg-type]


def attempt(run: Run, number: int, **texts: str) -> None:
    folder = run.folder / "attempts" / str(number)
    folder.mkdir(parents=True)
    for name, text in {"started": "", **texts}.items():
        (folder / name).write_text(text)


class Queue:
    """The squeue on PATH: it knows these jobs, and is asked about them by the lines of `asked`."""

    def __init__(self, folder: Path) -> None:
        self.program, self.asked = folder / "squeue", folder / "asked"

    def answer(self, jobs: Mapping[str, JobStatus], trouble: str = "") -> None:
        """Answer from now on as the real one would; `trouble`: its last words."""
        lines = [
            "|".join(
                (job_id, job.state, job.reason, job.nodes, job.elapsed, job.time_left, f"{job.exit_code or 0}:0", "")
            )
            for job_id, job in jobs.items()
        ]
        text = "\n".join(lines)
        end = f"echo '{trouble}' >&2; exit 1" if trouble else ""
        self.program.write_text(f"""#!/bin/sh
echo "$*" >>'{self.asked}'
case "$*" in *WorkDir*) exit ;; esac
cat <<'END'
{text}
END
{end}
""")
        self.program.chmod(0o755)


@pytest.fixture
def queue(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Queue:
    folder = tmp_path_factory.mktemp("bin")
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return Queue(folder)


@pytest.fixture
def settle(queue: Queue) -> Settle:
    """settle(RUN, JOBS, TROUBLE): the status of a run where squeue knows these jobs."""

    def ask(run: Run, jobs: Mapping[str, JobStatus] | None = None, trouble: str = "") -> status.RunStatus:
        queue.answer(jobs or {}, trouble)
        return status.ask([run])[0]

    return ask


def test_the_queue_is_believed_first(run: Run, settle: Settle) -> None:
    attempt(run, 1, exit_code="75\n")
    found = settle(run, {"17": JobStatus("PENDING", "BeginTime")})
    assert (found.state, found.reason, found.active) == ("PENDING", "BeginTime", True)


def test_an_exit_code_is_enough_when_the_queue_has_forgotten(run: Run, settle: Settle) -> None:
    attempt(run, 1, exit_code="0\n")
    attempt(run, 2, exit_code="3\n")
    found = settle(run, trouble="no answer")
    assert (found.state, found.exit_code, found.reason) == ("FAILED", 3, "squeue: no answer")


def test_the_gpu_hours_of_a_killed_attempt_end_with_its_last_sign_of_life(
    run: Run, queue: Queue, tmp_path: Path
) -> None:
    """Also while the next attempt waits. A budget does not count the run after a day."""
    run = replace(run, folder=tmp_path / "sft-0001", created="2026-01-01T10:00:00+00:00", most_gpu_hours=16.0)
    attempt(run, 1, started="started x\njob 17\ngpus 8\n", alive="")
    save(run)
    for name, seconds in (("started", 1000), ("alive", 4600)):
        os.utime(run.folder / "attempts/1" / name, (seconds, seconds))
    for state, hours in (("PENDING", 8.0), ("NODE_FAIL", 8.0), ("RUNNING", status.gpu_hours(run, time.time()))):
        queue.answer({"17": JobStatus(state)})
        assert status.ask([run])[0].gpu_hours == pytest.approx(hours, abs=1.0)
    assert use_of(tmp_path).jobs == 1
    queue.answer({})
    (found,) = status.ask([run])
    assert (found.state, found.gpu_hours, use_of(tmp_path)) == ("LOST", 8.0, (0.0, 0))


def test_a_run_that_may_have_another_attempt_is_unknown_while_squeue_fails(run: Run, settle: Settle) -> None:
    attempt(run, 1, exit_code="75\n")
    found = settle(replace(run, restarts=True), trouble="no answer")
    assert (found.state, found.exit_code, found.reason) == ("UNKNOWN", 75, "squeue: no answer")
    (run.folder / "stopped").write_text("no restarts left\n")
    assert settle(replace(run, restarts=True), trouble="no answer").state == "FAILED"


def test_the_users_variables_of_squeue_leave_no_job_out(
    run: Run, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.answer({"17": JobStatus("RUNNING")})
    text = queue.program.read_text().replace("cat", '[ -z "$SQUEUE_PARTITION" ] || exit 0\ncat', 1)
    queue.program.write_text(text)
    monkeypatch.setenv("SQUEUE_PARTITION", "debug")
    assert status.ask([run])[0].state == "RUNNING"


def test_attempts_are_ordered_as_numbers(run: Run) -> None:
    for number in (2, 10, 9):
        attempt(run, number)
    assert [attempt.number for attempt in run.attempts] == [2, 9, 10]


def test_how_further_attempts_were_started_is_told(run: Run, settle: Settle) -> None:
    """The reason of a running attempt is how it was started; JSON has all."""
    sentence = "lost nid002: the next attempt starts in this allocation, with nid003 instead of nid002"
    attempt(run, 1, exit_code="75\n", cause="time_limit\n", next="requeue\ntime_limit: requeueing this job\n")
    attempt(run, 2, exit_code="1\n", next=f"in_place\n{sentence}\nnid001,nid003\n")
    assert settle(run, {"17": JobStatus("RUNNING")}).reason == "after attempt 1: time_limit: requeueing this job"
    attempt(run, 3, next="")
    found = settle(run, {"17": JobStatus("RUNNING")})
    assert found.reason == f"after attempt 2: {sentence}"
    rungs = [(1, "requeue", "time_limit: requeueing this job"),
             (2, "in_place", sentence)]  # fmt: skip
    assert list(found.rungs) == look(run).record()["rungs"] == rungs and found.record()["rungs"] == tuple(rungs)
    assert settle(run, {"17": JobStatus("PENDING", "Priority")}).reason == "Priority"


def test_a_cancelled_run_says_so_whatever_code_it_left(run: Run, settle: Settle) -> None:
    attempt(run, 1, exit_code="143\n")
    assert settle(replace(run, state=CANCELLED), trouble="x").state == "CANCELLED"


def test_a_launch_that_was_broken_off(run: Run, settle: Settle) -> None:
    assert settle(replace(run, state=PREPARING, job_ids=())).state == "PREPARING"


def test_a_launch_that_was_broken_off_after_the_submission(run: Run, settle: Settle, tmp_path: Path) -> None:
    """Its record does not name the job, but the attempt does."""
    save(replace(run, state=PREPARING, job_ids=()))
    attempt(run, 1, started="started now\njob 17\n")
    assert (load(tmp_path).state, load(tmp_path).job_ids) == (SUBMITTED, ("17",))
    assert settle(load(tmp_path), {"17": JobStatus("RUNNING")}).state == "RUNNING"
    assert look(load(tmp_path)).state == "RUNNING"


def test_a_chain_that_slurm_does_not_take_whole_is_cancelled(
    run: Run, settle: Settle, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the run, whose first job may have started."""
    folder = tmp_path_factory.mktemp("slurm")
    refused = "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy"
    texts = {
        "sbatch": f"case $* in *afterany:17*) echo 18 ;; *) echo '{refused}' >&2; exit 1 ;; esac",
        "scancel": f"echo $* >{folder}/cancelled",
    }
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    with pytest.raises(RunnerError, match="sft-0001 is cancelled: job 3 of 5: sbatch rejected the job") as caught:
        slurm.start_chain(run, 5)
    assert caught.value.why == refused and (folder / "cancelled").read_text() == "17 18\n"
    assert (load(tmp_path).job_ids, settle(load(tmp_path)).state) == (("17", "18"), "CANCELLED")
    (folder / "scancel").write_text("#!/bin/sh\necho no controller >&2; exit 1\n")
    with pytest.raises(RunnerError, match=r"sft-0001 may still run \(scancel 17 18\): job 3 of 5: sbatch rejected"):
        slurm.start_chain(replace(run, job_ids=("17",)), 5)
    (folder / "scancel").unlink()
    monkeypatch.setenv("PATH", str(folder))
    (folder / "sbatch").write_text(f"#!/bin/sh\necho '{refused}' >&2; exit 1\n")
    with pytest.raises(RunnerError, match=r"sft-0001 may still run \(scancel 17\): job 2 of 5: sbatch rejected"):
        slurm.start_chain(replace(run, job_ids=("17",)), 5)
    assert settle(load(tmp_path)).state == "CANCELLED"


def test_a_live_process_of_ours_is_running(here: Run, settle: Settle) -> None:
    attempt(here, 1)
    found = settle(here)
    assert (found.state, found.elapsed) == ("RUNNING", "0:00")


def test_another_process_with_the_same_number_is_not_ours(here: Run, settle: Settle) -> None:
    """After a reboot, or when the kernel has come round to that number."""
    child = subprocess.Popen((sys.executable, "-c", "input()"), stdin=subprocess.PIPE)
    reused = replace(here, job_ids=(f"local-{child.pid}",))
    assert settle(reused).state == "LOST"
    child.communicate()


def test_a_run_of_another_machine_is_unknown_until_it_has_ended(here: Run, settle: Settle) -> None:
    there = replace(here, host="elsewhere", process="x:1", job_ids=("local-1",))
    assert settle(there).state == "UNKNOWN" and "elsewhere" in settle(there).reason
    attempt(there, 1, exit_code="0\n")
    assert settle(there).state == "COMPLETED"


def test_a_message_has_the_reason_if_it_says_more_than_the_exit_code(run: Run) -> None:
    """Slurm gives NonZeroExitCode only some time after the end."""
    for reason, told in (("", ""), ("NonZeroExitCode", ""), ("Resources", " (Resources)")):
        assert status.RunStatus(run, "FAILED", reason).told_reason == told


def test_the_code_that_wait_passes_on(run: Run) -> None:
    """The job's own; never 0 for a run that did not complete."""
    cases = {("COMPLETED", 0): 0, ("FAILED", 7): 7, ("TIMEOUT", 0): 1, ("CANCELLED", None): 1, ("NODE_FAIL", 0): 1}
    for (state, code), expected in cases.items():
        assert follow.result_code(status.RunStatus(run, state, exit_code=code)) == expected


def test_a_file_is_read_on_from_where_it_was_left(tmp_path: Path) -> None:
    tail = follow.Tail(tmp_path / "log")
    assert tail.read() == b""
    (tmp_path / "log").write_bytes(b"one\n")
    assert tail.read() == b"one\n"
    with (tmp_path / "log").open("ab") as log:
        log.write(b"tw\xff")
    assert (tail.read(), tail.read()) == (b"tw\xff", b"")


def test_following_a_run_that_has_ended_prints_all_and_returns(here: Run) -> None:
    attempt(here, 1, exit_code="4\n")
    here.log.write_text("all of it\n")
    ended = replace(here, process="x:1")
    got: list[bytes] = []
    found = follow.follow(ended, follow.Tail(ended.log), got.append, Quiet())
    assert (b"".join(got), found.state, found.exit_code) == (b"all of it\n", "FAILED", 4)


def test_following_goes_on_while_the_queue_does_not_answer(
    run: Run, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between two attempts, when the newest one has an exit code."""
    run = replace(run, restarts=True)
    attempt(run, 1, exit_code="75\n")
    queue.answer({}, "Socket timed out")
    assert status.ask([run])[0].state == "UNKNOWN"
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        attempt(run, 2, exit_code="0\n")
        queue.answer({"17": JobStatus("COMPLETED")})

    monkeypatch.setattr(follow, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    assert follow.follow(run, follow.Tail(run.log), print, Quiet()).state == "COMPLETED" and len(slept) == 1


def test_a_run_that_waits_for_its_next_attempt_is_asked_about_less_and_less_often(
    run: Run, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt(run, 1, exit_code="75\n")
    queue.answer({"17": JobStatus("PENDING", "Priority")})
    watch, now = follow.Watch(replace(run, restarts=True)), 1000.0

    def seconds_until_asked() -> float:
        nonlocal now
        begun = now
        monkeypatch.setattr(follow, "time", SimpleNamespace(monotonic=lambda: now))
        while watch.status() is None:
            now += 0.1
        return now - begun

    assert seconds_until_asked() == 0
    assert seconds_until_asked() == pytest.approx(2.0, abs=0.2)
    assert [seconds_until_asked() for _ in range(9)][-1] == pytest.approx(15.0, abs=0.2)
    (run.folder / "stopped").write_text("no restarts left\n")
    assert seconds_until_asked() == 0
    assert seconds_until_asked() == pytest.approx(0.5, abs=0.2)


def test_a_job_that_was_submitted_by_hand_is_the_one_that_counts(run: Run, queue: Queue, tmp_path: Path) -> None:
    """`cd RUN && sbatch job.sbatch` after `runner cancel`: the attempt's folder names the new job."""
    save(replace(run, state=CANCELLED))
    attempt(run, 1, started="job 17\n", exit_code="143\n", cause="cancelled\n")
    (tmp_path / "stop").write_text("runner cancel\n")
    attempt(run, 2, started="started now\njob 23\n")
    os.utime(tmp_path / "attempts/2/started", (2e9, 2e9))
    queue.answer({"17": JobStatus("CANCELLED", exit_code=143), "23": JobStatus("RUNNING", nodes="nid001")})
    (found,) = status.ask([load(tmp_path)])
    assert (found.state, found.job_id, found.live, found.active) == ("RUNNING", "23", ("23",), True)
    assert "--jobs=17,23 " in queue.asked.read_text() and found.run.job_id == "23"
    (tmp_path / "attempts/2/exit_code").write_text("0\n")
    queue.answer({})
    (found,) = status.ask([load(tmp_path)])
    assert (found.state, found.exit_code) == ("COMPLETED", 0)
    assert look(load(tmp_path)).state == "COMPLETED"


def test_a_job_that_was_submitted_by_hand_and_still_waits_is_seen_and_cancelled(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No file of the run folder names it yet; squeue says which folder it was submitted in.

    The same for a launch that was broken off after the submission.
    """
    folder = tmp_path / "sft-0001"
    folder.mkdir()
    run = replace(run, folder=folder)
    save(run)
    attempt(run, 1, started="job 17\n", exit_code="1\n", cause="script_failure\n")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "squeue").write_text(
        f"""#!/bin/sh
case "$*" in
*WorkDir*) echo '41|PENDING|Resources||0:00|1:00:00|0|/elsewhere   '
           echo '42|PENDING|Priority||0:00|1:00:00|0|{folder}   ' ;;
esac
"""
    )
    (bin_folder / "scancel").write_text(f'#!/bin/sh\necho "$*" >{tmp_path}/cancelled\n')
    for program in bin_folder.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_folder), prepend=":")
    broken_off = replace(load(folder), state=PREPARING, job_ids=())
    for each in (broken_off, load(folder)):
        (found,) = status.ask([each])
        assert (found.state, found.reason, found.live) == ("PENDING", "Priority", ("42",))
    assert [ended for _, ended in cancel.cancel([load(folder)], Quiet())] == [True]
    assert (tmp_path / "cancelled").read_text() == "42\n"
    (bin_folder / "squeue").write_text("#!/bin/sh\n")
    assert status.ask([load(folder)])[0].state == "CANCELLED"
    (folder / "attempts/1/exit_code").write_text("0\n")
    (folder / "attempts/1/ended").touch()
    os.utime(folder / "attempts/1/ended", (1000, 1000))
    assert status.ask([load(folder)])[0].state == "COMPLETED", "the attempt had ended well before the cancel"


def test_all_jobs_of_a_chain_are_cancelled_while_the_queue_does_not_answer(run: Run, queue: Queue) -> None:
    queue.answer({}, "timed out")
    scancel = queue.program.with_name("scancel")
    scancel.write_text(f'#!/bin/sh\necho "$*" >>{queue.asked}\n')
    scancel.chmod(0o755)
    cancel.cancel([replace(run, job_ids=("17", "18", "19"))], Quiet())
    assert queue.asked.read_text().splitlines()[-1] == "17 18 19"


def test_a_script_started_by_hand_on_this_machine_is_seen_and_ended(here: Run, tmp_path: Path) -> None:
    gone = replace(here, job_ids=("local-1",), process="x:1")
    attempt(gone, 1, exit_code="1\n", started="job local-1\n")
    script = subprocess.Popen(("sleep", "60"), cwd=tmp_path)
    attempt(gone, 2, started=f"job local-{script.pid}\n")
    assert status.ask([gone])[0].state == "RUNNING"
    assert [ended for _, ended in cancel.cancel([gone], Quiet())] == [True] or script.wait() < 0
    assert script.wait() == -15


def test_the_exit_code_that_is_written_beats_a_script_that_is_still_leaving(run: Run, settle: Settle) -> None:
    """The script tells others of its end before Slurm knows of it."""
    queue = {"17": JobStatus("RUNNING", nodes="nid001")}
    attempt(run, 1, started="job 17\n", exit_code="137\n")
    assert (settle(run, queue).state, settle(run, queue).exit_code) == ("FAILED", 137)
    assert settle(replace(run, restarts=True), queue).state == "RUNNING"  # another attempt may follow
    (run.folder / "stopped").write_text("no restarts left\n")
    assert settle(replace(run, restarts=True), queue).state == "FAILED"
    (run.folder / "attempts/1/cause").write_text("requeued\n")
    assert settle(run, queue).state == "RUNNING"
    attempt(run, 2, started="job 17\n")
    assert settle(run, queue).state == "RUNNING"


@pytest.mark.parametrize("slurms", ["FAILED", "CANCELLED", "COMPLETING"])
def test_a_cancelled_run_is_cancelled_whatever_slurm_and_the_log_say(run: Run, slurms: str, settle: Settle) -> None:
    attempt(run, 1, started="job 17\n", exit_code="1\n")
    (run.folder / "stop").write_text("runner cancel\n")
    (run.folder / "stopped").write_text("the file stop is there\n")
    os.utime(run.folder / "stop", (2e9, 2e9))
    cancelled = replace(run, state=CANCELLED)
    for queue in ({"17": JobStatus(slurms, "NonZeroExitCode", 1)}, {}):
        found = settle(cancelled, queue)
        assert (found.state, found.reason) == ("CANCELLED", "runner cancel")
    assert look(cancelled).state == "CANCELLED"


def test_a_job_id_of_a_submission_by_hand_finds_the_run(run: Run, tmp_path: Path) -> None:
    there = replace(run, folder=tmp_path / "sft-0001")
    attempt(there, 1, started="job 23\n")
    save(there)
    assert find_run("23", tmp_path).name == "sft-0001"
