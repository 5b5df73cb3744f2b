"""The phases of an attempt: what each of its nodes did at which time.

Reads attempts/N/times*, which the batch script, its tasks and the job write, and the run's metrics. Each event ends a
stretch of time, which has one class (account.py). A missing event joins two stretches.
"""

from __future__ import annotations

import math
import re
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple

from runner.machine import files
from runner.runs.attempt import Attempt
from runner.runs.metrics import Metrics, records
from runner.runs.progress import metrics_of
from runner.runs.run import Run

# (event, class of the stretch before it, class of the stretch after it if nothing follows)
_EVENTS = (
    ("started", "start", "unknown"),
    ("step", "start", "import"),
    ("task", "import", "start"),
    ("preflight", "start", "preflight"),
    ("preflight_end", "preflight", "start"),
    ("program", "start", "imports"),
    ("imported", "imports", "loading"),
    ("loaded", "loading", "loading"),
    ("train", "loading", "warm_up"),
)
_LAST = ("trained", "final", "program_end", "step_end", "ended")  # of these, the last time counts
_OF_STEP = ("stalled", "detected")  # reset if the step is started once more
_OF_NODES = (
    "task",
    "preflight",
    "preflight_end",
    "setup",
    "setup_end",
    "program",
    "program_end",
    "left",
)
# keys of the metrics -> (class, whether the value is the sum since the last entry, and not one save or evaluation)
_WAITED = "checkpoint_wait_seconds"  # of a save, which is written later, when it is complete
_WHOLE_SAVE = "checkpoint_seconds"  # from the beginning of the save until it is complete
_COSTS = {
    "saving_seconds": ("saving", True),
    _WAITED: ("saving", False),
    "evaluation_seconds": ("evaluation", True),
    "eval_runtime": ("evaluation", False),
}
_SAVED_CODE = 75  # the program has saved, and asks for another attempt
_FAULTS = ("hang", "node_failure", "script_failure")
_SILENT_SECONDS = 120.0  # an attempt without a sign of life for so long no longer runs
_LATE_SECONDS = 0.5  # the line about the saves before `trained` is written just after it
_JUMP_SECONDS = 60.0  # if an event is so far outside its attempt, a clock was wrong
_STALL_SECONDS = (
    10.0  # a step that takes this much longer than usual, and five times as long, stood still
)
_MOST_NODES = 100_000

Stretches = list[tuple[str, float]]
"""(class, until)"""


class _Cost(NamedTuple):
    """What saving or evaluating took of the training."""

    time: float
    """when the training went on after it"""
    kind: str
    """the class"""
    is_sum: bool
    """whether it is the sum since the last entry: it may repeat what single saves or evaluations tell"""
    seconds: float


class _Entry(NamedTuple):
    """An entry with a loss."""

    time: float
    step: float
    step_seconds: float


