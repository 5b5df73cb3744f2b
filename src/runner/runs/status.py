"""What runs are doing: at most two questions to the scheduler for all of them, and what the run folders say.

Works without sacct: an attempt writes its exit code into the run folder, and squeue answers for the rest as long as
Slurm remembers the job. Without a scheduler it relies on the run folder alone.
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
    WAITS,
    Run,
    is_cancelled,
    is_over,
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
    """The status of each run, in order: at most two questions to squeue, however many runs there are."""
    runs = [with_newest_job(run) for run in runs]
    job_ids = [job_id for run in runs if run.scheduler == "slurm" for job_id in run.job_ids]
    queue, trouble = _queue(job_ids)
    runs, queue = _with_jobs_by_hand(runs, queue)
    return tuple(_with_folder(_settle(run, queue, trouble)) for run in runs)


def _with_folder(status: RunStatus) -> RunStatus:
    """The status, completed with what the run folder shows."""
    run = status.run
    attempts = run.attempts
    over = run.stopped if not status.active and status.state not in ("COMPLETED", "CANCELLED") else ""
    return replace(
        status,
        attempt=attempts[-1].number if attempts else 0,
        progress=metrics.read_progress(run.folder / "metrics.jsonl"),
        reason=over or status.reason,
        causes=tuple(attempt.cause for attempt in attempts),
        gpu_hours=gpu_hours(run, time.time()),
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


def _with_jobs_by_hand(
    runs: Sequence[Run], queue: Mapping[str, JobStatus]
) -> tuple[Sequence[Run], Mapping[str, JobStatus]]:
    """The runs and the queue with the jobs that somebody submitted in a run folder and that still wait.

    No file names them before they start; Slurm knows the folder that they were submitted in.
    """
    idle = [run for run in runs if run.scheduler == "slurm" and run.job_ids and not _live(run, queue)]
    try:
        done = process.run(slurm.work_folders(), check=False, timeout_seconds=_ANSWER_SECONDS) if idle else None
    except RunnerError:
        done = None
    jobs = slurm.parse_work_folders(done.stdout) if done else {}
    found = {run.name: jobs[folder] for run in idle if (folder := str(run.folder.resolve())) in jobs}
    with_jobs = [
        replace(run, job_ids=tuple(dict.fromkeys((*run.job_ids, found[run.name][0])))) if run.name in found else run
        for run in runs
    ]
    return with_jobs, {**queue, **dict(found.values())}


def _live(run: Run, queue: Mapping[str, JobStatus]) -> tuple[str, ...]:
    """The jobs of a run that wait or run."""
    return tuple(job_id for job_id in run.job_ids if job_id in queue and queue[job_id].state in ACTIVE)


def _settle(run: Run, queue: Mapping[str, JobStatus], trouble: str) -> RunStatus:
    code = run.newest.exit_code if run.newest else None
    if run.state == PREPARING or not run.job_id:
        return RunStatus(run, "PREPARING", "its launch was interrupted before it was submitted")
    if run.scheduler == "local":
        return _local(run)
    live = _live(run, queue)
    job_id = _job_that_counts(run, queue, live)
    known = queue.get(job_id)
    if known is not None:
        # a script that has written its exit code is only leaving, whatever it still tells others
        leaving = known.state in ("RUNNING", "COMPLETING") and _is_of(job_id, run) and is_over(run)
        state = _end_state(run, code) if leaving and code is not None else known.state
        if state not in ACTIVE and state != "COMPLETED" and is_cancelled(run):
            state = "CANCELLED"
        reason = run.cancel_reason if state == "CANCELLED" else known.reason
        ended = known.exit_code if known.exit_code is not None else code
        return RunStatus(
            run,
            state,
            reason,
            ended,
            known.nodes,
            known.elapsed,
            known.time_left if state in ACTIVE else "",
            job_id=job_id,
            live=live,
        )
    if code is not None:
        return _ended(run, code, trouble)
    if is_cancelled(run):
        return RunStatus(run, "CANCELLED", run.cancel_reason)
    if trouble:
        return RunStatus(run, "UNKNOWN", trouble)
    if run.after and not run.attempts:
        return RunStatus(run, "CANCELLED", f"not started: {' '.join(run.after)} did not end with exit code 0")
    return RunStatus(run, "LOST", "Slurm has forgotten the job, and it wrote no exit code (killed at a limit?)")


def _is_of(job_id: str, run: Run) -> bool:
    """Whether the newest attempt is that of this job; the attempts of an array's task name its other number."""
    return bool(run.attempts) and ("_" in job_id or run.attempts[-1].job_id == job_id)


