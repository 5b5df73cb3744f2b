"""Saves by wall time: every N seconds, or as often as costs the least time (`save_every` of the job file).

The batch script sets RUNNER_SAVE_EVERY to seconds or `auto`, and for `auto` RUNNER_FAILURE_HOURS to the mean time
between two failures of this job, followed by the reason for it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training import records
from training.errors import JobError
from training.processes import Processes
from training.run import RunFolder

VARIABLE, FAILURES = "RUNNER_SAVE_EVERY", "RUNNER_FAILURE_HOURS"
FIRST_SECONDS = 300.0  # until the first save of the run, which measures
LEAST_SECONDS = 30.0  # tiny models save in no time, but a shared file system has other users
# Errors of the program come more often than those of the machine: save every hour if that takes at most 1% of the time.
MOST_SECONDS, MOST_SAVES = 3600.0, 100.0
NEWEST = 5  # saves whose median counts: the file system is slower at some times than at others
SHOWN = 1.25  # the interval is printed again if it has changed by this factor


def best_interval(save_seconds: float, failure_seconds: float) -> float:
    """Return the seconds of training between two saves that lose the least time, to saves and to failures.

    Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation
    Computer Systems 22 (2006), equation 37.
    """
    if save_seconds >= 2 * failure_seconds:
        return failure_seconds
    share = save_seconds / (2 * failure_seconds)
    return math.sqrt(2 * save_seconds * failure_seconds) * (1 + math.sqrt(share) / 3 + share / 9) - save_seconds


def interval_after(saves: Sequence[tuple[float, float]], failure_seconds: float) -> float:
    """Return the seconds until the next save. `saves`: of each save, how long the training waited and it took in all.

    A save must be complete before the next one begins.
    """
    if not saves:
        return FIRST_SECONDS
    waited = statistics.median(waited for waited, _ in saves[-NEWEST:])
    took = statistics.median(took for _, took in saves[-NEWEST:])
    most = max(MOST_SECONDS, MOST_SAVES * waited)
    return max(min(best_interval(waited, failure_seconds), most), took, LEAST_SECONDS)


class SaveEvery(TrainerCallback):
    """Tells rank 0 when a save is due; all ranks learn of it by the collective of SaveAndExit.

    The work at risk grows while the training runs, so the time since the end of the last save counts, whether or not
    this callback requested it.
    """

    def __init__(
        self, run: RunFolder, peers: Processes, every: float | None, hours: float = 0.0, why: str = ""
    ) -> None:
        self.peers, self.every, self.hours, self.why = peers, every, hours, why
        self.saves = _saves_of(run) if peers.first and every is None else []
        self.shown = 0.0
        self.since = time.monotonic()
        self.interval = every or interval_after(self.saves, hours * 3600)

    def due(self) -> bool:
        """Return whether rank 0 should save after this step."""
        return time.monotonic() - self.since >= self.interval

    def saved(self, waited: float, took: float) -> None:
        """Note the duration of a complete save; called in rank 0."""
        self.saves.append((waited, took))
        if self.every is None:
            self.interval = interval_after(self.saves, self.hours * 3600)
            self._show()

    def on_train_begin(self, *_: Any, **named: Any) -> None:
        self.since = time.monotonic()
        if self.saves:
            self._show()
        elif self.peers.first:
            first = f"first save after {self.interval:.0f} s, to measure how long it takes"
            print(f"saving every {self.every:g} s" if self.every else first, flush=True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        control.should_save = control.should_save or state.global_step >= state.max_steps

    def on_save(self, *_: Any, **named: Any) -> None:
        self.since = time.monotonic()

    def _show(self) -> None:
        """Print the interval and its reason, unless it is about what was printed before."""
        if self.shown / SHOWN < self.interval < self.shown * SHOWN:
            return
        self.shown = self.interval
        waited = statistics.median(waited for waited, _ in self.saves[-NEWEST:])
        rare = f"a failure is expected every {self.hours:.3g} h {self.why}".rstrip()
        why = f"the training waits {waited:.2g} s for a save, and {rare}"
        least = "; at least once an hour" if self.interval == MOST_SECONDS else ""
        print(f"saving every {self.interval:.0f} s: {why}{least}", flush=True)


def from_environment(environment: Mapping[str, str], run: RunFolder, peers: Processes) -> SaveEvery:
    """Return the callback that the batch script asks for. Raises JobError for a value that is not valid."""
    text = environment.get(VARIABLE, "")
    hours, _, why = environment.get(FAILURES, "").partition(" ")
    number = text if text != "auto" else hours
    try:
        if not 0 < float(number) < math.inf:
            raise ValueError
    except ValueError:
        name = VARIABLE if text != "auto" else FAILURES
        raise JobError(
            f"{name} cannot be {number!r}", "it must be a positive number", f"{VARIABLE}=600, or unset {VARIABLE}"
        ) from None
    return SaveEvery(run, peers, None, float(hours), why) if text == "auto" else SaveEvery(run, peers, float(text))


def _saves_of(run: RunFolder) -> list[tuple[float, float]]:
    """Return the saves of earlier attempts."""
    keys = ("checkpoint_wait_seconds", "checkpoint_seconds")
    return [(entry[keys[0]], entry[keys[1]]) for entry in records.lines(run.metrics) if entry.keys() >= {*keys}]