@dataclass
class Phases:
    """What is known about an attempt."""

    attempt: Attempt
    start: Mapping[str, str]
    """the file `started`"""
    times: dict[tuple[str, str], float]
    """(event, node or empty) -> time"""
    entries: list[_Entry]
    costs: list[_Cost]
    """by time"""
    saved: list[float]
    """the steps of the checkpoints that another trainer reported"""
    nodes: list[str]
    """those with ranks; the index is the node in `times`"""
    begin: float
    ended: float | None
    last_sign: float
    """the end, or the last sign of life"""
    held: list[str]
    """all nodes of the allocation"""
    running: bool = False
    follows: bool = False
    """whether another attempt follows"""
    tells: bool = False
    """whether the program writes its times; other trainers do not"""
    highest: float = 0.0
    """the highest step of earlier attempts"""
    resumed: float | None = None
    """the step from which the next attempt went on"""

    def event(self, name: str, node: object = "") -> float | None:
        return self.times.get((name, str(node)))

    @property
    def setup_seconds(self) -> float:
        """The mean time, over the nodes, that `setup` of the job file took."""
        nodes = range(len(self.nodes))
        pairs = [(self.event("setup", node), self.event("setup_end", node)) for node in nodes]
        took = [end - begin for begin, end in pairs if begin and end]
        return max(statistics.mean(took), 0.0) if took else 0.0

    @property
    def cause(self) -> str:
        return "running" if self.running else self.attempt.cause or "unknown"

    @cached_property
    def fault(self) -> bool:
        return not self.running and (self.ended is None or self.attempt.cause in _FAULTS)

    @cached_property
    def pace(self) -> float:
        """The median seconds per step."""
        known = [
            b.step_seconds or (b.time - a.time) / (b.step - a.step)
            for a, b in pairwise(self.entries)
        ]
        return statistics.median(known or [entry.step_seconds for entry in self.entries])

    @cached_property
    def pause(self) -> float:
        """The median seconds between two entries."""
        return statistics.median(
            [b.time - a.time for a, b in pairwise(self.entries)] or [self.pace]
        )

    def split(
        self,
        kind: str,
        begin: float,
        end: float,
        *,
        told: tuple[float, float] = (0.0, 0.0),
        working: float = math.inf,
    ) -> Stretches:
        """A stretch, without what evaluating and saving took of it.

        `told`: the costs that metrics.jsonl records up to this many seconds after `begin` and after `end` belong to
        the stretch before. `working`: how many seconds of a stretch with a save of unknown length were steps.
        """
        low, high = (
            bisect_right(self.costs, at + late, key=lambda cost: cost.time)
            for at, late in zip((begin, end), told, strict=True)
        )
        spent: defaultdict[tuple[str, bool], float] = defaultdict(float)
        for cost in self.costs[low:high]:
            spent[cost.kind, cost.is_sum] += cost.seconds
        evaluation, saving = (
            max(spent[kind, True], spent[kind, False]) for kind in ("evaluation", "saving")
        )
        room = max(end - begin, 0.0)
        evaluation = min(evaluation, room)
        saving = min(saving or max(room - evaluation - working, 0.0), room - evaluation)
        return [(kind, end - evaluation - saving), ("evaluation", end - saving), ("saving", end)]

    @cached_property
    def training(self) -> Stretches:
        """From the warm-up to the last entry. Stretches of the same class are joined."""
        entries, first = self.entries, self.event("first_step")
        warm_up = "warm_up" if self.event("train") else "unknown"
        if not entries:
            return [(warm_up, first)] if first else []
        before = [entries[0].step - (_number(self.start.get("checkpoint")) or 0.0)]
        before += [b.step - a.step for a, b in pairwise(entries[:2])]
        step = entries[0].step - min((steps for steps in before if steps > 0), default=1.0)
        at = first - self.pace if first else entries[0].time - (entries[0].step - step) * self.pace
        found: Stretches = [(warm_up, at)]
        for entry in entries:
            steps = entry.step - step
            is_saved = any(step < each <= entry.step for each in self.saved)
            work = self.split(
                "useful", at, entry.time, working=steps * self.pace if is_saved else math.inf
            )
            idle = work[0][1] - at - steps * self.pace
            if idle > max(_STALL_SECONDS, 4 * steps * self.pace):
                found.append((warm_up if entry is entries[0] else "unknown", at := at + idle))
            share = min(max((self.highest - step) / steps, 0.0), 1.0)
            for kind, until in [("repeated", at + (work[0][1] - at) * share), *work]:
                if until > found[-1][1]:
                    if found[-1][0] == kind:
                        found.pop()  # it continues for longer
                    found.append((kind, until))
            step, at = entry.step, max(entry.time, at)
        return found

    def after_training(self, kind: str, stop: float) -> Stretches:
        """From the last step that is known until `stop`. `kind` is the class if no step is known."""
        trained, final = self.event("trained"), self.event("final")
        last = self.training[-1][1] if self.training else None
        begin = last if last is not None else stop if trained is None else trained
        end = stop if trained is None else trained
        found: Stretches = []
        if last is not None:
            kind = self._after_last_step()
            if trained is None:
                end = min(stop, self._until(last, stop))
            saved_until = last
            if kind == "repeated" and self.entries:  # saved, although not logged
                steps = (self.resumed or 0.0) - self.entries[-1].step
                saved_until = min(last + steps * self.pace, end)
            if saved_until > last:
                found = self.split("useful", last, saved_until)
                begin = saved_until
        found += self.split(kind, begin, end, told=(0.0, _LATE_SECONDS))
        if final is not None:
            return [
                *found,
                *self.split("saving", end, final, told=(_LATE_SECONDS, 0.0)),
                *self.split("after_end", final, stop),
            ]
        return [*found, ("saving" if trained is not None else "unknown", stop)]

    def _after_last_step(self) -> str:
        """The class of the steps after the last entry."""
        is_again = bool(self.entries) and self.entries[-1].step < self.highest
        is_unfinished = self.event("trained") is None and not self.running
        is_lost = is_unfinished and (self.fault or self.attempt.exit_code not in (0, _SAVED_CODE))
        return "repeated" if is_lost or is_again else "useful"

    def _until(self, last: float, stop: float) -> float:
        """When the steps after the last entry ended, of a training that has not told its end."""
        silence = stop - last - self.pause if self.entries else 0.0
        if self.running:  # it may have stopped, or save, or evaluate
            return last + self.pause if silence > max(_STALL_SECONDS, 4 * self.pause) else stop
        # other trainers do not tell when the training ended: after the usual pause between two entries
        return stop if self.tells else last + self.pause

    def stop(self, node: int, end: float) -> float:
        """When a node stopped working: the end of its program, or the fault."""
        if self.running:
            return end
        if self.fault:
            failed = self.attempt.first_failure
            program_end = self.event("program_end", failed.node) if failed else None
            signs = [program_end, self.event("stalled"), self.event("detected"), self.last_sign]
            # nothing else tells when the fault was
            if self.entries and self.event("trained") is None:
                beat = self.attempt.time("heartbeat") or 0.0
                signs.append(max(self.entries[-1].time, beat) + self.pause)
            return min(at for at in signs if at is not None)
        ends = (self.event("program_end", node), self.event("step_end"), self.ended, end)
        return next(at for at in ends if at is not None)

    def stretches(self, name: str, end: float, *, in_place: bool) -> tuple[Stretches, Stretches]:
        """What a node did until `end`: until its last step that is known, and after it."""
        if name not in self.nodes:
            return [("spare", end)], []
        node = self.nodes.index(name)
        stop, rest = self.stop(node, end), "unknown"
        found: Stretches = []
        for event, kind, after in _EVENTS:
            at = self.event(event, node if event in _OF_NODES else "")
            if at is not None:
                is_gap = in_place and event in ("started", "step")
                found.append(("restart_gap" if is_gap else kind, at))
                rest = after if self.tells or after != "imports" else "unknown"
        before = [(kind, min(at, stop)) for kind, at in (*found, *self.training)]
        tail = [(kind, min(at, stop)) for kind, at in self.after_training(rest, stop)]
        if self.fault:
            # or Slurm ended the attempt
            kind = "hang" if self.cause in (*_FAULTS, "unknown") else "restart_gap"
            tail.append((kind, self.event("detected") or (end if self.ended is None else stop)))
        return before, [*tail, ("restart_gap" if self.follows else "after_end", end)]


