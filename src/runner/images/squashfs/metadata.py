"""Metadata of a squashfs: streams of records in blocks of 8 KiB, never compressed.

Without compression, they take 60 bytes more for a file, and squashfuse_ll finds paths four times faster (5000 of 50,000
in 0.13 s, not 0.48 s with zstd and 0.93 s with gzip).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import BinaryIO

from runner.images.squashfs.copying import write_all

METADATA_SIZE = 8192
_HEADER = struct.Struct("<H")
_PLAIN = 0x8000


class MetadataStream:
    """A stream of records; full blocks go to `emit` at once. A record may span blocks."""

    __slots__ = ("_emit", "buffer", "start")

    def __init__(self, emit: Callable[[bytes], object]) -> None:
        self._emit = emit
        self.start = 0  # of the current block: bytes emitted before it
        self.buffer = bytearray()  # always shorter than a block

    def reference(self) -> int:
        """The reference of the next record: start of its block << 16 | offset in the block."""
        return self.start << 16 | len(self.buffer)

    def write(self, record: bytes | bytearray) -> None:
        self.buffer += record
        while len(self.buffer) >= METADATA_SIZE:
            self._flush(bytes(self.buffer[:METADATA_SIZE]))
            del self.buffer[:METADATA_SIZE]

    def finish(self) -> None:
        if self.buffer:
            self._flush(bytes(self.buffer))
            self.buffer.clear()

    def _flush(self, plain: bytes) -> None:
        block = _HEADER.pack(len(plain) | _PLAIN) + plain
        self._emit(block)
        self.start += len(block)


class FileStream(MetadataStream):
    """A metadata stream that goes to a file from `position` on."""

    __slots__ = ("_file", "blocks", "position")

    def __init__(self, file: BinaryIO, position: int) -> None:
        super().__init__(self._append)
        self._file = file
        self.position = position
        self.blocks: list[int] = []  # where each block begins in the file

    def _append(self, block: bytes) -> None:
        self.blocks.append(self.position)
        write_all(self._file, block)
        self.position += len(block)


def write_lookup_table(file: BinaryIO, position: int, records: Iterable[bytes], head: bytes = b"") -> tuple[int, int]:
    """Write a table with a list of its blocks; returns the start of `head` and that list, and their end."""
    stream = FileStream(file, position)
    for record in records:
        stream.write(record)
    stream.finish()
    index = head + struct.pack(f"<{len(stream.blocks)}Q", *stream.blocks)
    write_all(file, index)
    return stream.position, stream.position + len(index)
