"""What runs are doing: one question to the scheduler for all of them, and the run folder's own words.

Works without sacct: an attempt writes its exit code into the run folder, and squeue answers for the rest as long as
Slurm remembers the job. Works without any scheduler for what the run folder tells.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from runner.errors import RunnerError
from runner.machine import process, sessions
from runner.runs import metrics
from runner.runs.metrics import Progress
from runner.runs.run import (
    PREPARING,
    STOP,
    STOPPED,
    WAITS,
    Run,
    exit_code,
    is_cancelled,
    is_over,
    job_of,
    reloaded,
    with_newest_job,
)
from runner.runs.schedulers import slurm
from runner.runs.schedulers.slurm import JobStatus

ACTIVE = slurm.UNFINISHED
_ANSWER_SECONDS = 30.0  # a busy controller takes its time; one that is away must not block for minutes
CONTINUE = 75  # a job's exit code that means: continue me


@dataclass(frozen=True)
class RunStatus:
    """What a run is doing now."""

    run: Run
    state: str
    """Slurm's word (PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, ...), PREPARING for a launch that was
    never submitted, LOST where neither the run folder nor the scheduler knows how it ended"""
    reason: str = ""
    exit_code: int | None = None
    """of the newest attempt that has ended"""
    nodes: str = ""
    elapsed: str = ""
    time_left: str = ""
    """of the time limit"""
    attempt: int = 0
    """the newest attempt's number; 0 before the first"""
    progress: Progress | None = None
    """None where the run writes no metrics"""
    job_id: str = ""
    """of the job that counts now: of several, the one that runs, else the next one, else that of the newest attempt"""
    live: tuple[str, ...] = ()
    """the jobs that wait or run"""
    causes: tuple[str, ...] = ()
    """why each attempt has ended"""
    gpu_hours: float | None = None
    """of all attempts so far; None without GPUs"""

    @property
    def active(self) -> bool:
        """Whether it waits or runs."""
        return self.state in ACTIVE

    def record(self) -> dict[str, object]:
        """What --json prints."""
        own = {key: value for key, value in asdict(self).items() if key not in ("run", "progress", "live")}
        run = self.run
        known = self.progress.record(running=self.state == "RUNNING") if self.progress else {}
        own |= {"job_id": self.job_id or run.job_id, "gpu_hours_limit": run.gpu_hours or None}
        return {"run": run.name, "job_ids": list(run.job_ids), "job": run.job, "site": run.site,
                "scheduler": run.scheduler, "created": run.created, "environment": run.environment,
                "attempts": len(run.attempts), "folder": str(run.folder), "log": str(run.log), **own,
                **dict.fromkeys(metrics.NAMES), **known}  # fmt: skip


def ask(runs: Sequence[Run]) -> tuple[RunStatus, ...]:
    """The status of each run, in order; squeue is asked once for all of them."""
    runs = [with_newest_job(run) for run in runs]
    job_ids = [job_id for run in runs if run.scheduler == "slurm" for job_id in run.job_ids]
    queue, trouble = _queue(job_ids)
    return tuple(_with_folder(_settle(run, queue, trouble)) for run in runs)


def _with_folder(status: RunStatus) -> RunStatus:
    """The status with what the run folder tells beside it."""
    attempts = status.run.attempts
    number = int(attempts[-1].name) if attempts else 0
    told = read_attempts(status.run, time.time())
    over = told.stopped if not status.active and status.state not in ("COMPLETED", "CANCELLED") else ""
    return replace(
        status,
        attempt=number,
        progress=metrics.read_progress(status.run.folder / "metrics.jsonl"),
        reason=over or status.reason,
        causes=told.causes,
        gpu_hours=told.gpu_hours,
    )


def _queue(job_ids: Sequence[str]) -> tuple[Mapping[str, JobStatus], str]:
    """What squeue says about the jobs that it knows, and why it says nothing at all."""
    if not job_ids:
        return {}, ""
    try:
        done = process.run(slurm.status(job_ids), check=False, timeout_seconds=_ANSWER_SECONDS)
    except RunnerError as error:
        return {}, f"{error.what}: {error.why}"
    if done.exit_code != 0 and "Invalid job id" not in done.stderr:
        return {}, f"squeue: {(done.stderr.strip() or 'no answer').splitlines()[-1]}"
    return slurm.parse_status(done.stdout), ""


