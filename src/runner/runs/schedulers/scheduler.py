"""The interface of a scheduler, and the known schedulers."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from runner.errors import unknown

if TYPE_CHECKING:
    from runner.environments.environment import Attachment
    from runner.machine.report import Report
    from runner.runs.job import Job
    from runner.runs.run import Dependencies, Run
    from runner.runs.schedulers import local, slurm
    from runner.site import Site


CONTINUE = 75
"""the exit code with which a job asks for another attempt"""
ACTIVE = {
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "SUSPENDED",
    "COMPLETING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "RESIZING",
    "SIGNALING",
    "STAGE_OUT",
    "STOPPED",
    "REQUEUE_FED",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
}
"""Slurm's states of a job that has not ended"""


class JobStatus(NamedTuple):
    """The status of a job, or the combined status of a run's jobs."""

    state: str
    """one of Slurm's states (PENDING, RUNNING, COMPLETED, ...) or of runner's own (`RunStatus.state`)"""
    reason: str = ""
    """why the job waits, or why it failed"""
    exit_code: int | None = None
    """128 + N if signal N ended the job; None if it has not ended"""
    nodes: str = ""
    elapsed: str = ""
    time_left: str = ""
    """until the time limit, in Slurm's format"""
    job_id: str = ""
    """for a run: the job that determines the status"""
    live: tuple[str, ...] = ()
    """for a run: the jobs that wait or run"""


class Forecast(NamedTuple):
    """Whether the scheduler would accept a job."""

    accepted: bool | None
    """None: it does not answer"""
    start: str = ""
    """the estimated start and the nodes: `2026-11-27T10:00:00 on nid[001-002]`; empty: not known"""
    why: str = ""
    """its message, if it does not accept the job"""


class Scheduler(Protocol):
    """The interface that each scheduler's module implements."""

    PROGRAMS: tuple[str, ...]
    """programs that `launch` needs on this machine"""
    BY_HAND: str
    """the shell command that submits the batch script, run in the run folder"""
    STATE_SOURCE: str
    """the source of a run's state, as `why` names it"""
    PAUSES: tuple[float, float]
    """the shortest and the longest pause between two status queries, in seconds"""

    def script(self, job: Job, attachment: Attachment, site: Site) -> str:
        """The text of the batch script."""

    def version(self) -> dict[str, str]:
        """Facts about the scheduler for the run's record."""

    def check_options(self, options: Iterable[str], report: Report) -> None:
        """Raise RunnerError for an option of sbatch (its long name) that this cluster cannot fulfil."""

    def start(self, run: Run, waits: Dependencies, report: Report) -> Run:
        """Submit or start the job, and return the run with it."""

    def start_sweep(
        self,
        folder: Path,
        runs: Sequence[Run],
        waits: Dependencies,
        at_once: int | None,
        report: Report,
    ) -> tuple[Run, ...]:
        """Start the runs of a sweep, and return them with their jobs. `folder` contains the script of the array."""

    def start_chain(self, run: Run, links: int) -> Run:
        """Submit the jobs that follow the first one of a chain of `links` jobs, and return the run with all jobs."""

    def statuses(self, runs: Sequence[Run]) -> Sequence[tuple[Run, JobStatus]]:
        """Each of these submitted runs with its status. Manually submitted jobs are added to the runs."""

    def work_folders(self) -> tuple[set[Path], str]:
        """(the folders from which the user's active jobs were submitted, the reason if they are not known)."""

    def cancel(self, jobs: Sequence[tuple[Run, tuple[str, ...]]], report: Report) -> None:
        """End these jobs of these runs."""

    def explain_cancel(self, runs: Sequence[Run]) -> Iterator[str]:
        """The commands that end the jobs of these runs."""


SCHEDULERS = ("slurm", "local")
"""the names of the modules"""
if TYPE_CHECKING:
    # mypy checks that the modules implement the protocol
    _CHECKED: tuple[Scheduler, ...] = (slurm, local)


def scheduler_of(name: str) -> Scheduler:
    """The scheduler of a site or a run. Raises RunnerError for an unknown one."""
    if name not in SCHEDULERS:
        raise unknown("scheduler", name, SCHEDULERS)
    return cast(
        "Scheduler", importlib.import_module(f"runner.runs.schedulers.{name}")
    )  # import only the one in use


def by_scheduler(runs: Iterable[Run]) -> Iterator[tuple[Scheduler, list[Run]]]:
    """The runs, grouped by scheduler."""
    runs = list(runs)
    # slurm first: ending the processes of a local run takes a while
    for name in sorted({run.scheduler for run in runs}, reverse=True):
        yield scheduler_of(name), [run for run in runs if run.scheduler == name]


def from_exit_code(run: Run, exit_code: int, reason: str = "") -> JobStatus:
    """The status of a run whose newest attempt ended with this exit code."""
    from runner.runs.run import is_cancelled  # a dry run does not need it

    elapsed = run.newest.elapsed if run.newest else ""
    if is_cancelled(run):  # even with exit code 0: the program may have saved on the signal
        return JobStatus("CANCELLED", run.cancel_reason, exit_code, run.host, elapsed)
    reason = "the script asked for another attempt" if exit_code == CONTINUE else reason
    return JobStatus("FAILED" if exit_code else "COMPLETED", reason, exit_code, run.host, elapsed)