def read_phases(run: Run, now: float, notes: list[str]) -> list[Phases]:
    """The attempts of a run. Damaged files give notes."""
    attempts = run.attempts
    recorded = _read_metrics(metrics_of(run), attempts, notes)
    found: list[Phases] = []
    for attempt, after in zip_longest(attempts, attempts[1:]):
        until = (after.started if after else None) or now
        if phases := _read(attempt, run, recorded[attempt.number], until, notes):
            found.append(phases)
    highest = 0.0
    for phases, after in zip_longest(found, found[1:]):
        phases.highest = highest
        highest = max([highest, *(entry.step for entry in phases.entries)])
        phases.resumed = _number(after.start.get("checkpoint")) if after else None
        phases.tells = any(each.event("imported") or each.event("train") for each in found)
        silent = now - phases.last_sign
        phases.running = after is None and phases.ended is None and silent < _SILENT_SECONDS
        phases.follows = after is not None or (
            phases.attempt.rung is not None and not (run.folder / "stopped").exists()
        )
        if phases.ended is None and not phases.running:
            notes.append(
                f"attempt {phases.attempt.number} did not record its end, perhaps because it was killed: "
                "it is counted until its last sign of life"
            )
    if not found:
        notes.append("no attempt has started")
    return found


def _read(
    attempt: Attempt, run: Run, recorded: _Recorded, until: float, notes: list[str]
) -> Phases | None:
    """What the files of an attempt tell; None if they do not tell when it started.

    `until`: when the next attempt started, or now.
    """
    place = f"attempts/{attempt.number}"
    start = {
        key: value
        for key, _, value in (line.partition(" ") for line in attempt.text("started").splitlines())
    }
    times = _read_times(attempt.folder, place, notes)
    begin = times.get(("started", "")) or attempt.started
    if begin is None:
        notes.append(f"{place}/started is missing: the attempt is left out")
        return None
    ended = times.get(("ended", "")) or attempt.ended or attempt.time("exit_code")
    # the file system has a clock of its own; it is of no use if the run folder was copied
    if (
        ended
        and attempt.ended
        and abs((attempt.started or 0.0) - begin) < _JUMP_SECONDS < abs(attempt.ended - ended)
    ):
        ended = attempt.ended
    if ended is None:
        signs = [*times.values(), *(entry.time for entry in recorded.entries)]
        signs.append(attempt.time("alive") or begin)
        # a wrong clock may be in the future
        last = max([begin, *(at for at in signs if at <= until + _JUMP_SECONDS)])
    else:
        last = max(ended, begin)
    nodes = _expanded(start.get("nodes", ""))
    if not nodes:
        notes.append(f"{place}/started does not list the nodes")
        nodes = [f"node {number}" for number in range(min(max(run.nodes, 1), _MOST_NODES))]
    if ("step", "") not in times:
        notes.append(
            f"{place}/times does not tell when the program started: the time before it is not known"
        )
    elif attempt.outputs:  # a user's own batch script is the program
        times |= {("program", str(node)): times["step", ""] for node in range(len(nodes))}
    for (event, node), at in list(times.items()):
        if event == "left":  # of the allocation: account.py bounds it
            continue
        before = event in ("submitted", "held")
        earliest = (run.launched or begin) if before else begin
        if not earliest - _JUMP_SECONDS <= at <= last + _JUMP_SECONDS:
            del times[event, node]
            notes.append(
                f"{place}: `{event}` is outside the attempt, and is left out: was a clock wrong?"
            )
    held = list(dict.fromkeys([*nodes, *_expanded(start.get("held", ""))]))
    lines = attempt.text("saved").splitlines()  # STEP PATH, as the batch script has found them
    saved = [number for line in lines if (number := _number(line.partition(" ")[0])) is not None]
    return Phases(
        attempt,
        start,
        times,
        recorded.entries,
        sorted(recorded.costs),
        [*recorded.saved, *saved],
        nodes,
        begin,
        ended,
        last,
        held,
    )


