"""What became of a training, counted from what its ranks wrote down (tests/faults/trainer.py)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Line:
    """One thing that a rank has done."""

    attempt: int
    rank: int
    pid: int
    what: str
    word: str
    time: float
    """Unix time"""
    node: str

    @property
    def step(self) -> int:
        return int(self.word)


def read(path: Path) -> tuple[Line, ...]:
    """All that is written so far."""
    try:
        texts = path.read_text().split("\n")[:-1]
    except FileNotFoundError:
        return ()
    words = (text.split() for text in texts)
    return tuple(
        Line(int(attempt), int(rank), int(pid), what, word, float(moment), node)
        for attempt, rank, pid, what, word, moment, node in words
    )


def newest_step(lines: Sequence[Line]) -> int:
    """The step that was taken last; 0 before the first."""
    return next((line.step for line in reversed(lines) if line.what == "step"), 0)


def repeated(lines: Sequence[Line]) -> int:
    """How many steps an attempt has taken that had been taken before: the most of all attempts."""
    taken, again = set[int](), Counter[int]()
    for line in lines:
        if line.what == "step":
            again[line.attempt] += line.step in taken
            taken.add(line.step)
    return max(again.values(), default=0)


def lost(lines: Sequence[Line]) -> int:
    """How many checkpoints that were safe were not gone on from: damaged ones, and those newer than a resumption's."""
    found, safe = 0, set[int]()
    for line in lines:
        if line.what == "saved":
            safe.add(line.step)
        elif line.what == "damaged":
            found += 1
        elif line.what == "begins" and line.rank == 0:
            newer = {step for step in safe if step > line.step}
            found += len(newer)
            safe -= newer
    return found


def late(lines: Sequence[Line]) -> int:
    """How many steps and saves an attempt made after a later attempt had begun: two at once would damage the run."""
    newest, found = 0, 0
    for line in lines:
        newest = max(newest, line.attempt) if line.what == "begins" else newest
        found += line.what in {"step", "saved"} and line.attempt < newest
    return found


def to_first_step(lines: Sequence[Line], detected: Mapping[int, float]) -> float | None:
    """The longest time from the detection of a failure to the first step of a later attempt; None: no failure.

    `detected`: Unix time for each attempt whose failure was detected. A failure that no step follows does not count.
    """
    waits = (
        min((line.time for line in lines if line.what == "step" and line.attempt > attempt), default=moment) - moment
        for attempt, moment in detected.items()
    )
    return max((wait for wait in waits if wait > 0), default=None)


def finished(lines: Sequence[Line], steps: int) -> bool:
    """Whether it has taken its last step, every step once, in order, on the way that led there."""
    state = state_after(steps)
    return any(line.what == "finished" and line.word == state for line in lines)


def state_after(steps: int) -> str:
    """The state of an uninterrupted training."""
    state = ""
    for step in range(1, steps + 1):
        state = hashlib.sha256(f"{state} {step}".encode()).hexdigest()
    return state


@dataclass(frozen=True)
class Allocation:
    """The nodes of a job between a start and its end, according to Slurm. All times are Unix times."""

    begin: float
    end: float
    nodes: Mapping[str, float]
    """node -> when the job gave it back or lost it"""
    grace: float = 0.0
    """for how many seconds after the end the job may have kept its nodes busy, where Slurm's logs do not tell"""


RESTART = ("restart_gap", "import", "preflight", "start", "imports", "loading", "warm_up", "unknown")
"""the classes of `runner account` that a restart may have"""


