"""What became of a training, counted from what its ranks wrote down (tests/faults/trainer.py)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


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
