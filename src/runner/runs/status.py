"""The status of runs, from one scheduler query for all of them, and from their run folders.

sacct is not needed: an attempt writes its exit code into the run folder, and squeue knows the rest while Slurm
remembers the job. Without a scheduler, only the run folder is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from runner.runs import metrics
from runner.runs.attempt import Rung
from runner.runs.metrics import Progress
from runner.runs.progress import metrics_of
from runner.runs.run import Run, with_newest_job
from runner.runs.schedulers.scheduler import ACTIVE, JobStatus, by_scheduler


@dataclass(frozen=True)
class RunStatus:
    """The status of a run."""

    run: Run
    state: str
    """Slurm's state (PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, ...), PREPARING for a launch that
    was interrupted before it submitted a job, or LOST if neither the run folder nor the scheduler knows how it ended"""
    reason: str = ""
    exit_code: int | None = None
    """the exit code of the newest attempt that has ended"""
    nodes: str = ""
    elapsed: str = ""
    time_left: str = ""
    """until the time limit, in Slurm's format"""
    attempt: int = 0
    """the number of the newest attempt; 0 before the first"""
    progress: Progress | None = None
    """None if the run writes no metrics"""
    job_id: str = ""
    """the job that determines the status: the running one, or the next one, or that of the newest attempt"""
    live: tuple[str, ...] = ()
    """the jobs that wait or run"""
    causes: tuple[str, ...] = ()
    """why each attempt ended"""
    rungs: tuple[Rung, ...] = ()
    """how each further attempt was started"""
    gpu_hours: float | None = None
    """for all attempts so far; None without GPUs"""

    @property
    def active(self) -> bool:
        """Whether the run waits or runs."""
        return self.state in ACTIVE

    @property
    def told_reason(self) -> str:
        """` (REASON)` for a message; empty without one, and for Slurm's word for a failure that the exit code shows."""
        return f" ({self.reason})" if self.reason not in ("", "NonZeroExitCode") else ""

    @property
    def may_be_active(self) -> bool:
        """Whether the run waits or runs, or the scheduler does not know."""
        return self.active or self.state == "UNKNOWN"

    def record(self) -> dict[str, object]:
        """What --json prints."""
        own = {
            key: value
            for key, value in asdict(self).items()
            if key not in ("run", "progress", "live")
        }
        run = self.run
        known = self.progress.record(running=self.state == "RUNNING") if self.progress else {}
        own |= {"job_id": self.job_id or run.job_id, "gpu_hours_limit": run.gpu_hours or None}
        return {
            "run": run.name,
            "job_ids": list(run.job_ids),
            "job": run.job,
            "site": run.site,
            "scheduler": run.scheduler,
            "created": run.created,
            "environment": run.environment,
            "attempts": len(run.attempts),
            "folder": str(run.folder),
            "log": str(run.log),
            **own,
            **dict.fromkeys(metrics.NAMES),
            **known,
        }


def ask(runs: Sequence[Run]) -> tuple[RunStatus, ...]:
    """The status of each run, in order, with at most two scheduler queries for all of them."""
    runs = [with_newest_job(run) for run in runs]
    # Slurm may have accepted the job of an interrupted launch: it knows in which folder a job was submitted
    submitted = [run for run in runs if run.job_id or not run.is_local]
    asked = [
        pair for scheduler, some in by_scheduler(submitted) for pair in scheduler.statuses(some)
    ]
    found = {(run.name, run.folder): (run, job) for run, job in asked if run.job_id}
    return tuple(_status(*found.get((run.name, run.folder), (run, _INTERRUPTED))) for run in runs)


_INTERRUPTED = JobStatus("PREPARING", "it is being launched, or its launch was interrupted")


def _status(run: Run, job: JobStatus) -> RunStatus:
    """The status of a run: that of its jobs, completed from the run folder."""
    attempts = run.attempts
    over = run.stopped if job.state not in (*ACTIVE, "COMPLETED", "CANCELLED") else ""
    followed = attempts[-2].rung if len(attempts) > 1 else None
    if followed and job.state == "RUNNING":
        over = f"after attempt {followed.attempt}: {followed.reason}"
    return RunStatus(
        run=run,
        **{**job._asdict(), "reason": over or job.reason},
        attempt=attempts[-1].number if attempts else 0,
        progress=metrics.read_progress(metrics_of(run)),
        causes=tuple(attempt.cause for attempt in attempts),
        rungs=run.rungs,
        gpu_hours=gpu_hours(run, time.time() if _may_run(job) else None),
    )


def _may_run(job: JobStatus) -> bool:
    """Whether an attempt may run at the moment. While a job waits, its killed attempt does not."""
    return job.state == "UNKNOWN" or (job.state in ACTIVE and job.state != "PENDING")


def gpu_hours(run: Run, now: float | None) -> float | None:
    """The GPU hours of all attempts until `now`, in Unix seconds (None: no attempt runs); None without GPUs.

    A killed attempt has not recorded its end. It counts up to its last sign of life; the newest one, if it may still
    run, counts up to `now`.
    """
    attempts, spent = run.attempts, list[float]()
    for attempt in attempts:
        if attempt.started is not None and attempt.gpus:
            last = now if attempt == attempts[-1] and attempt.ended is None else None
            last = last or attempt.last_sign or attempt.started
            spent.append(attempt.gpus * max(0.0, last - attempt.started))
    return round(sum(spent) / 3600, 3) if spent else None


SHORTEST, LONGEST, GROWTH = (
    2.0,
    30.0,
    1.3,
)  # seconds between two queries; the pause grows while nothing changes


def watch(
    runs: Callable[[], Sequence[Run]],
    show: Callable[[tuple[RunStatus, ...]], object] = lambda found: None,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[RunStatus, ...]:
    """Show the status of the runs until all have ended, with one query for all of them each time; return the last."""
    pause = SHORTEST
    before: tuple[object, ...] = ()
    while True:
        found = ask(runs())
        show(found)
        if not any(goes_on(status) for status in found):
            return found
        states = tuple((status.state, status.reason, status.attempt) for status in found)
        pause = SHORTEST if states != before else min(pause * GROWTH, LONGEST)
        before = states
        sleep(pause)


def goes_on(status: RunStatus) -> bool:
    """Whether to keep waiting: the run waits or runs, or the scheduler does not answer at the moment."""
    return status.active or (status.state == "UNKNOWN" and not status.run.is_local)
