"""The status of a job, in Slurm's words, whatever the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from runner.runs.run import Run

CONTINUE = 75
"""a job's exit code that means: continue me"""
ACTIVE = {"PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "RESIZING",
          "SIGNALING", "STAGE_OUT", "STOPPED", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}  # fmt: skip
"""states, in Slurm's words, of a job that is not over"""


class JobStatus(NamedTuple):
    """The status of a job, or of a run's jobs together."""

    state: str
    """PENDING, RUNNING, COMPLETED, ... (Slurm's words), or one of runner's own (`RunStatus.state`)"""
    reason: str = ""
    """why it waits, or why it failed"""
    exit_code: int | None = None
    """128 + N when signal N ended it; None while it has not ended"""
    nodes: str = ""
    elapsed: str = ""
    time_left: str = ""
    """of the time limit"""
    job_id: str = ""
    """of a run's jobs: the one that counts now"""
    live: tuple[str, ...] = ()
    """of a run's jobs: those that wait or run"""


def from_exit_code(run: Run, exit_code: int, reason: str = "") -> JobStatus:
    """The status of a run whose newest attempt has ended with this exit code."""
    from runner.runs.run import is_cancelled  # a dry run does not need it

    elapsed = run.newest.elapsed if run.newest else ""
    if is_cancelled(run):  # one that saved ends with 0 too
        return JobStatus("CANCELLED", run.cancel_reason, exit_code, run.host, elapsed)
    reason = "it asked to be continued" if exit_code == CONTINUE else reason
    return JobStatus("FAILED" if exit_code else "COMPLETED", reason, exit_code, run.host, elapsed)
