"""The account of a run: what its GPUs (its CPUs, without GPUs) did in each second for which the run held them.

It is a pure function of the run folder (phases.py). Each second of each node has exactly one class.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runner.runs.phases import Phases, read_phases
from runner.runs.run import Run

_OF_RESTART = (
    "queue",
    "import",
    "preflight",
    "start",
    "imports",
    "loading",
    "warm_up",
    "repeated",
    "restart_gap",
)


NAMES = {
    "useful": "useful steps",
    "import": "image import and unpack",
    "preflight": "preflight",
    "start": "start of processes",
    "imports": "Python imports",
    "loading": "loading of model and data",
    "warm_up": "compilation and warm-up",
    "repeated": "repeated steps",
    "saving": "saving",
    "evaluation": "evaluation",
    "hang": "hang",
    "spare": "idle spare nodes",
    "restart_gap": "restart gap",
    "after_end": "idle after the end",
    "unknown": "unknown",
    "queue": "queue",
}
"""class -> its name in the table"""


class Classes(dict[str, float]):
    """Class -> GPU seconds, or CPU seconds without GPUs."""

    def add(self, classes: Mapping[str, float], weight: float = 1.0) -> None:
        for name, seconds in classes.items():
            self[name] = self.get(name, 0.0) + weight * seconds

    @property
    def held(self) -> float:
        """The time held: all but the queue, which is not charged."""
        return sum(seconds for name, seconds in self.items() if name != "queue")

    @property
    def losses(self) -> list[tuple[str, float]]:
        """(class, seconds), the largest first."""
        lost = [
            (name, seconds)
            for name, seconds in self.items()
            if name not in ("useful", "queue") and seconds > 0
        ]
        return sorted(lost, key=lambda loss: -loss[1])

    def record(self) -> dict[str, float]:
        """What --json prints."""
        return {name: round(self[name], 3) for name in NAMES if name in self}

    def summary(self) -> dict[str, object]:
        """What --json prints with its sum, and the share of useful steps."""
        ratio = round(self.get("useful", 0.0) / self.held, 4) if self.held > 0 else None
        return {"held_seconds": round(self.held, 3), "classes": self.record(), "ratio": ratio}


def add_up(found: Iterable[Mapping[str, float]]) -> Classes:
    total = Classes()
    for classes in found:
        total.add(classes)
    return total


class AttemptAccount(NamedTuple):
    """The part of one attempt."""

    number: int
    cause: str
    """why it ended; `running` if it has not"""
    rung: str
    """how the next attempt was started (attempts/N/next); empty if that is not recorded"""
    before: Classes
    """until its last step that is known, with the queue"""
    after: Classes

    @property
    def classes(self) -> Classes:
        return add_up((self.before, self.after))

    def record(self) -> dict[str, object]:
        """What --json prints."""
        named = {"number": self.number, "cause": self.cause, "rung": self.rung}
        return {**named, "classes": self.classes.record()}


@dataclass(frozen=True)
class Account:
    """The account of a run."""

    run: Run
    unit: str
    """`gpu` or `cpu`"""
    attempts: tuple[AttemptAccount, ...]
    nodes: Mapping[str, Classes]
    notes: tuple[str, ...]
    """which files are missing or damaged, and what is therefore not known"""
    tells: bool = False
    """whether the program writes its times"""
    setup_share: float = 0.0
    """the part of the start of processes that was `setup` of the job file"""

    @property
    def classes(self) -> Classes:
        return add_up(attempt.classes for attempt in self.attempts)

    def record(self) -> dict[str, object]:
        """What --json prints."""
        attempts = [each.record() for each in self.attempts]
        nodes = {name: classes.record() for name, classes in self.nodes.items()}
        return {
            "run": self.run.name,
            "unit": self.unit,
            **self.classes.summary(),
            "attempts": attempts,
            "nodes": nodes,
            "notes": list(self.notes),
        }

    def by_cause(self) -> Iterator[tuple[str, Mapping[str, float]]]:
        """(cause, {class: seconds}). A fault also costs the restart and the repeated steps of the next attempt."""
        fault = ""
        for attempt in self.attempts:
            for name, seconds in attempt.before.items():
                yield fault if fault and name in _OF_RESTART else attempt.cause, {name: seconds}
            yield attempt.cause, attempt.after
            fault = attempt.cause


def account(run: Run, now: float) -> Account:
    """The account of a run until `now`, in Unix seconds. Damaged files give notes, never an error."""
    notes: list[str] = []
    attempts = read_phases(run, now, notes)
    gpus = any(each.attempt.gpus for each in attempts)
    of_attempts = {each.attempt.number: (Classes(), Classes()) for each in attempts}
    of_nodes: dict[str, Classes] = {}
    free = 0.0  # when the allocation before ended
    for group in _allocations(attempts):
        begin, end = _holding(group, attempts, now)
        weights = _weights(group[0], gpus=gpus, notes=notes)
        submitted = group[0].event("submitted") or free or run.launched or begin
        waited = 0.0 if run.is_local else max(begin - max(submitted, free), 0.0)
        of_attempts[group[0].attempt.number][0].add({"queue": waited}, sum(weights.values()))
        free = end
        for name, weight in weights.items():
            left = min(max(_left(name, group), begin), end)
            for each, *spent in _of_node(name, group, begin, left):
                for part, of_attempt in zip(spent, of_attempts[each.attempt.number], strict=True):
                    of_attempt.add(part, weight)
                    of_nodes.setdefault(name, Classes()).add(part, weight)
    done = tuple(
        AttemptAccount(
            number=each.attempt.number,
            cause=each.cause,
            rung=each.attempt.rung.name if each.attempt.rung else "",
            before=of_attempts[each.attempt.number][0],
            after=of_attempts[each.attempt.number][1],
        )
        for each in attempts
    )
    started = add_up(of_nodes.values()).get("start", 0.0)
    setup = sum(
        each.setup_seconds * _weights(each, gpus=gpus, notes=[])[name]
        for each in attempts
        for name in each.nodes
    )
    return Account(
        run,
        "gpu" if gpus else "cpu",
        done,
        of_nodes,
        tuple(dict.fromkeys(notes)),
        tells=any(each.tells for each in attempts),
        setup_share=setup / started if started else 0.0,
    )


def _of_node(
    name: str, group: Sequence[Phases], begin: float, end: float
) -> Iterator[tuple[Phases, Classes, Classes]]:
    """The time of one node in each attempt: until its last step, and after it. A clock that goes back adds nothing."""
    at = begin
    for phases, after in zip(group, [*group[1:], None], strict=True):
        until = min(max(after.begin, at), end) if after else end
        before, tail = Classes(), Classes()
        parts = phases.stretches(name, until, in_place=phases is not group[0])
        for spent, stretches in zip((before, tail), parts, strict=True):
            for kind, end_of_stretch in stretches:
                moment = min(end_of_stretch, until)
                if moment > at:
                    spent.add({kind: moment - at})
                    at = moment
        if until > at:
            tail.add({"unknown": until - at})
            at = until
        yield phases, before, tail


def _left(name: str, group: Sequence[Phases]) -> float:
    """When the job lost a node: at the latest, when an attempt began that no longer held it."""
    noted = [at for each in group if (at := each.event("left", name)) is not None]
    kept = [each for each in group if {*each.held} <= {*group[0].held}]
    return min([*noted, *(each.begin for each in kept if name not in each.held)], default=math.inf)


def _allocations(attempts: Sequence[Phases]) -> list[list[Phases]]:
    """The attempts of each allocation. Without a scheduler, a restart keeps the process, and its job id.

    An attempt that got its nodes before the last attempt began has the same allocation, even if the disk was too full
    to record how it followed.
    """
    groups: list[list[Phases]] = []
    for each in attempts:
        before, job = groups[-1][-1] if groups else each, each.attempt.job_id
        in_place = before.attempt.text("next").startswith("in_place") or job.startswith("local-")
        kept = in_place or (each.event("held") or math.inf) < before.begin
        if not (groups and kept and before.attempt.job_id == job):
            groups.append([])
        groups[-1].append(each)
    return groups


def _holding(
    group: Sequence[Phases], attempts: Sequence[Phases], now: float
) -> tuple[float, float]:
    """When the allocation began and ended."""
    first, last = group[0], group[-1]
    begin = min(first.event("held") or first.begin, first.begin)
    end = now if last.running else last.last_sign
    after = attempts[attempts.index(last) + 1 :][:1]
    if after and after[0].attempt.job_id == last.attempt.job_id:
        if last.ended is None:  # Slurm's requeue sets the submit time
            end = max(end, after[0].event("submitted") or end)
        # an attempt on a node that is cut off may go on, but the job has its nodes only once
        end = min(end, after[0].event("held") or end)
    return begin, max(end, begin)


def _weights(first: Phases, *, gpus: bool, notes: list[str]) -> dict[str, float]:
    """Node -> its number of GPUs or CPUs."""
    cpus = first.start.get("cpus", "")
    if not gpus and not cpus.isdecimal():
        notes.append(
            f"attempts/{first.attempt.number}/started has no number of CPUs: each of its nodes counts as 1 CPU"
        )
        cpus = "1"
    return dict.fromkeys(
        first.held, first.attempt.gpus / len(first.held) if gpus else float(cpus[:6])
    )
