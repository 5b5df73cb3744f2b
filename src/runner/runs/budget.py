"""What a launch may cost, and the limits of `[budget]`: no option of a launch goes beyond them, not even --yes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from runner.errors import RunnerError
from runner.located_toml import read_toml, refuse_unknown_keys, typed
from runner.project import Project
from runner.runs.run import Run, is_cancelled, is_over, list_runs
from runner.site import Site

if TYPE_CHECKING:
    from runner.runs.job import Job
    from runner.runs.status import RunStatus

SETTINGS = "runner.toml"
KEYS = ("gpu_hours_per_day", "jobs_at_once")
_DAY_SECONDS = 24 * 3600


class Estimate(NamedTuple):
    """The GPU hours that a run may use."""

    attempt: float
    """one attempt that uses its whole time limit"""
    most: float
    """all attempts that are allowed after time limits, if each uses its whole time limit"""

    def text(self, runs: int) -> str:
        """One line for the user about a launch of this many runs."""
        each = f"{self.attempt:,.1f} GPU hours"
        if self.most > self.attempt:
            each += f" per attempt, {self.most:,.1f} with all restarts after time limits"
        if runs == 1:
            return f"at most {each}"
        return f"at most {self.most * runs:,.1f} GPU hours ({runs} runs; each at most {each})"


def estimate(job: Job) -> Estimate | None:
    """The estimated cost of one run; None if it has no GPUs or no known time limit."""
    gpus = job.nodes_held * job.resources.gpus_per_node + job.other_gpus
    if not gpus or not job.resources.time_minutes:
        return None
    attempt = gpus * job.resources.time_minutes / 60
    most = attempt * (1 + job.restart.time_limit if job.restart else 1)
    if job.restart and job.restart.gpu_hours:
        most = max(attempt, min(most, job.restart.gpu_hours))
    return Estimate(attempt, most)


@dataclass(frozen=True)
class Budget:
    """The limits of a project and a site; of two values, the smaller one."""

    gpu_hours_per_day: int | None = None
    """for what all runs of the last 24 hours have used, or may still use"""
    jobs_at_once: int | None = None
    """for runs that wait or run"""

    def __bool__(self) -> bool:
        return self.gpu_hours_per_day is not None or self.jobs_at_once is not None


def budget_of(project: Project, site: Site) -> Budget:
    """The budget. Raises RunnerError for a misspelt key or a value that is not a number from 0."""
    found: dict[str, list[int]] = {key: [] for key in KEYS}
    for key, value in (
        ("gpu_hours_per_day", site.budget_gpu_hours_per_day),
        ("jobs_at_once", site.budget_jobs_at_once),
    ):
        if value is not None:
            found[key].append(value)
    settings = project.root / SETTINGS if project.root else None
    if settings and settings.is_file():
        document = read_toml(settings)
        refuse_unknown_keys(document, ("budget",), KEYS, "budget")
        for key in KEYS:
            own = typed(document, ("budget", key), int)
            if own is not None and own < 0:
                raise RunnerError(
                    f"{settings}: {key} is {own}",
                    "it must be 0 or more",
                    f"use 0 or a larger number, or leave out {key} for no limit",
                )
            found[key] += [] if own is None else [own]
    return Budget(*(min(found[key], default=None) for key in KEYS))


class Use(NamedTuple):
    """What the runs in a folder use of a budget."""

    gpu_hours: float
    """used in the last 24 hours, or, by runs that are not over, at most still to be used"""
    jobs: int
    """runs that wait or run"""

    def text(self, budget: Budget) -> str:
        """One line for the user."""
        hours, jobs = budget.gpu_hours_per_day, budget.jobs_at_once
        parts = (
            [] if hours is None else [f"{self.gpu_hours:,.1f} of {hours:,} GPU hours in 24 hours"]
        )
        return "budget: " + ", ".join(
            [*parts, *([] if jobs is None else [f"{self.jobs} of {jobs} jobs at once"])]
        )


def use_of(runs_folder: Path) -> Use:
    """What the runs of the folder use."""
    from runner.runs.status import ask  # slow, and most projects have no budget

    now = time.time()
    counted = [
        run
        for run in list_runs(runs_folder)
        if _is_recent(run, now) or not (is_over(run) or is_cancelled(run))
    ]
    # a killed job never writes its end: only the scheduler knows that an old run is over
    found = [each for each in ask(counted) if each.may_be_active or _is_recent(each.run, now)]
    return Use(sum(map(_gpu_hours, found)), sum(each.may_be_active for each in found))


def _is_recent(run: Run, now: float) -> bool:
    return run.launched is None or now - run.launched < _DAY_SECONDS


def _gpu_hours(found: RunStatus) -> float:
    used = found.gpu_hours or 0.0
    return max(used, found.run.most_gpu_hours) if found.may_be_active else used


def check(
    budget: Budget, runs_folder: Path, most: float, runs: int = 1, at_once: int | None = None
) -> None:
    """Raise RunnerError for a launch of this many runs that goes beyond the budget.

    `most`: the GPU hours that one of them may use. `at_once`: how many may run at the same time, if not all.
    """
    if not budget:
        return
    use = use_of(runs_folder)
    _refuse_hours(budget, use, most * runs)
    started = min(runs, at_once or runs)
    noun = "job" if started == 1 else "jobs at once"
    if budget.jobs_at_once is not None and use.jobs + started > budget.jobs_at_once:
        raise _beyond(
            f"this launch starts {started} {noun}",
            f"{use.text(budget)}",
            "wait until a run has ended (runner watch), or cancel one"
            + (", or start fewer at once: --at-once N" if runs > 1 else ""),
        )


def _refuse_hours(budget: Budget, use: Use, most: float) -> None:
    limit = budget.gpu_hours_per_day
    if limit is not None and most > 0 and use.gpu_hours + most > limit:
        raise _beyond(
            f"this launch may use {most:,.1f} GPU hours, and {max(0.0, limit - use.gpu_hours):,.1f} are left",
            f"{use.text(budget)}",
            "launch later, or with fewer nodes, less time or fewer restarts",
        )


def _beyond(what: str, used: str, fix: str) -> RunnerError:
    return RunnerError(
        what,
        f"{used}; --yes does not override a budget",
        f"{fix}; or ask for a higher limit: [budget] in runner.toml, budget_… in the site file",
    )


def lines(project: Project, site: Site, runs_folder: Path) -> Sequence[str]:
    """What is left, for `runner status`; empty without a budget."""
    budget = budget_of(project, site)
    return (use_of(runs_folder).text(budget),) if budget else ()
