"""What a run prints: its files, followed until the run has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from runner.machine.report import Report
from runner.runs.run import Run, exit_code, reloaded
from runner.runs.state.status import RunStatus, ask

_LOOK_SECONDS = 0.2  # between two looks at the file
_CHUNK_BYTES = 1 << 20


class Tail:
    """The part of a file that was not read yet; the file may not exist at first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def read(self) -> bytes:
        """What was added since the last call (a whole file at first); empty when there is nothing new."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(_CHUNK_BYTES)
        except OSError:
            return b""
        self.offset += len(data)
        return data


class Watch:
    """When a run's status is worth asking for: often at first and near the end, seldom in between.

    The controller of a cluster serves everybody: squeue is asked every 2 s at first, later every 15 s; the run
    folder, which costs nothing, is looked at all the time.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.pause = 0.5 if run.scheduler == "local" else 2.0
        self.longest = self.pause if run.scheduler == "local" else 15.0
        self.next = 0.0
        self.seen: tuple[int, int | None] | None = None

    def status(self) -> RunStatus | None:
        """The status when it is time to ask, else None."""
        now = time.monotonic()
        attempts = (len(self.run.attempts), exit_code(self.run))
        if attempts != self.seen:  # an attempt has begun or ended: things move
            self.seen, self.next = attempts, now
        if now < self.next:
            return None
        ending = attempts[1] is not None
        self.next = now + (0.5 if ending else self.pause)
        self.pause = min(self.pause * 1.3, self.longest)
        return ask([reloaded(self.run)])[0]


def has_ended(status: RunStatus) -> bool:
    """Whether nothing will follow."""
    return not status.active


class Growing(Protocol):
    """Files that grow."""

    def new(self) -> Iterator[bytes]:
        """What was added since the last call."""

    def last(self) -> Iterator[bytes]:
        """The same, when nothing more will come."""


class One:
    """A single file, as it is."""

    def __init__(self, path: Path) -> None:
        self.tail = Tail(path)

    def new(self) -> Iterator[bytes]:
        """What was added since the last call."""
        while data := self.tail.read():
            yield data

    last = new


def follow(run: Run, files: Growing, write: Callable[[bytes], None], report: Report) -> RunStatus:
    """Hand over what the files get until the run has ended; returns the last status.

    Changes of state that print nothing (waiting in the queue) are reported.
    """
    watch = Watch(run)
    said = ""
    while True:
        status = watch.status()
        if status is not None:
            shown = f"{status.state} {status.reason}".strip()
            if shown != said and status.state == "PENDING":
                report.say(f"{run.name}: waiting in the queue ({status.reason or 'no reason given yet'})")
            said = shown
        ended = status is not None and has_ended(status)
        for data in files.last() if ended else files.new():
            write(data)
        if status is not None and ended:
            return status
        time.sleep(_LOOK_SECONDS)


def result_code(status: RunStatus) -> int:
    """The exit code that `launch --wait` passes on: the job's own; 1 where it left none, or was ended from outside."""
    if status.state == "COMPLETED":
        return status.exit_code or 0
    return status.exit_code or 1
