"""What a scheduler is to the rest of runner, and the schedulers that there are."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from runner.errors import unknown

if TYPE_CHECKING:
    from runner.environments.attachment import Attachment
    from runner.machine.report import Report
    from runner.runs.after import Dependencies
    from runner.runs.job import Job
    from runner.runs.run import Run
    from runner.runs.schedulers import local, slurm
    from runner.site import Site


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


class Scheduler(Protocol):
    """A scheduler: a module of this package with these names."""

    PROGRAMS: tuple[str, ...]
    """what `launch` needs on this machine"""
    BY_HAND: str
    """the line of bash that submits the batch script, in the run folder"""
    STATE_SOURCE: str
    """who knows the state of a run, as `why` names it"""
    PAUSES: tuple[float, float]
    """seconds between two questions about a run: the shortest and the longest pause"""

    def script(self, job: Job, attachment: Attachment, site: Site) -> str:
        """The text of the batch script."""

    def version(self) -> dict[str, str]:
        """What the run's record says about the scheduler itself."""

    def start(self, run: Run, waits: Dependencies, report: Report) -> Run:
        """The run with its job, which is submitted or started."""

    def start_sweep(
        self, folder: Path, runs: Sequence[Run], waits: Dependencies, at_once: int | None, report: Report
    ) -> tuple[Run, ...]:
        """The runs of a sweep with their jobs; `folder` has the script of the whole array."""

    def start_chain(self, run: Run, links: int) -> Run:
        """The run with the jobs that follow its first one, `links` jobs in all."""

    def statuses(self, runs: Sequence[Run]) -> Sequence[tuple[Run, JobStatus]]:
        """Each of these submitted runs, with the jobs that were submitted by hand too, and its status."""

    def work_folders(self) -> tuple[set[Path], str]:
        """The folders that the user's queued and running jobs were submitted in; and why they are not known."""

    def cancel(self, jobs: Sequence[tuple[Run, tuple[str, ...]]], report: Report) -> None:
        """End these jobs of these runs."""

    def explain_cancel(self, runs: Sequence[Run]) -> Iterator[str]:
        """The commands that end the jobs of these runs."""


SCHEDULERS = ("slurm", "local")
"""each a module here, of that name"""
if TYPE_CHECKING:
    # mypy checks that the modules have the names of the protocol
    _CHECKED: tuple[Scheduler, ...] = (slurm, local)


def scheduler_of(name: str) -> Scheduler:
    """The scheduler of a site or a run. Raises RunnerError where runner does not know it."""
    if name not in SCHEDULERS:
        raise unknown("scheduler", name, SCHEDULERS)
    return cast("Scheduler", importlib.import_module(f"runner.runs.schedulers.{name}"))  # the one in use, not all


def by_scheduler(runs: Iterable[Run]) -> Iterator[tuple[Scheduler, list[Run]]]:
    """The runs of each scheduler that has some."""
    runs = list(runs)
    # slurm first: ending the processes of a local run takes a while
    for name in sorted({run.scheduler for run in runs}, reverse=True):
        yield scheduler_of(name), [run for run in runs if run.scheduler == name]


def from_exit_code(run: Run, exit_code: int, reason: str = "") -> JobStatus:
    """The status of a run whose newest attempt has ended with this exit code."""
    from runner.runs.run import is_cancelled  # a dry run does not need it

    elapsed = run.newest.elapsed if run.newest else ""
    if is_cancelled(run):  # one that saved ends with 0 too
        return JobStatus("CANCELLED", run.cancel_reason, exit_code, run.host, elapsed)
    reason = "the script asked for another attempt" if exit_code == CONTINUE else reason
    return JobStatus("FAILED" if exit_code else "COMPLETED", reason, exit_code, run.host, elapsed)