def _job_that_counts(run: Run, queue: Mapping[str, JobStatus], live: Sequence[str]) -> str:
    """Of a run's jobs (a chain's links, restarts of the same file): the running, the next, or the newest that began."""
    if len(run.job_ids) == 1:
        return run.job_id
    running = [job_id for job_id in live if queue[job_id].state != "PENDING"]
    began = [job_id for job_id in (run.newest.job_id if run.newest else "",) if job_id in queue]
    known = [job_id for job_id in reversed(run.job_ids) if job_id in queue and not run.attempts]
    return (*running, *live, *began, *known, run.job_id)[0]


def _local(run: Run) -> RunStatus:
    alive = is_alive(run)
    code = run.newest.exit_code if run.newest else None  # after the look at the process, which may just have ended
    if code is not None and is_over(run) and (not alive or leads(run)):
        return _ended(run, code)
    if code is None and run.host not in ("", platform.node()):
        return RunStatus(
            run, "UNKNOWN", f"it runs without a scheduler: run `runner status` on {run.host}", nodes=run.host
        )
    if alive and not run.attempts and (waits := run.text(WAITS)):
        return RunStatus(run, "PENDING", f"waits for {waits}", nodes=run.host)
    if alive:
        return RunStatus(run, "RUNNING", nodes=run.host, elapsed=_elapsed(run))
    if code is not None:
        return _ended(run, code)
    if is_cancelled(run):
        return RunStatus(run, "CANCELLED", run.cancel_reason, nodes=run.host)
    if why := run.text("not-started"):
        return RunStatus(run, "CANCELLED", f"not started: {why}", nodes=run.host)
    return RunStatus(run, "LOST", "its processes are gone and it wrote no exit code (killed?)", nodes=run.host)


def is_alive(run: Run) -> bool:
    """Whether a local run's script, or a process that it left behind, still runs on this machine.

    The kernel does not reuse a session's number while the session has a process.
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
    reason = "it asked to be continued" if code == CONTINUE else trouble
    return RunStatus(run, state, run.cancel_reason if state == "CANCELLED" else reason, code, run.host, _elapsed(run))


def _end_state(run: Run, code: int) -> str:
    # a cancelled run that saved ends with 0 too
    return "CANCELLED" if is_cancelled(run) else "FAILED" if code else "COMPLETED"


def _elapsed(run: Run) -> str:
    """How long the newest attempt has run, or ran, as squeue writes it."""
    newest = run.newest
    if newest is None or newest.started is None:
        return ""
    seconds = int((newest.ended or time.time()) - newest.started)
    days, rest = divmod(max(seconds, 0), 86400)
    hours, minutes = rest // 3600, rest // 60 % 60
    shown = f"{hours}:{minutes:02}:{rest % 60:02}" if hours or days else f"{minutes}:{rest % 60:02}"
    return f"{days}-{shown}" if days else shown


def gpu_hours(run: Run, now: float) -> float | None:
    """The GPU hours of all attempts until `now`, Unix seconds; None where the run has no GPUs.

    A killed attempt leaves no end: its last sign of life counts, and for the newest one, which may run, `now`.
    """
    seconds = 0.0
    gpus_seen = False
    attempts = run.attempts
    for attempt in attempts:
        if attempt.started is None or not attempt.gpus:
            continue
        gpus_seen = True
        last = now if attempt == attempts[-1] and attempt.ended is None else attempt.last_sign
        seconds += attempt.gpus * max(0.0, (last or now) - attempt.started)
    return round(seconds / 3600, 3) if gpus_seen else None


SHORTEST, LONGEST, GROWTH = 2.0, 30.0, 1.3  # seconds between two questions; the pause grows while nothing changes


def watch(
    runs: Callable[[], Sequence[Run]],
    show: Callable[[tuple[RunStatus, ...]], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the status of the runs, with one query for all of them each time, until all have ended."""
    pause = SHORTEST
    before: tuple[object, ...] = ()
    while True:
        found = ask(runs())
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
