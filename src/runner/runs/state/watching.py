"""The status of runs again and again until all have ended; the scheduler, which serves everybody, is asked seldom."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from runner.runs.run import Run, reloaded
from runner.runs.state.status import RunStatus, ask

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
