"""Follow the output files of a run until the run has ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from runner.machine.report import Report
from runner.runs.attempt import Log
from runner.runs.logs import all_streams, labelled
from runner.runs.run import Run, is_over, reloaded
from runner.runs.schedulers.scheduler import scheduler_of
from runner.runs.status import RunStatus, ask, goes_on

_LOOK_SECONDS = 0.2  # between two looks at the file
_END_SECONDS = 0.5  # between the first two queries about a run that is over
_CHUNK_BYTES = 1 << 20


class Tail:
    """Reads what is appended to a file. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def read(self) -> bytes:
        """What was appended since the last call (first: the whole file); empty if there is nothing new."""
        try:
            with self.path.open("rb") as file:
                if (
                    file.seek(0, os.SEEK_END) < self.offset
                ):  # Slurm empties the file when it requeues a job
                    self.offset = 0
                file.seek(self.offset)
                data = file.read(_CHUNK_BYTES)
        except OSError:
            return b""
        self.offset += len(data)
        return data

    def new(self) -> Iterator[bytes]:
        """What was added since the last call."""
        while data := self.read():
            yield data

    last = new


class Watch:
    """Decides when to ask for a run's status: often at first and near the end, rarely in between.

    All users share the cluster's controller, so squeue is called every 2 s at first, and every 15 s later, also while
    the run waits for its next attempt. Reading the run folder is cheap, and happens every time.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.shortest, self.longest = scheduler_of(run.scheduler).PAUSES
        self.pause = self.next = 0.0
        self.seen: tuple[int, int | None, bool] | None = None

    def status(self) -> RunStatus | None:
        """The status if it is time to ask, else None."""
        now = time.monotonic()
        newest, over = self.run.newest, is_over(self.run)
        attempts = (newest.number if newest else 0, newest.exit_code if newest else None, over)
        if attempts != self.seen:  # an attempt has begun or ended: ask more often again
            self.seen, self.next = attempts, now
            self.pause = _END_SECONDS if over else self.shortest
        if now < self.next:
            return None
        self.next = now + self.pause
        self.pause = min(self.pause * 1.3, self.longest)
        return ask([reloaded(self.run)])[0]


def follow(
    run: Run, files: Tail | Following, write: Callable[[bytes], None], report: Report
) -> RunStatus:
    """Pass on what is appended to the files until the run has ended, and return its last status.

    Also reports changes of state while there is no output, such as waiting in the queue.
    """
    watch = Watch(run)
    said = ""
    while True:
        status = watch.status()
        if status is not None:
            shown = f"{status.state} {status.reason}".strip()
            if shown != said and status.state == "PENDING":
                report.say(
                    f"{run.name}: waiting in the queue ({status.reason or 'no reason given yet'})"
                )
            elif shown != said and status.state == "UNKNOWN":
                report.say(f"{run.name}: its state is not known at the moment ({status.reason})")
            said = shown
        ended = status is not None and not goes_on(status)
        for data in files.last() if ended else files.new():
            write(data)
        if status is not None and ended:
            return status
        time.sleep(_LOOK_SECONDS)


def result_code(status: RunStatus) -> int:
    """The exit code for `launch --wait`: that of the job, or 1 if it has none or was ended from outside."""
    return status.exit_code or int(status.state != "COMPLETED")


_SEARCH_SECONDS = 1.0  # between two searches for new files


class Following:
    """Reads what is appended to a run's files, including files that are created meanwhile."""

    def __init__(self, run: Run, ranks: Sequence[int] = ()) -> None:
        self.run, self.ranks = run, tuple(ranks)
        self.tails: dict[Path, tuple[Log, Tail]] = {}
        self.rest: dict[Path, bytes] = {}
        self.searched = 0.0
        if not ranks:
            self.tails[run.log] = (Log(run.log, 1), Tail(run.log))

    def new(self) -> Iterator[bytes]:
        """New complete lines, each labelled with its rank."""
        if time.monotonic() - self.searched > _SEARCH_SECONDS:
            self._search()
        for path, (stream, tail) in tuple(self.tails.items()):
            for data in tail.new():
                if len(self.tails) == 1 and not (stream.label and not self.ranks):
                    yield data  # a single file is passed on unchanged
                    continue
                data = self.rest.pop(path, b"") + data
                cut = data.rfind(b"\n") + 1
                self.rest[path] = data[cut:]
                if cut:
                    yield labelled(stream.label, data[:cut])

    def last(self) -> Iterator[bytes]:
        """What is new after the run has ended, including incomplete last lines."""
        self._search()
        yield from self.new()
        for path, data in self.rest.items():
            yield labelled(self.tails[path][0].label, data + b"\n" if data else b"")

    def _search(self) -> None:
        attempts = self.run.attempts
        found = all_streams(self.run, self.ranks) if self.ranks else ()
        per_node = self.run.processes_per_node
        if not self.ranks:  # files of earlier attempts do not grow any more
            newest = attempts[-1:] if self.searched else attempts
            found = tuple(
                each for attempt in newest for each in attempt.logs(per_node) if each.rank != 0
            )
            outputs = (path for attempt in newest for path, _ in attempt.outputs)
            found = (*found, *(Log(path, 1) for path in outputs if path.name != self.run.log.name))
        for each in found:
            if each.path not in self.tails:
                self.tails[each.path] = (each, Tail(each.path))
        self.searched = time.monotonic()
