"""Cancel runs."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace

from runner.errors import RunnerError
from runner.machine import files
from runner.machine.report import Report
from runner.runs.run import CANCELLED, STOP, Run, save, with_newest_job
from runner.runs.schedulers.scheduler import by_scheduler
from runner.runs.status import ask


def explain(runs: Sequence[Run]) -> Iterator[str]:
    """The commands that `cancel` runs."""
    runs = [with_newest_job(run) for run in runs]
    for scheduler, some in by_scheduler(runs):
        yield from scheduler.explain_cancel(some)


def cancel(runs: Sequence[Run], report: Report) -> tuple[tuple[Run, bool], ...]:
    """End the runs that are not over. Returns each run, and whether this call ended it.

    A run is marked as cancelled before its processes get a signal, so that `status` and `watch` show why it ends.
    """
    found = [status for status in ask(runs) if status.may_be_active]
    active = [status.run for status in found]
    for run in active:
        if run.host not in ("", platform.node()):
            raise RunnerError(
                f"cannot end {run.name} from this machine",
                f"it was started without a scheduler on {run.host}",
                f"on {run.host}: runner cancel {run.name}",
            )
    for run in active:
        save(replace(run, state=CANCELLED))
        files.write(
            run.folder / STOP, "runner cancel\n"
        )  # prevents further attempts, whatever [restart] allows
    live = {status.run.folder: status.live or status.run.job_ids for status in found}
    for scheduler, some in by_scheduler(active):
        scheduler.cancel([(run, live[run.folder]) for run in some], report)
    done = {run.name for run in active}
    return tuple((run, run.name in done) for run in runs)
