"""Read logs of any size in one pass, in pieces of 1 MiB with bounded memory. Keeps the lines with certain words.

In a file larger than `HEAD_BYTES + TAIL_BYTES`, only the head and the tail are searched. The newlines between them are
counted, so that line numbers are correct. Of lines that differ only in numbers, only one is searched (`Sieve`). A
carriage return ends a line too, but does not count as a line, because editors number lines by newlines.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import BinaryIO

PIECE_BYTES = 1 << 20
HEAD_BYTES = 64 << 20
TAIL_BYTES = 192 << 20
LINE_BYTES = 4096  # of a longer line, only this much around the word is matched, to bound the time that a pattern takes
FIRST, LAST = 24, 8  # lines to keep per word and file, because some ranks repeat their messages
SURVIVED = (
    20  # with this many signs of progress after a line, the program survived what the line reports
)

# signs of training progress in the output of transformers, Megatron, tqdm and our own scripts
_PROGRESS = tuple(
    re.compile(text) for text in (rb"loss['\"]?[:= ]{1,3}-?\d", rb"it/s[\],]", rb"s/it[\],]")
)
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,16}[A-Za-z]")


@dataclass(frozen=True)
class Line:
    """A line that contains one of the words."""

    path: Path
    number: int
    """from 1"""
    offset: int
    """the byte offset of the line"""
    text: str
    progress: int
    """the number of signs of progress before it"""


@dataclass
class Scan:
    """The result of one pass over a file."""

    path: Path
    size_bytes: int = 0
    progress: int = 0
    """the number of signs of progress in everything that was read"""
    skipped_bytes: int = 0
    """between head and tail"""
    trouble: str = ""
    """why the file could not be read; empty: it was"""
    found: dict[bytes, tuple[list[Line], deque[Line]]] = field(default_factory=dict)

    def lines(self) -> tuple[Line, ...]:
        """The kept lines, each once, in order."""
        kept = {
            line.offset: line for first, last in self.found.values() for line in (*first, *last)
        }
        return tuple(kept[offset] for offset in sorted(kept))

    def survived(self, line: Line) -> bool:
        """Whether the program continued for a long time after this line."""
        return self.progress - line.progress >= SURVIVED


def scan(path: Path, words: tuple[bytes, ...], start: int = 0) -> Scan:
    """Read a file from byte `start`. If that fails, `trouble` contains the reason."""
    result, sieve = Scan(path), sieve_of(words)
    try:
        with path.open("rb") as file:
            result.size_bytes = size = path.stat().st_size
            number = 1 + _newlines(file, 0, start)
            if size - start > HEAD_BYTES + TAIL_BYTES:
                middle, tail = start + HEAD_BYTES, size - TAIL_BYTES
                result.skipped_bytes = tail - middle
                number = _sift_all(file, start, middle, number, sieve, result)
                number += _newlines(file, middle, tail)
                start = tail
            _sift_all(file, start, size, number, sieve, result)
    except OSError as error:
        result.trouble = error.strerror or str(error)
    return result


def _sift_all(
    file: BinaryIO, start: int, stop: int, number: int, sieve: Sieve, result: Scan
) -> int:
    for offset, piece in _pieces(file, start, stop):
        _sift(piece, offset, number, sieve.words_in(piece), result)
        number += piece.count(b"\n")
    return number


def _newlines(file: BinaryIO, start: int, stop: int) -> int:
    file.seek(start)
    count = 0
    while start < stop and (data := file.read(min(PIECE_BYTES, stop - start))):
        count += data.count(b"\n")
        start += len(data)
    return count


def _pieces(file: BinaryIO, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of complete lines. Of lines longer than `LONG_LINE_BYTES`, only the beginning and the end."""
    file.seek(start)
    carry, place, cut_off = b"", start, False
    while place < stop and (data := file.read(min(PIECE_BYTES, stop - place))):
        place += len(data)
        piece = carry + data
        offset = place - len(piece)
        if end := max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1:
            yield offset, piece[:end]
            carry, cut_off = piece[end:], False
        elif len(piece) <= LONG_LINE_BYTES:
            carry = piece
        else:
            if not cut_off:
                yield offset, piece
            carry, cut_off = piece[-LONG_LINE_BYTES // 2 :] if cut_off else b"", True
    if carry:
        yield place - len(carry), carry


def _sift(piece: bytes, offset: int, number: int, words: Iterable[bytes], result: Scan) -> None:
    """Keep the lines that contain one of the words: for each word, the first and last ones of the file."""
    marks: list[int] = []
    for pattern in _PROGRESS:
        marks += [found.start() for found in pattern.finditer(piece)]
    marks.sort()
    text = piece.replace(b"\r", b"\n")

    def line_at(place: int) -> Line:
        begin = text.rfind(b"\n", 0, place) + 1
        before = result.progress + bisect_left(marks, place)
        newlines = piece.count(b"\n", 0, begin)
        return Line(
            result.path, number + newlines, offset + begin, _text(text, begin, place), before
        )

    for word in words:
        place = text.find(word)
        if place < 0:
            continue
        first, last = result.found.setdefault(word, ([], deque(maxlen=LAST)))
        while place >= 0 and len(first) < FIRST:
            first.append(line_at(place))
            end = text.find(b"\n", place)
            place = text.find(word, end) if end >= 0 else -1
        if place >= 0:  # after the first ones, only the last ones of each piece are needed
            last.extend(line_at(each) for each in _last_places(text, word, place))
    result.progress += len(marks)


def _last_places(text: bytes, word: bytes, start: int) -> list[int]:
    places: list[int] = []
    end = len(text)
    while len(places) < LAST and (place := text.rfind(word, start, end)) >= 0:
        places.append(place)
        end = text.rfind(b"\n", start, place)
        if end < 0:
            break
    return places[::-1]


def _text(text: bytes, begin: int, place: int) -> str:
    """The line around a position, shortened if it is very long."""
    end = text.find(b"\n", place)
    end = min(len(text) if end < 0 else end, place + LINE_BYTES // 2)
    return plain(text[max(begin, place - LINE_BYTES // 2) : end])


def plain(data: bytes) -> str:
    """Convert bytes of a log to text, without colour codes."""
    return _COLOUR.sub("", data.decode(errors="replace")).rstrip("\r\n")


def window(path: Path, offset: int, size_bytes: int) -> list[str]:
    """The lines in a range of bytes; empty if the file no longer exists."""
    try:
        with path.open("rb") as file:
            file.seek(max(offset, 0))
            return [plain(line) for line in file.read(size_bytes).split(b"\n")]
    except OSError:
        return []


_MOST = 100_000  # the number of line shapes to remember
_LONGEST = 512  # the longest line shape to remember, in bytes
LONG_LINE_BYTES = (
    256 << 10
)  # of a longer line, only the first and the last half of this length are searched
_NUMBERS = b"0123456789"
_LINE_ENDS = bytes.maketrans(b"\r", b"\n")
_LETTERS = bytes(
    code if chr(code).isalpha() and code < 128 else 32 for code in range(256)
)  # all others: a blank


class Sieve:
    """The words to search for, and the shapes of the lines seen so far."""

    def __init__(self, words: tuple[bytes, ...]) -> None:
        self._words: dict[bytes, list[bytes]] = {}
        for word in words:
            self._words.setdefault(word.translate(None, _NUMBERS), []).append(word)
        self._by_longest: dict[bytes, list[bytes]] = {}
        for word in self._words:
            self._by_longest.setdefault(
                max(word.translate(_LETTERS).split(), key=len, default=b""), []
            ).append(word)
        self._known: dict[bytes, tuple[bytes, ...]] = {}

    def words_in(self, piece: bytes) -> tuple[bytes, ...]:
        """The words that may occur in a piece: those that do, and possibly others that differ only in digits."""
        shapes = set(piece.translate(_LINE_ENDS, _NUMBERS).split(b"\n"))
        new = shapes - self._known.keys()
        found = {word for shape in shapes & self._known.keys() for word in self._known[shape]}
        found.update(self._learn(new))
        return tuple(sorted(word for shape in found for word in self._words[shape]))

    def _learn(self, shapes: set[bytes]) -> set[bytes]:
        text = b"\n".join(map(_ends_of_long, shapes))
        # a text has few different words, so most of the words can be excluded without searching the whole text
        vocabulary = b" ".join(set(text.translate(_LETTERS).split()))
        likely = [words for longest, words in self._by_longest.items() if longest in vocabulary]
        present = [word for words in likely for word in words if word in text]
        if len(self._known) + len(shapes) > _MOST:
            self._known.clear()
        for shape in shapes:
            if len(shape) <= _LONGEST and len(self._known) < _MOST:
                self._known[shape] = tuple(word for word in present if word in shape)
        return set(present)


sieve_of = cache(Sieve)  # to make one takes longer than to read a short log


def _ends_of_long(line: bytes) -> bytes:
    half = LONG_LINE_BYTES // 2
    return line if len(line) <= LONG_LINE_BYTES else b"%b\n%b" % (line[:half], line[-half:])


# `[rank3]:` torch, `[default3]:` torchrun's tee, `[Rank 3]` ProcessGroupNCCL, `rank: 3` torchrun's summary,
# `3: ` srun --label, `task 3:` srun, `rank 3 ` our own
_RANK = re.compile(
    r"\[rank ?(\d{1,6})\]|\[Rank (\d{1,6})\]|^\s*rank\s*: (\d{1,6})\b|^ ?(\d{1,6}): "
    r"|\b[Rr]ank[ :=]{1,3}(\d{1,6})\b|\btask (\d{1,6}):"
)
_RANK_FILE = re.compile(r"rank[-_.]?(\d{1,6})\b")
_NODE = re.compile(
    r"\bsrun: error: ([A-Za-z][\w.-]{0,63}): task|\bON ([A-Za-z][\w.-]{0,63}) CANCELLED|^\s*host\s*: (\S{1,64})"
)
_ISO = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T_ ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_GLOG = re.compile(
    r"\b[EWIF](\d\d?)(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?"
)  # torch writes no leading zero
# `(WorkerDict pid=4711, ip=10.0.0.1) `, and SkyPilot's `(worker1, rank=1, pid=4711, ip=10.0.0.1) `
_RAY = r"\((?:[\w.:<>]{1,80}|[\w.-]{1,60}, rank=\d{1,6},) pid=\d{1,9}(?:, ip=[\w.:]{1,60})?\) ?"
# of each line of a traceback too: the host (pdsh, DeepSpeed), Monarch's `[0] [3] `
_HOST = (
    r"(?:(?:[a-z][a-z-]{0,30}\d[\w.-]{0,40}|\d{1,3}(?:\.\d{1,3}){3}): |(?:\[\d{1,4}\] ){1,3})"
    r"(?=\s{2}|\[rank|Traceback|[\w.]{1,80}(?:Error|Exception)\b)"
)
# `[rank3]: `, torchrun's role and local rank (`[default3]:`, `[nid001:3]:` for --role), mpirun's `[1,3]<stderr>:`
_TAGS = r"\[(?:rank ?\d{1,6}|default\d{1,4})\]:? ?|\[(?:\w[\w.:|-]{0,80})?\d\]:|\[\d{1,4},\d{1,6}\]<std(?:err|out)>:"
_PREFIX = re.compile(rf"^(?:\s?\d{{1,6}}: |{_TAGS}|{_RAY}|{_HOST})+")
# what a collector of logs, `docker compose` (`vllm-1  | `), or vLLM's logger, puts before each line
_STAMP = re.compile(
    r"^(?:(?:\s{0,4}\| )?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?(?: \| |[ \t])"
    r"(?:std(?:out|err) [FP] |- [\w.-]{1,60} - [A-Z]{4,8} - (?=\[rank))?"
    r"|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{1,9})?\] (?=\s|Traceback|[\w.]{1,80}(?:Error|Exception)\b)"
    r"|(?:ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[\w./]{1,60}:\d{1,6}\] "
    r"|[a-z][\w.-]{1,80} {2,40}\| )"
)


def rank_of(text: str, path: Path | None = None) -> int | None:
    """The global rank that wrote a line, from the line, or else from the file name."""
    found = _RANK.search(text)
    if found:
        return int(next(group for group in found.groups() if group is not None))
    in_name = _RANK_FILE.search(path.name) if path else None
    return int(in_name[1]) if in_name else None


def node_of(text: str) -> str:
    """The node that a line names; empty if there is none."""
    found = _NODE.search(text)
    return next((group for group in found.groups() if group), "") if found else ""


def time_of(text: str, year: int) -> datetime | None:
    """The time in a line. If it has no year, `year` is used."""
    if found := _ISO.search(text):
        numbers = found.groups()
    elif short := _GLOG.search(text):
        numbers = (str(year), *short.groups())
    else:
        return None
    *parts, fraction = numbers
    try:
        year, month, day, hour, minute, second = map(int, parts)
        return datetime(
            year, month, day, hour, minute, second, int((fraction or "0")[:6].ljust(6, "0"))
        )
    except ValueError:
        return None


def without_prefix(text: str) -> tuple[str, str]:
    """(what a launcher put before a line to tell the rank, the line itself without that and without a time)."""
    text = _STAMP.sub("", text, count=1)
    found = _PREFIX.match(text)
    return (found[0], _STAMP.sub("", text[found.end() :], count=1)) if found else ("", text)