def _read_times(folder: Path, place: str, notes: list[str]) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for path in sorted(folder.glob("times*")):
        bad = 0
        try:
            lines = files.content(str(path)).decode(errors="replace").splitlines()
        except OSError as error:
            notes.append(f"cannot read {place}/{path.name}: {error.strerror}")
            continue
        for line in lines:
            seconds, event, node = (*line.split(), "", "", "")[:3]
            if (at := _number(seconds)) is None or not event.isidentifier():
                bad += 1
                continue
            key = (event, node if event in _OF_NODES else "")
            if event == "step":  # started once more (payload/attempt.sh: run_step)
                for name in _OF_STEP:
                    found.pop((name, ""), None)
            known = found.get(key, at)
            found[key] = max(known, at) if event in _LAST else min(known, at)
        if bad:
            notes.append(f"{place}/{path.name}: damaged lines are left out ({bad})")
    return found


@dataclass
class _Recorded:
    """What the metrics tell of an attempt."""

    entries: list[_Entry] = field(default_factory=list)
    costs: list[_Cost] = field(default_factory=list)
    saved: list[float] = field(default_factory=list)


def _read_metrics(
    metrics: Metrics, attempts: Sequence[Attempt], notes: list[str]
) -> defaultdict[int, _Recorded]:
    """Attempt -> its training entries, what saving and evaluation cost, and its saves."""
    found: defaultdict[int, _Recorded] = defaultdict(_Recorded)
    without_time = 0
    if metrics.error:
        notes.append(f"cannot read {metrics.name}, so steps are not known: {metrics.error}")
    starts = [(each.started or math.inf, each.number) for each in attempts]
    for record in records(metrics):
        at, step = _number(record.get("time")), _number(record.get("step"))
        number = _number(record.get("attempt"))
        mine = found[_newest(starts, at) if number is None else int(number)]
        if (saved := _number(record.get("saved_step"))) is not None:
            mine.saved.append(saved)
        if at is None or step is None:
            without_time += step is not None
            continue
        is_step = "loss" in record or not any(
            key in _COSTS or key.startswith("eval_") for key in record
        )
        entries = mine.entries
        if is_step and (not entries or (step > entries[-1].step and at >= entries[-1].time)):
            entries.append(_Entry(at, step, _number(record.get("step_seconds")) or 0.0))
        for key, (kind, is_sum) in _COSTS.items():
            seconds = _number(record.get(key))
            if seconds:
                whole = _number(record.get(_WHOLE_SAVE)) if key == _WAITED else None
                begun = at if whole is None else at - max(whole - seconds, 0.0)
                mine.costs.append(_Cost(begun, kind, is_sum, seconds))
    if without_time:
        notes.append(f"{metrics.name}: lines without `time` are not counted ({without_time})")
    return found


def _newest(starts: Sequence[tuple[float, int]], at: float | None) -> int:
    """The number of the attempt that ran at a time; 1 if that is not known. `starts`: (time, number)"""
    return max((number for start, number in starts if start <= (at or 0.0)), default=1)


def _number(value: object) -> float | None:
    """A number of a file; None if it is negative, not finite, or no number at all."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number < 1e11 else None


def _expanded(text: str) -> list[str]:
    """The names in a node list of Slurm: `nid[001-003,7],login1`."""
    found: list[str] = []
    for before, ranges, after in re.findall(
        r"([^,\[\]\s]+)(?:\[([^\]]*)\])?([^,\[\]\s]*)", text[:_MOST_NODES]
    ):
        for word in ranges.split(","):
            low, _, high = word.partition("-")
            several = (
                low.isdecimal() and high.isdecimal() and 0 <= int(high) - int(low) < _MOST_NODES
            )
            numbers = range(int(low), int(high) + 1) if several else ()
            found += (
                [f"{before}{n:0{len(low)}}{after}" for n in numbers]
                if several
                else [f"{before}{word}{after}"]
            )
    return found
