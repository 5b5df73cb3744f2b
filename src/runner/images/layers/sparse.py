"""Sparse files in tar streams: the map of their pieces, and the content with its holes filled.

Source: GNU tar 1.34 manual, "Storing Sparse Files": the old format (type S) and PAX 0.0, 0.1 and 1.0.
"""

from collections.abc import Mapping

from runner.images.layers.layer import Reader
from runner.images.layers.tar_fields import BLOCK, LARGEST_PAX, cut_off, damaged, decimal, number

# holes are free in a layer, but cost time and disk here: refuse a layer with more
LARGEST_HOLES = 64 << 30
_ZEROS = bytes(1 << 17)
Pieces = list[tuple[int, int]]  # offset and length of what is stored, in the file's order


class Expanded:
    """A sparse file's content, with zeros for holes."""

    __slots__ = ("_content", "_pieces", "_position", "_size")

    def __init__(self, content: Reader, pieces: Pieces, size: int) -> None:
        self._content, self._size, self._position = content, size, 0
        self._pieces = [(size, 0), *reversed(pieces)]  # the next one is the last

    def read(self, size: int = -1, /) -> bytes:
        """`size` bytes, fewer only at the end."""
        wanted = self._size - self._position if size < 0 else min(size, self._size - self._position)
        parts: list[bytes] = []
        while wanted > 0:
            offset, length = self._pieces[-1]
            if self._position < offset:
                part = _zeros(min(wanted, offset - self._position))
            elif length == 0:
                self._pieces.pop()
                continue
            else:
                part = self._content.read(min(wanted, length))
                if not part:
                    raise cut_off()
                self._pieces[-1] = (offset + len(part), length - len(part))
            parts.append(part)
            self._position += len(part)
            wanted -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _zeros(size: int) -> bytes:
    if size == len(_ZEROS):
        return _ZEROS
    return _ZEROS[:size] if size < len(_ZEROS) else bytes(size)


def checked(pieces: Pieces, size: int, stored: int) -> Pieces:
    """The pieces. Raises RunnerError if they overlap, leave the file, or differ from the stored bytes."""
    end = 0
    for offset, length in pieces:
        if offset < end or length < 0:
            raise damaged("the pieces of a sparse file overlap")
        end = offset + length
    if end > size or sum(length for _, length in pieces) != stored:
        raise damaged(
            f"the pieces of a sparse file of {size} bytes do not match the {stored} bytes stored"
        )
    return pieces


def old_map(header: bytes, stream: Reader) -> tuple[Pieces, int]:
    """The pieces and the size of an entry of type S; further blocks of the map are read from the stream."""
    pieces = _old_pieces(header[386:482])
    size, more = number(header[483:495]), header[482]
    read = 0
    while more:
        block = stream.read(BLOCK)
        if len(block) != BLOCK:
            raise cut_off()
        pieces += _old_pieces(block[:504])
        more, read = block[504], read + BLOCK
        if read > LARGEST_PAX:
            raise damaged("the map of a sparse file is larger than 1 MiB")
    return pieces, size


def _old_pieces(table: bytes) -> Pieces:
    fields = [table[start : start + 12] for start in range(0, len(table), 12)]
    pairs = zip(fields[::2], fields[1::2], strict=True)
    return [(number(offset), number(length)) for offset, length in pairs if offset[0]]


def pax_map(records: Mapping[bytes, bytes], content: Reader) -> tuple[Pieces, int]:
    """The pieces and the size of a file of PAX 0.0, 0.1 or 1.0, whose content begins with the map; -1: not sparse."""
    if records.get(b"GNU.sparse.major") == b"1":
        size = decimal(records.get(b"GNU.sparse.realsize", b""))
        return _stored_map(content), size
    if b"GNU.sparse.map" not in records and b"GNU.sparse.size" not in records:
        return [], -1
    text = records.get(b"GNU.sparse.map", b"")
    numbers = [decimal(part) for part in text.split(b",")] if text else []
    if len(numbers) % 2:
        raise damaged("the map of a sparse file is incomplete")
    size = decimal(records.get(b"GNU.sparse.size", records.get(b"GNU.sparse.realsize", b"")))
    return list(zip(numbers[::2], numbers[1::2], strict=True)), size


def _stored_map(content: Reader) -> Pieces:
    """The map at the start of a content of version 1.0: the count and each number on its own line."""
    text, read = b"", 0

    def line() -> int:
        nonlocal text, read
        while b"\n" not in text:
            block = content.read(BLOCK)
            read += len(block)
            if len(block) != BLOCK or len(text) > BLOCK or read > LARGEST_PAX:
                raise damaged("the map of a sparse file is invalid")
            text += block
        first, _, text = text.partition(b"\n")
        return decimal(first)

    count = line()
    if not 0 <= count <= LARGEST_PAX:
        raise damaged("the map of a sparse file is invalid")
    return [(line(), line()) for _ in range(count)]