def charged(attempts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What `runner account` has, in the same terms as `costs`: the classes of each attempt."""
    restarts = (
        [attempts[0].get("restart_gap", 0.0)],
        *([each.get(name, 0.0) for name in RESTART] for each in attempts[1:]),
    )
    return {
        "held": sum(seconds for each in attempts for name, seconds in each.items() if name != "queue"),
        "hang": sum(each.get("hang", 0.0) for each in attempts),
        "repeated": sum(each.get("repeated", 0.0) for each in attempts),
        "restart": sum(map(sum, restarts)),
    }


class Cost(NamedTuple):
    """Node seconds."""

    measured: float
    charged: float
    """by `runner account`"""
    grain: float
    """by how much they may differ because of the clocks"""

    def fits(self, share: float, seconds: float) -> bool:
        """Whether they differ by at most this share, and so many seconds per node and event."""
        return abs(self.measured - self.charged) <= share * self.measured + seconds * self.grain


_UNFINISHED = 0.3  # seconds at least: the step that a fault has interrupted is a step too, and is repeated
SHARES = {"held": 0.01, "hang": 0.1, "repeated": 0.1, "restart": 0.1}


def misplaced(costs: Mapping[str, Cost], seconds: float = 1) -> list[str]:
    """What `runner account` has in a wrong class, or not at all."""
    return [f"{name}: {cost}" for name, cost in costs.items() if not Cost(*cost).fits(SHARES[name], seconds)]


def costs(
    lines: Sequence[Line],
    allocations: Sequence[Allocation],
    started: Mapping[int, float],
    detected: Mapping[int, float],
    causes: Sequence[str],
    ended: float | None = None,
    *,
    from_log: bool = False,
) -> dict[str, tuple[float, float]]:
    """Node seconds, as the ranks and Slurm tell, and the grain of each figure.

    Slurm's times are whole seconds, and a log is read once a second (`from_log`).

    held: of all nodes. hang: from the last step or save of an attempt until its fault was detected. restart: from then
    to the first step of the next attempt, without the time in which the job held no nodes. repeated: of steps that had
    been taken before. All but the first count the nodes with ranks.

    `ended`: when the step of the last attempt ended, if its program does not tell when its training ended: what passes
    after its last step has the class of the time before its first step, `unknown`, so it counts as a restart.

    `started`, `detected`: Unix time for each attempt that has started, or whose failure was detected.
    """
    held = sum(until - each.begin for each in allocations for until in each.nodes.values())
    found = dict.fromkeys(("hang", "repeated", "restart"), 0.0)
    grains = {
        "held": sum((1 + each.grace) * len(each.nodes) for each in allocations),
        "hang": 0.0,
        "repeated": 0.0,
        "restart": sum(each.grace * len(each.nodes) for each in allocations),
    }
    highest = 0
    free = 0.0  # when the ranks of the attempt before stopped, or its fault was detected
    nodes: list[str] = []

    def add(name: str, seconds: float, grain: float = 1.0) -> None:
        found[name] += seconds
        grains[name] += len(nodes) * grain

    for number, cause in enumerate(causes, 1):
        mine = [line for line in lines if line.attempt == number]
        steps = [line for line in mine if line.what in {"begins", "step", "saved"} and line.rank == 0]
        taken = [line for line in steps if line.what == "step"]
        if not steps:
            continue  # it counts as a part of the restart
        before, nodes = nodes, [line.node for line in mine if line.what == "begins"]
        if free:
            begin = steps_begin(steps)
            middle = started.get(number, begin)
            add(
                "restart",
                held_within(allocations, before, free, middle) + held_within(allocations, nodes, middle, begin),
            )
        pairs = [(before, line) for before, line in pairwise(steps) if line.what == "step"]
        # the interrupted step takes about as long as those before it: on a busy machine, longer than usual
        unfinished = 1 if from_log else max([_UNFINISHED, *(line.time - before.time for before, line in pairs[-3:])])
        again = [(before, line) for before, line in pairs if line.step <= highest]
        add("repeated", len(nodes) * sum(line.time - before.time for before, line in again), unfinished)
        highest = max([highest, *(line.step for line in taken)])
        free = last = max(line.time for line in mine)
        if cause in {"hang", "node_failure", "script_failure"}:
            free = detected.get(
                number, next((each.end for each in allocations if each.begin <= last <= each.end), last)
            )
            add("hang", held_within(allocations, nodes, last, free), unfinished if number in detected else 1)
        elif ended and cause == "done" and number > 1:
            add("restart", held_within(allocations, nodes, last, ended), 0)
    return {"held": (held, grains["held"]), **{name: (seconds, grains[name]) for name, seconds in found.items()}}


def steps_begin(steps: Sequence[Line]) -> float:
    """When the first step began: at the line before it. If there was nothing left to do, when the training began."""
    return next((before.time for before, line in pairwise(steps) if line.what == "step"), steps[0].time)


def held_within(allocations: Sequence[Allocation], nodes: Sequence[str], begin: float, end: float) -> float:
    """How many seconds of this time a job held these nodes, or as many others."""
    return sum(
        max(min(each.nodes.get(node, each.end), end) - max(each.begin, begin), 0.0)
        for each in allocations
        for node in nodes
    )
