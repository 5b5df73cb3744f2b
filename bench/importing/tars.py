"""Layers read from the top down: the raw tar members that show. For a rival and for the floor, not for use."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from isal import isal_zlib

BLOCK = 512
CHUNK = 1 << 18


class Inflated:
    """A gzip file's plain bytes by igzip; `timed` runs each decoding call, so that it can be timed."""

    def __init__(self, path: Path, timed: Callable[..., bytes] = lambda call, *words: call(*words)) -> None:
        self._file = path.open("rb")
        self._timed = timed
        self._decoder = isal_zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        self._ready = memoryview(b"")

    def parts(self, size: int) -> Iterator[memoryview]:
        """The next `size` bytes in pieces, fewer at the end."""
        while size:
            if not self._ready and not self._fill():
                return
            part, self._ready = self._ready[:size], self._ready[size:]
            size -= len(part)
            yield part

    def read(self, size: int) -> bytes:
        """The next `size` bytes, fewer at the end."""
        return b"".join(self.parts(size))

    def _fill(self) -> bool:
        while chunk := self._file.read(CHUNK):
            plain = self._timed(self._decoder.decompress, chunk)
            while self._decoder.eof and self._decoder.unused_data:  # the next member
                rest = self._decoder.unused_data
                self._decoder = isal_zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
                plain += self._timed(self._decoder.decompress, rest)
            if plain:
                self._ready = memoryview(plain)
                return True
        return False


class Counted:
    """A member's part of the stream; counts what was taken of it."""

    def __init__(self, stream: Inflated) -> None:
        self.stream, self.taken = stream, 0

    def parts(self, size: int) -> Iterator[memoryview]:
        for part in self.stream.parts(size):
            self.taken += len(part)
            yield part


@dataclass
class Member:
    """One tar member: its raw header blocks, and where its data come from."""

    name: bytes
    kind: bytes
    size: int
    header: bytes
    stream: Counted

    def data(self) -> Iterator[memoryview]:
        """The content; to be read before the next member."""
        return self.stream.parts(self.size)


def members(stream: Inflated) -> Iterator[Member]:
    """The members of a tar as GNU tar writes it, PAX or GNU; data that is not read is skipped."""
    prefix, name, size = b"", b"", -1
    while len(block := stream.read(BLOCK)) == BLOCK and block.strip(b"\0"):
        kind, length = block[156:157], int(block[124:136].strip(b" \0") or b"0", 8)
        padding = -length % BLOCK
        if kind in b"xgLK":
            data = stream.read(length + padding)
            prefix += block + data
            if kind == b"L":
                name = data[:length].rstrip(b"\0")
            elif kind == b"x":
                records = dict(_records(data[:length]))
                name, size = records.get(b"path", name), int(records.get(b"size", size))
            continue
        own = block[:100].rstrip(b"\0")
        if block[257:263] == b"ustar\0" and block[345]:
            own = block[345:500].rstrip(b"\0") + b"/" + own
        counted = Counted(stream)
        member = Member(name or own, kind, length if size < 0 else size, prefix + block, counted)
        yield member
        total = member.size + -member.size % BLOCK
        for _ in stream.parts(total - counted.taken):
            pass
        prefix, name, size = b"", b"", -1


def _records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    while data:
        length, _, rest = data.partition(b" ")
        record = rest[: int(length) - len(length) - 1]
        key, _, value = record.rstrip(b"\n").partition(b"=")
        yield key, value
        data = data[int(length) :]


@dataclass
class Shadow:
    """What upper layers say of the layers below: paths taken, names deleted, folders emptied."""

    seen: set[bytes] = field(default_factory=set)
    hidden: set[bytes] = field(default_factory=set)
    files: set[bytes] = field(default_factory=set)
    emptied: set[bytes] = field(default_factory=set)

    def survives(self, path: bytes) -> bool:
        """Whether this path of the present layer shows."""
        return path not in self.seen and not any(
            above in self.hidden or above in self.files or (above in self.emptied and above != path)
            for above in _and_parents(path)
        )


def surviving(layers: list[Path], open_layer: Callable[[Path], Inflated] = Inflated) -> Iterator[Member]:
    """The members that show, top layer first; layers bottom first. Enough for the bench's images: no type changes
    within a layer, no hard links between layers."""
    shadow = Shadow()
    for path in reversed(layers):
        hidden, emptied, files, seen = set(), set(), set(), set()
        for member in members(open_layer(path)):
            name = member.name.removeprefix(b"./").strip(b"/")
            folder, _, last = name.rpartition(b"/")
            if last == b".wh..wh..opq":
                emptied.add(folder)
            elif last.startswith(b".wh."):
                hidden.add(folder + b"/" + last[4:] if folder else last[4:])
            elif shadow.survives(name):
                (seen if member.kind == b"5" else files).add(name)
                yield member
        shadow.seen |= seen | files
        shadow.files |= files
        shadow.hidden |= hidden
        shadow.emptied |= emptied


def _and_parents(path: bytes) -> Iterator[bytes]:
    yield path
    while b"/" in path:
        path = path.rpartition(b"/")[0]
        yield path


def merge(layers: list[Path]) -> None:
    """Write one tar of everything that shows to stdout."""
    out = sys.stdout.buffer
    for member in surviving(layers):
        out.write(member.header)
        for part in member.data():
            out.write(part)
        out.write(bytes(-member.size % BLOCK))
    out.write(bytes(2 * BLOCK))


if __name__ == "__main__":  # python -m bench.importing.tars LAYER... (bottom first)
    merge([Path(word) for word in sys.argv[1:]])
