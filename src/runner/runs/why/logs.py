"""Reading logs of any size: one pass in pieces of 1 MiB, memory bounded; lines that hold one of some words are kept.

Of a file beyond `HEAD_BYTES + TAIL_BYTES` the head and the tail are read, and the newlines between them counted, so
that line numbers stay right. Logs repeat themselves: lines that differ in numbers only are looked at once (sieve.py).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from runner.runs.why.sieve import Sieve

PIECE_BYTES = 1 << 20
HEAD_BYTES = 64 << 20
TAIL_BYTES = 192 << 20
LINE_BYTES = 4096  # of a longer line this much around the word is looked at: no pattern can run away
FIRST, LAST = 24, 8  # lines kept per word and file: a loud rank repeats itself
SURVIVED = 20  # signs of progress after a line: whatever it said, the program went on

# how transformers, Megatron, tqdm and our own scripts tell that they train
_PROGRESS = tuple(re.compile(text) for text in (rb"loss['\"]?[:= ]{1,3}-?\d", rb"it/s[\],]", rb"s/it[\],]"))
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,16}[A-Za-z]")


@dataclass(frozen=True)
class Line:
    """A line that holds one of the words."""

    path: Path
    number: int
    """from 1"""
    offset: int
    """of its first byte"""
    text: str
    progress: int
    """how many signs of progress stood before it"""


@dataclass
class Scan:
    """What one pass over a file found."""

    path: Path
    size_bytes: int = 0
    progress: int = 0
    """signs of progress in all that was read"""
    skipped_bytes: int = 0
    """between head and tail"""
    trouble: str = ""
    """why it could not be read"""
    found: dict[bytes, tuple[list[Line], deque[Line]]] = field(default_factory=dict)

    def lines(self) -> tuple[Line, ...]:
        """The lines that were kept, each once, from first to last."""
        kept = {line.offset: line for first, last in self.found.values() for line in (*first, *last)}
        return tuple(kept[offset] for offset in sorted(kept))

    def survived(self, line: Line) -> bool:
        """Whether the program went on for long after this line."""
        return self.progress - line.progress >= SURVIVED


def scan(path: Path, words: Sequence[bytes], start: int = 0) -> Scan:
    """Read a file from byte `start` on; what cannot be read is told in `trouble`."""
    result, sieve = Scan(path), Sieve(words)
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


def _sift_all(file: BinaryIO, start: int, stop: int, number: int, sieve: Sieve, result: Scan) -> int:
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
    """Offset and bytes of whole lines; a line beyond 4 MiB comes in parts."""
    file.seek(start)
    carry, offset, place = b"", start, start
    while place < stop and (data := file.read(min(PIECE_BYTES, stop - place))):
        place += len(data)
        piece = carry + data
        cut = piece.rfind(b"\n") + 1 or (len(piece) if len(piece) > 4 * PIECE_BYTES else 0)
        if cut:
            yield offset, piece[:cut]
        carry = piece[cut:]
        offset += cut
    if carry:
        yield offset, carry


def _sift(piece: bytes, offset: int, number: int, words: Iterable[bytes], result: Scan) -> None:
    """Keep the piece's lines with a word: the first ones of a file, and the last ones."""
    marks: list[int] = []
    for pattern in _PROGRESS:
        marks += [found.start() for found in pattern.finditer(piece)]
    marks.sort()

    def line_at(place: int) -> Line:
        begin = piece.rfind(b"\n", 0, place) + 1
        text = _text(piece, begin, place)
        before = result.progress + bisect_left(marks, place)
        return Line(result.path, number + piece.count(b"\n", 0, begin), offset + begin, text, before)

    for word in words:
        place = piece.find(word)
        if place < 0:
            continue
        first, last = result.found.setdefault(word, ([], deque(maxlen=LAST)))
        while place >= 0 and len(first) < FIRST:
            first.append(line_at(place))
            end = piece.find(b"\n", place)
            place = piece.find(word, end) if end >= 0 else -1
        if place >= 0:  # more than the first ones: of these the last of the piece are enough
            last.extend(line_at(each) for each in _last_places(piece, word, place))
    result.progress += len(marks)


def _last_places(piece: bytes, word: bytes, start: int) -> list[int]:
    places: list[int] = []
    end = len(piece)
    while len(places) < LAST and (place := piece.rfind(word, start, end)) >= 0:
        places.append(place)
        end = piece.rfind(b"\n", start, place)
        if end < 0:
            break
    return places[::-1]


def _text(piece: bytes, begin: int, place: int) -> str:
    """The line around a place, as text; of one that redraws itself (carriage returns) what stands there last."""
    end = piece.find(b"\n", place)
    end = len(piece) if end < 0 else end
    begin = max(begin, place - LINE_BYTES // 2, piece.rfind(b"\r", begin, place) + 1)
    end = min(end, place + LINE_BYTES // 2)
    back = piece.find(b"\r", place, end)
    return plain(piece[begin : end if back < 0 else back])


def plain(data: bytes) -> str:
    """Bytes of a log as text, without colours."""
    return _COLOUR.sub("", data.decode(errors="replace")).rstrip("\r\n")


def window(path: Path, offset: int, size_bytes: int) -> list[str]:
    """The lines from a byte on, at most so many bytes; empty where the file has gone."""
    try:
        with path.open("rb") as file:
            file.seek(max(offset, 0))
            return [plain(line) for line in file.read(size_bytes).split(b"\n")]
    except OSError:
        return []
