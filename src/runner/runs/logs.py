"""The log files of a run: job.log, to which all attempts append, and each attempt's files for nodes and ranks."""

from __future__ import annotations

import heapq
import io
import re
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from runner.errors import RunnerError
from runner.machine import files
from runner.runs.attempt import Log, begins
from runner.runs.run import Run

_PIECE_BYTES = 1 << 20


def all_streams(run: Run, ranks: Sequence[int] = ()) -> tuple[Log, ...]:
    """The streams of all attempts; if `ranks` is not empty, only those of these ranks."""
    found: list[Log] = []
    own_files = set()
    for attempt in run.attempts:
        mine = tuple(attempt.logs(run.processes_per_node))
        own_files |= {(each.attempt, each.rank) for each in mine}
        found += (each for each in mine if (each.rank in ranks if ranks else each.rank != 0))
    if not ranks:
        return (*job_log(run), *found)
    if (
        0 in ranks
    ):  # with the launcher srun, and if there is only one task, rank 0 writes to job.log
        found += (each for each in job_log(run) if (each.attempt, 0) not in own_files)
    return tuple(found)


def job_log(run: Run) -> tuple[Log, ...]:
    """job.log, split at the beginning of each attempt. Text before the first attempt belongs to the first."""
    own = [(attempt.number, *output) for attempt in run.attempts for output in attempt.outputs]
    if own:  # if an attempt writes to the file of an earlier one, that one ends there
        later: dict[Path, int] = {}
        streams = []
        for number, path, begin in reversed(own):
            streams.append(Log(path, number, begin=begin, end=later.get(path.resolve())))
            later[path.resolve()] = begin
        return tuple(reversed(streams))
    cuts = begins(run.log) or [(1, 0)]
    cuts[0] = (cuts[0][0], 0)
    ends: list[int | None] = [at for _, at in cuts[1:]]
    return tuple(
        Log(run.log, number, begin=at, end=end)
        for (number, at), end in zip(cuts, [*ends, None], strict=True)
    )


def check_ranks(run: Run, ranks: Iterable[int]) -> None:
    """Raise RunnerError for a rank that the run does not have, or that has no log file of its own."""
    world = run.nodes * run.processes_per_node
    if not run.attempts:
        raise RunnerError(
            f"{run.name} has not started yet",
            "no attempt of the run has begun",
            f"runner status {run.name}",
        )
    for rank in ranks:
        if rank >= world:
            why = f"its ranks are 0 to {world - 1}"
        elif not all_streams(run, (rank,)):
            why = "the rank has not started, or the launcher writes the output of all ranks to job.log"
        else:
            continue
        raise RunnerError(f"{run.name} has no log for rank {rank}", why, f"runner logs {run.name}")


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse ranks such as `3`, `0,3` or `0-7,16`. Raises RunnerError for other text."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        is_range = last.isdecimal() and first.isdecimal() and int(first) <= int(last)
        if not first.isdecimal() or (dash and not is_range):
            raise RunnerError(
                f"--rank cannot be {text!r}",
                "it must be a number, a list or a range",
                "--rank 0,3,8-11",
                exit_code=2,
            )
        found += range(int(first), int(last or first) + 1)
    return tuple(dict.fromkeys(found))


_TAIL_BYTES = 1 << 16


def last_lines(pieces: Iterable[bytes], count: int) -> bytes:
    """The last `count` lines of the pieces together."""
    kept: deque[bytes] = deque(maxlen=count)
    for piece in pieces:
        kept.extend(io.BytesIO(piece))  # splitlines also cuts at the \r of a progress bar
    return b"".join(kept)


