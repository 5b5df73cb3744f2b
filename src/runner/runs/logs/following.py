"""The streams of a run as they grow: new lines in the order in which they come, from attempt to attempt."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from runner.runs.logs.merged import labelled
from runner.runs.logs.output import Tail
from runner.runs.logs.streams import Stream, all_streams, of_attempt
from runner.runs.run import Run

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
            found = tuple(each for path in newest for each in of_attempt(self.run, path) if each.rank != 0)
        for each in found:
            if each.path not in self.tails:
                self.tails[each.path] = (each, Tail(each.path))
        self.searched = time.monotonic()