def _settle(run: Run, queue: Mapping[str, JobStatus], trouble: str) -> RunStatus:
    code = exit_code(run)
    if run.state == PREPARING or not run.job_id:
        return RunStatus(run, "PREPARING", "its launch was broken off before it was submitted")
    if run.scheduler == "local":
        return _local(run)
    live = tuple(job_id for job_id in run.job_ids if job_id in queue and queue[job_id].state in ACTIVE)
    job_id = _job_that_counts(run, queue, live)
    known = queue.get(job_id)
    if known is not None:
        # a script that has written its exit code is only leaving, whatever it still tells others
        leaving = known.state in ("RUNNING", "COMPLETING") and _is_of(job_id, run) and is_over(run)
        state = _end_state(run, code) if leaving and code is not None else known.state
        if state not in ACTIVE and state != "COMPLETED" and is_cancelled(run):
            state = "CANCELLED"
        reason = _cancel_reason(run) if state == "CANCELLED" else known.reason
        ended = known.exit_code if known.exit_code is not None else code
        return RunStatus(
            run, state, reason, ended, known.nodes, known.elapsed, known.time_left if state in ACTIVE else "",
            job_id=job_id, live=live,
        )  # fmt: skip
    if code is not None:
        return _ended(run, code, trouble)
    if is_cancelled(run):
        return RunStatus(run, "CANCELLED", _cancel_reason(run))
    if trouble:
        return RunStatus(run, "UNKNOWN", trouble)
    if run.after and not run.attempts:
        return RunStatus(run, "CANCELLED", f"not started: {' '.join(run.after)} did not end as it should")
    return RunStatus(run, "LOST", "Slurm has forgotten the job, and it wrote no exit code (killed at a limit?)")


def _is_of(job_id: str, run: Run) -> bool:
    """Whether the newest attempt is that of this job; the attempts of an array's task name its other number."""
    return bool(run.attempts) and ("_" in job_id or job_of(run.attempts[-1]) == job_id)


def _cancel_reason(run: Run) -> str:
    return _text(run.folder / STOP)


def _job_that_counts(run: Run, queue: Mapping[str, JobStatus], live: Sequence[str]) -> str:
    """Of a run's jobs (a chain's links, restarts of the same file): the running, the next, or the newest that began."""
    if len(run.job_ids) == 1:
        return run.job_id
    running = [job_id for job_id in live if queue[job_id].state != "PENDING"]
    began = [job_id for job_id in (job_of(run.attempts[-1]) if run.attempts else "",) if job_id in queue]
    known = [job_id for job_id in reversed(run.job_ids) if job_id in queue and not run.attempts]
    return (*running, *live, *began, *known, run.job_id)[0]


def _local(run: Run) -> RunStatus:
    alive = is_alive(run)
    code = exit_code(run)  # after the look at the process, which may just have ended
    if code is not None and is_over(run) and (not alive or leads(run)):
        return _ended(run, code)
    if code is None and run.host not in ("", platform.node()):
        return RunStatus(run, "UNKNOWN", f"it runs without a scheduler on {run.host}: ask there", nodes=run.host)
    if alive and not run.attempts and (waits := _text(run.folder / WAITS)):
        return RunStatus(run, "PENDING", f"waits for {waits}", nodes=run.host)
    if alive:
        return RunStatus(run, "RUNNING", nodes=run.host, elapsed=_elapsed(run))
    if code is not None:
        return _ended(run, code)
    if is_cancelled(run):
        return RunStatus(run, "CANCELLED", _cancel_reason(run), nodes=run.host)
    if why := _text(run.folder / "not-started"):
        return RunStatus(run, "CANCELLED", f"not started: {why}", nodes=run.host)
    return RunStatus(run, "LOST", "its processes are gone and it wrote no exit code (killed?)", nodes=run.host)


def is_alive(run: Run) -> bool:
    """Whether a local run's script, or a process that it left behind, still runs on this machine.

    The kernel gives a session's number to nobody while the session has a process.
    """
    pid = local_pid(run)
    if by_hand(run):
        return leads(run)
    now = sessions.identity(pid)
    return bool(run.process) and (now == run.process or (not now and bool(sessions.members(pid))))


def leads(run: Run) -> bool:
    """Whether the batch script itself of a local run is there."""
    pid = local_pid(run)
    try:
        return Path(f"/proc/{pid}/cwd").samefile(run.folder) if by_hand(run) else sessions.identity(pid) == run.process
    except OSError:
        return False