def merged(
    run: Run, ranks: Sequence[int] = (), attempt: int | None = None, tail: int | None = None
) -> Iterator[bytes]:
    """The output of the run, attempt by attempt, in pieces of complete lines.

    With `tail`, only the last lines of each file are read. The last lines of the merged output are among them.
    Raises RunnerError for an attempt that does not exist.
    """
    attempts = {each.number: each for each in run.attempts}
    if attempt not in (None, *attempts):
        why, fix = "no attempt has started", f"runner status {run.name}"
        if attempts:
            why = f"it has these attempts: {', '.join(map(str, attempts))}"
            fix = f"runner logs {run.name}"
        raise RunnerError(f"{run.name} has no attempt {attempt}", why, fix)
    streams = [each for each in all_streams(run, ranks) if attempt in (None, each.attempt)]
    if tail is not None:
        streams = [replace(each, begin=_begin(each, tail)) for each in streams]
    alone = len({(each.rank, each.node) for each in streams}) == 1
    for number in sorted({each.attempt for each in streams}):
        mine = [each for each in streams if each.attempt == number]
        if ranks and len(run.attempts) > 1:
            yield f"--- attempt {number} ---\n".encode()
        times = read_times(attempts[number].log_times) if number in attempts else {}
        # text after the last recorded size of its file is newer than everything that was recorded
        latest = max((second for grown in times.values() for _, second in grown), default=0.0)
        pieces = [
            _timed(each, times.get(each.path.relative_to(run.folder).as_posix(), ()), latest + 1)
            for each in mine
        ]
        for _, _, stream, data in heapq.merge(*pieces, key=lambda piece: piece[:2]):
            yield data if alone else labelled(stream.label, data)


def without_times(run: Run) -> tuple[int, ...]:
    """The attempts whose files cannot be merged by time, because they have no log-times."""
    unmerged = [each for each in run.attempts if not each.log_times.is_file()]
    return tuple(
        each.number
        for each in unmerged
        if any(log.rank for log in each.logs(run.processes_per_node))
    )


def read_times(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Parse log-times: file -> (size, time)."""
    found: dict[str, list[tuple[int, float]]] = {}
    for second, size, name in samples(files.text_of(path)):
        grown = found.setdefault(name, [])
        if not grown or grown[-1][0] < size:
            grown.append((size, second))
    return found


_TIME = re.compile(r"[0-9]+([.][0-9]+)?")  # whole seconds where bash is older than 5


def samples(text: str) -> Iterator[tuple[float, int, str]]:
    """(Unix time, size in bytes, file) of each line of log-times. Incomplete lines are skipped."""
    for line in text.splitlines():
        second, _, rest = line.partition(" ")
        size, _, name = rest.partition(" ")
        if _TIME.fullmatch(second) and size.isdecimal() and name:
            yield float(second), int(size), name


def labelled(label: str, data: bytes) -> bytes:
    """The text with the label before each line. A missing newline at the end is added."""
    if not label or not data:
        return data
    start = label.encode()
    body = data.removesuffix(b"\n")
    return start + body.replace(b"\n", b"\n" + start) + b"\n"


def _timed(
    stream: Log, samples: Sequence[tuple[int, float]], after: float
) -> Iterator[tuple[float, tuple[int, int, str], Log, bytes]]:
    """(second, order, stream, complete lines): the second in which the ends of the lines were first recorded.

    `after`: that of lines whose ends were not recorded, if the file has any record.
    """
    if not samples:
        after = files.modified(stream.path) or 0.0
    sizes = [size for size, _ in samples]
    for at, data in _lines(stream, sizes):
        index = bisect_left(sizes, at + len(data))
        second = samples[index][1] if index < len(samples) else after
        yield second, stream.order, stream, data


def _begin(stream: Log, lines: int) -> int:
    """The byte offset of the last `lines` lines of a stream."""
    try:
        at = min(stream.path.stat().st_size, stream.end or sys.maxsize)
    except OSError:
        return stream.begin
    left = lines + 1  # one more, for the newline before these lines
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


def _lines(stream: Log, sizes: Iterable[int]) -> Iterator[tuple[int, bytes]]:
    """(byte offset, complete lines) of a stream, split at each size, after the last line that was complete."""
    at = stream.begin
    for size in (*sizes, None):
        limit = (
            stream.end if size is None else size if stream.end is None else min(size, stream.end)
        )
        while limit is None or at < limit:
            data = _read(
                stream.path, at, _PIECE_BYTES if limit is None else min(_PIECE_BYTES, limit - at)
            )
            # an incomplete line belongs to the next piece; a very long line is split
            final = size is None and len(data) < _PIECE_BYTES
            too_long = len(data) == _PIECE_BYTES and b"\n" not in data
            whole = data if final or too_long else data[: data.rfind(b"\n") + 1]
            if not whole:
                break
            yield at, whole
            at += len(whole)


def _read(path: Path, at: int, count: int) -> bytes:
    """Read part of a file. The file is opened each time, because a run may have more files than a process can open."""
    try:
        with path.open("rb") as file:
            file.seek(at)
            return file.read(count)
    except OSError:
        return b""
