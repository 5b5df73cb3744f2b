"""How the logs of an attempt grew: their text, in the order in which it was written, with its times.

attempts/N/log-times has the size of each log at some moments (payload/log_times.sh).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from pathlib import Path
from typing import NamedTuple

from runner.runs.attempt import Attempt, begin_of_later
from runner.runs.logs import samples
from runner.runs.steps import Piece

_BLOCK_BYTES = 4 << 20
_LONGEST_LINE = 1 << 20  # a longer one is skipped
_LONGEST_BAR = 2000
# a progress bar ends its line only when it is drawn again
_BAR = re.compile(rb"[0-9]%\|[^|]*\| *[0-9]+/[0-9]+ \[[^]]*\]\Z")
# without log-times, the text of several logs is merged in slices
_SLICE_SECONDS = 5.0
_MOST_SLICES = 10_000


class Sample(NamedTuple):
    """The size of a log at a moment."""

    second: float
    size_bytes: int
    pause: float
    """seconds since the previous look at the logs; the log reached this size within that time"""


@dataclass
class GrowingLog:
    """A log, and how far it has been read."""

    name: str
    """its path in the run folder, as in log-times"""
    path: Path
    at: int
    """the first byte that has not been read: the beginning of a line"""
    size_bytes: int
    """how far to read"""
    written: float
    """when the log was written last, in Unix seconds"""
    since: Sample
    """the newest size that is known from the reading before; or the beginning of the attempt"""
    samples: Sequence[Sample] = ()
    rest: bytes = b""
    """the beginning of a line that is not complete yet"""
    later_begins: int | None = None
    """where a later attempt begins in the file; None: nowhere yet"""


@dataclass
class LogTimes:
    """The file log-times, as far as it has been read."""

    bytes_read: int = 0
    lines: int = 0
    grown: dict[str, list[Sample]] = field(default_factory=dict)
    """log -> its new samples"""

    def read(self, path: Path) -> None:
        """Read what is new. A file that cannot be read has no samples."""
        try:
            with path.open("rb") as file:
                file.seek(self.bytes_read)
                data = file.read()
        except OSError:
            return
        data = data[: data.rfind(b"\n") + 1]
        self.bytes_read += len(data)
        found = list(samples(data.decode(errors="replace")))
        names = max(len({name for _, _, name in found}), 1)
        for second, size, name in found:
            self.lines += 1
            # payload/log_times.sh looks every second, less often at many logs, and in a long attempt
            pause = max(1 + names // 64, min(self.lines // 1000, 60))
            self.grown.setdefault(name, []).append(Sample(second, size, pause))


def pieces(logs: Sequence[GrowingLog], attempt: Attempt, ends: frozenset[str]) -> Iterator[Piece]:
    """The new text of the logs, in the order in which it was written.

    Of the logs `ends`, the text until a later attempt begins.
    """
    each = [_pieces(log, attempt.number if log.name in ends else None) for log in logs]
    return merge(*each, key=lambda piece: (piece.ended, piece.log))


class _Growth(NamedTuple):
    """A part of a log that was written between two moments."""

    end: int
    begun: float
    ended: float


def _growths(log: GrowingLog) -> Iterator[_Growth]:
    """The growth of the log since it was read before."""
    known = log.since
    for sample in log.samples:
        if known.size_bytes < sample.size_bytes <= log.size_bytes:
            begun = sample.second - sample.pause
            if known.second <= sample.second:  # otherwise, the clocks of two machines differ
                begun = max(known.second, begun)
            yield _Growth(sample.size_bytes, begun, sample.second)
            known = sample
    if known.size_bytes >= log.size_bytes:
        if log.at < log.size_bytes:  # a line that was not complete then
            yield _Growth(log.size_bytes, known.second, known.second)
        return
    written = max(log.written, known.second)
    if known.pause:
        yield _Growth(log.size_bytes, max(known.second, written - known.pause), written)
        return
    slices = int(min((written - known.second) // _SLICE_SECONDS + 1, _MOST_SLICES))
    for number in range(1, slices + 1):
        begun, ended = (
            known.second + (written - known.second) * each / slices for each in (number - 1, number)
        )
        more = (log.size_bytes - known.size_bytes) * number // slices
        yield _Growth(known.size_bytes + more, begun, ended)


def _pieces(log: GrowingLog, number: int | None) -> Iterator[Piece]:
    """The new text of a log, until an attempt after attempt `number` begins."""
    try:
        file = log.path.open("rb")
    except OSError:
        return
    with file:
        file.seek(log.at)
        for growth in _growths(log):
            while (missing := growth.end - log.at - len(log.rest)) > 0:
                data = file.read(min(missing, _BLOCK_BYTES))
                if not data:
                    return
                in_data = max(data.rfind(end) for end in (b"\n", b"\r", b"\0")) + 1
                last = data[in_data:] if in_data else log.rest[-_LONGEST_BAR:] + data
                is_bar = _BAR.search(last[-_LONGEST_BAR:])
                if not in_data and not is_bar and len(log.rest) <= _LONGEST_LINE:
                    log.rest += data  # a long line comes in many parts: each is looked at once
                    continue
                text = log.rest + data
                cut = len(text) if is_bar else len(log.rest) + in_data if in_data else 0
                later = begin_of_later(text[:cut], number) if number is not None else None
                if later is not None:
                    log.later_begins = log.at + later
                    cut = later
                log.rest = text[cut:] if later is None else b""
                log.at += cut
                if len(log.rest) > _LONGEST_LINE:
                    log.at += len(log.rest)
                    log.rest = b""
                if cut:
                    decoded = text[:cut].decode("latin-1")
                    yield Piece(log.name, decoded, growth.begun, growth.ended)
                if later is not None:
                    return


def newest_rank_log(attempt: Attempt) -> Path | None:
    """The log of the last rank, where some trainers print their steps; None if it is in job.log."""
    found = [*attempt.folder.glob("rank-*.log")]
    found += attempt.folder.glob("node-*/*/attempt_*/*/stdout.log")
    last = max(found, key=_natural, default=None)
    if last is None:
        return None
    local_rank, node = last.parent.name, last.relative_to(attempt.folder).parts[0]
    return None if (node, local_rank, last.name) == ("node-0", "0", "stdout.log") else last


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    """The sort key by which rank-10 is after rank-9."""
    parts = re.split("([0-9]+)", str(path))
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
