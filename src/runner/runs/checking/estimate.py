"""What a launch may cost in GPU hours, before it is submitted."""

from __future__ import annotations

from dataclasses import dataclass

from runner.runs.job import Job


@dataclass(frozen=True)
class Estimate:
    """GPU hours."""

    attempt: float
    """of one attempt that takes all of its time"""
    most: float
    """of all attempts that follow time limits, each as long"""

    @property
    def text(self) -> str:
        """One line for the user."""
        more = f", {self.most:,.1f} with all restarts after the time limit" if self.most > self.attempt else ""
        return f"{self.attempt:,.1f} GPU hours at most{more}"


def estimate(job: Job) -> Estimate | None:
    """What the job may cost; None without GPUs, or where no time limit is known."""
    if not job.gpus or not job.resources.time_minutes:
        return None
    attempt = job.gpus * job.resources.time_minutes / 60
    most = attempt * (1 + job.restart.time_limit if job.restart else 1)
    if job.restart and job.restart.gpu_hours:
        most = max(attempt, min(most, job.restart.gpu_hours))
    return Estimate(attempt, most)
