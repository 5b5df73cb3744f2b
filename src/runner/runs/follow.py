"""What a run prints: its files, followed until the run has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from runner.machine.report import Report
from runner.runs.logs import Stream, all_streams, labelled, of_attempt
from runner.runs.run import Run, reloaded
from runner.runs.schedulers.scheduler import scheduler_of
from runner.runs.status import RunStatus, ask

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
        self.pause, self.longest = scheduler_of(run.scheduler).PAUSES
        self.next = 0.0
        self.seen: tuple[int, int | None] | None = None

    def status(self) -> RunStatus | None:
        """The status when it is time to ask, else None."""
        now = time.monotonic()
        newest = self.run.newest
        attempts = (newest.number if newest else 0, newest.exit_code if newest else None)
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


_SEARCH_SECONDS = 1.0  # between two looks for new files


class Following:
    """What is new in a run's files since the last look; files that appear meanwhile are found."""

    def __init__(self, run: Run, ranks: Sequence[int] = ()) -> None:
        self.run, self.ranks = run, tuple(ranks)
        self.tails: dict[Path, tuple[Stream, Tail]] = {}
        self.rest: dict[Path, bytes] = {}
        self.searched = 0.0
        if not ranks:
            self.tails[run.log] = (Stream(run.log, 1), Tail(run.log))

    def new(self) -> Iterator[bytes]:
        """New whole lines, each with its rank."""
        if time.monotonic() - self.searched > _SEARCH_SECONDS:
            self._search()
        for path, (stream, tail) in tuple(self.tails.items()):
            while data := tail.read():
                if len(self.tails) == 1 and not (stream.label and not self.ranks):
                    yield data  # one file, as it is
                    continue
                data = self.rest.pop(path, b"") + data
                cut = data.rfind(b"\n") + 1
                self.rest[path] = data[cut:]
                if cut:
                    yield labelled(stream.label, data[:cut])

    def last(self) -> Iterator[bytes]:
        """What is new when the run has ended, and the lines that were never finished."""
        self._search()
        yield from self.new()
        for path, data in self.rest.items():
            yield labelled(self.tails[path][0].label, data + b"\n" if data else b"")

    def _search(self) -> None:
        attempts = self.run.attempts
        found = all_streams(self.run, self.ranks) if self.ranks else ()
        if not self.ranks:  # of earlier attempts nothing new appears
            newest = attempts[-1:] if self.searched else attempts
            found = tuple(each for attempt in newest for each in of_attempt(self.run, attempt) if each.rank != 0)
        for each in found:
            if each.path not in self.tails:
                self.tails[each.path] = (each, Tail(each.path))
        self.searched = time.monotonic()