def by_hand(run: Run) -> bool:
    """Whether somebody has started the newest attempt of a local run by `bash job.sbatch` in its folder."""
    return len(run.job_ids) > 1


def local_pid(run: Run) -> int:
    """The process id in `local-PID`."""
    return int(run.job_id.removeprefix("local-"))


def _ended(run: Run, code: int, trouble: str = "") -> RunStatus:
    state = _end_state(run, code)
    reason = "it asks to be continued" if code == CONTINUE else trouble
    return RunStatus(run, state, _cancel_reason(run) if state == "CANCELLED" else reason, code, run.host, _elapsed(run))


def _end_state(run: Run, code: int) -> str:
    # a cancelled run that saved in good order ends with 0 too
    return "CANCELLED" if is_cancelled(run) else "FAILED" if code else "COMPLETED"


def _elapsed(run: Run) -> str:
    """How long the newest attempt has run, or ran, as squeue writes it."""
    if not run.attempts:
        return ""
    started, ended = _time(run.attempts[-1] / "started"), _time(run.attempts[-1] / "ended")
    if started is None:
        return ""
    seconds = int((ended or time.time()) - started)
    days, rest = divmod(max(seconds, 0), 86400)
    hours, minutes = rest // 3600, rest // 60 % 60
    shown = f"{hours}:{minutes:02}:{rest % 60:02}" if hours or days else f"{minutes}:{rest % 60:02}"
    return f"{days}-{shown}" if days else shown


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _time(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


_SIGNS_OF_LIFE = ("ended", "cause", "alive", "first_failure")  # payload/restart.sh counts the same


@dataclass(frozen=True)
class Attempts:
    """The attempts of a run, as their folders tell them."""

    causes: tuple[str, ...] = ()
    """of each attempt, oldest first; empty text where it has not ended, or was killed"""
    gpu_hours: float | None = None
    """of all attempts so far; None where the run has no GPUs"""
    stopped: str = ""
    """why no attempt follows; empty where one may, or where nothing is started anew anyway"""
    job_id: str = ""
    """of the newest attempt"""


def read_attempts(run: Run, now: float) -> Attempts:
    """What the run folder tells at `now`, Unix seconds; the newest attempt runs until then when it has left no end."""
    folders = run.attempts
    seconds = 0.0
    gpus_seen = False
    for folder in folders:
        started = _time_in(folder / "started")
        gpus = int(_line(folder / "started", "gpus") or 0)
        if started is None or not gpus:
            continue
        gpus_seen = True
        ended = _time_in(folder / "ended")
        last = max((time for name in _SIGNS_OF_LIFE if (time := _time_in(folder / name))), default=started)
        seconds += gpus * max(0.0, (now if folder == folders[-1] and ended is None else last) - started)
    return Attempts(
        tuple(_text(folder / "cause") for folder in folders),
        round(seconds / 3600, 3) if gpus_seen else None,
        _text(run.folder / STOPPED),
        job_of(folders[-1]) if folders else "",
    )


def _line(path: Path, key: str) -> str:
    """The rest of the line of a file that begins with a key."""
    lines = (line.partition(" ") for line in _text(path).splitlines())
    return next((value for name, _, value in lines if name == key), "")


def _time_in(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


SHORTEST, LONGEST, GROWTH = 2.0, 30.0, 1.3  # seconds between two questions; the pause grows while nothing changes


def watch(
    runs: Sequence[Run], show: Callable[[tuple[RunStatus, ...]], None], sleep: Callable[[float], None] = time.sleep
) -> None:
    """Show the status of the runs, one question for all of them each time, until none waits or runs any more."""
    pause = SHORTEST
    before: tuple[object, ...] = ()
    while True:
        found = ask([reloaded(run) for run in runs])
        show(found)
        if not any(goes_on(status) for status in found):
            return
        states = tuple((status.state, status.reason, status.attempt) for status in found)
        pause = SHORTEST if states != before else min(pause * GROWTH, LONGEST)
        before = states
        sleep(pause)


def goes_on(status: RunStatus) -> bool:
    """Whether there is something to wait for: it waits or runs, or the scheduler does not answer just now."""
    return status.active or (status.state == "UNKNOWN" and status.run.scheduler == "slurm")
