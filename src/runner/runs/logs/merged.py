"""The streams of a run in one: by time as far as it is known, whole lines, each with its rank before it.

No line of a program bears a time that everybody can read. So the batch script writes down, once a second, how long each
file was (payload/log_times.sh): bytes that were there at a second came before those that were not.
"""

from __future__ import annotations

import heapq
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from runner.runs.logs.streams import Stream, all_streams
from runner.runs.run import Run

TIMES = "log-times"
_PIECE_BYTES = 1 << 20
_TAIL_BYTES = 1 << 16


def last_lines(pieces: Iterable[bytes], count: int) -> bytes:
    """The last lines of what the pieces hold."""
    kept: deque[bytes] = deque(maxlen=count)
    for piece in pieces:
        kept.extend(piece.splitlines(keepends=True)[-count:])
    return b"".join(kept)


def merged(run: Run, ranks: Sequence[int] = (), attempt: int | None = None, tail: int | None = None) -> Iterator[bytes]:
    """What the run has printed, attempt by attempt, in pieces of whole lines.

    With `tail` each file is read from its own last lines on: the last ones of all are among them.
    """
    streams = [each for each in all_streams(run, ranks) if attempt in (None, each.attempt)]
    if tail is not None:
        streams = [replace(each, begin=_begin(each, tail)) for each in streams]
    alone = len({(each.rank, each.node) for each in streams}) == 1
    for number in sorted({each.attempt for each in streams}):
        mine = [each for each in streams if each.attempt == number]
        if ranks and len(run.attempts) > 1:
            yield f"--- attempt {number} ---\n".encode()
        times = read_times(run.folder / "attempts" / str(number) / TIMES)
        pieces = [_timed(each, times.get(_name(each, run), ())) for each in mine]
        for _, _, stream, data in heapq.merge(*pieces, key=lambda piece: piece[:2]):
            yield data if alone else labelled(stream.label, data)


def without_times(run: Run) -> tuple[int, ...]:
    """The attempts whose files cannot be merged by time: nobody has written down when they grew."""
    several = {each.attempt for each in all_streams(run) if each.rank is not None}
    return tuple(sorted(n for n in several if not (run.folder / "attempts" / str(n) / TIMES).is_file()))


def read_times(path: Path) -> dict[str, list[tuple[int, int]]]:
    """What a log-times tells; a line that is cut is passed over."""
    found: dict[str, list[tuple[int, int]]] = {}
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    for line in lines:
        second, _, rest = line.partition(" ")
        size, _, name = rest.partition(" ")
        if second.isdecimal() and size.isdecimal() and name:
            grown = found.setdefault(name, [])
            if not grown or grown[-1][0] < int(size):
                grown.append((int(size), int(second)))
    return found


def labelled(label: str, data: bytes) -> bytes:
    """The text with the label before each line; a last line without its end gets one."""
    if not label or not data:
        return data
    start = label.encode()
    body = data.removesuffix(b"\n")
    return start + body.replace(b"\n", b"\n" + start) + b"\n"


def _name(stream: Stream, run: Run) -> str:
    return stream.path.relative_to(run.folder).as_posix()


def _timed(
    stream: Stream, samples: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, tuple[int, int, str], Stream, bytes]]:
    """(second, order, stream, whole lines): the first second at which the lines' ends were seen."""
    sizes = [size for size, _ in samples]
    for at, data in _lines(stream, sizes):
        index = bisect_left(sizes, at + len(data))
        # what came after the last look came later than all that was seen
        second = samples[index][1] if index < len(samples) else samples[-1][1] + 1 if samples else _last_change(stream)
        yield second, stream.order, stream, data


def _begin(stream: Stream, lines: int) -> int:
    """The byte at which the last lines of a stream begin."""
    try:
        at = min(stream.path.stat().st_size, stream.end or sys.maxsize)
    except OSError:
        return stream.begin
    left = lines + 1  # the end of the line before them
    while at > stream.begin:
        count = min(_TAIL_BYTES, at - stream.begin)
        data = _read(stream.path, at - count, count)
        found = data.count(b"\n")
        if found < left:
            at, left = at - count, left - found
            continue
        cut = len(data)
        for _ in range(left):
            cut = data.rfind(b"\n", 0, cut)
        return at - count + cut + 1
    return stream.begin


def _last_change(stream: Stream) -> int:
    try:
        return int(stream.path.stat().st_mtime)
    except OSError:
        return 0


def _lines(stream: Stream, sizes: Iterable[int]) -> Iterator[tuple[int, bytes]]:
    """(byte, whole lines) of a stream, cut behind the last line that was whole at each size."""
    at = stream.begin
    for size in (*sizes, None):
        limit = stream.end if size is None else size if stream.end is None else min(size, stream.end)
        while limit is None or at < limit:
            data = _read(stream.path, at, _PIECE_BYTES if limit is None else min(_PIECE_BYTES, limit - at))
            # the rest of a line that was not whole yet belongs to the next piece; one without end is cut
            final = size is None and len(data) < _PIECE_BYTES
            too_long = len(data) == _PIECE_BYTES and b"\n" not in data
            whole = data if final or too_long else data[: data.rfind(b"\n") + 1]
            if not whole:
                break
            yield at, whole
            at += len(whole)


def _read(path: Path, at: int, count: int) -> bytes:
    """Opened anew each time: a run has more files than a process may hold open."""
    try:
        with path.open("rb") as file:
            file.seek(at)
            return file.read(count)
    except OSError:
        return b""
