"""Blocks of contents in shared memory: packed in place, by this process or by one that compresses for it.

A slot holds plain blocks one behind another, and has as much room again for the packed ones: none grows, since what
would not get smaller stays plain. `main` is such a process: told of slots on its standard input, it answers with the
size words.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from mmap import mmap

from runner.images.squashfs.compression import Compress, Compression
from runner.machine.heap import keep_freed_memory

PLAIN = 1 << 24  # in a block's size word: stored uncompressed
HOLE = 1 << 31  # in a length on its way: the block is all zeros, nothing is stored
MOST_BLOCKS = 1024  # a slot with so many takes no more of one file's end or of one fragment
_LARGEST_MESSAGE = 1 << 16
# the reader, on which all wait, goes first: so the slots stay full, and 1.85 of two cores are used, not 1.81
_NICE = 7


class Slots:
    """Shared memory of `count` slots for `size` plain bytes each."""

    def __init__(self, descriptor: int, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.view = memoryview(mmap(descriptor, 2 * count * size))

    def plain(self, number: int) -> memoryview:
        """The room for the plain blocks of a slot."""
        return self.view[2 * number * self.size : (2 * number + 1) * self.size]

    def packed(self, number: int) -> memoryview:
        """The room for its packed blocks."""
        return self.view[(2 * number + 1) * self.size : (2 * number + 2) * self.size]

    def pack(self, number: int, lengths: Sequence[int], compress: Compress | None) -> tuple[int, ...]:
        """Pack the blocks of these lengths; their size words, 0 for a hole."""
        source, target = self.plain(number), self.packed(number)
        words, begin, written = [], 0, 0
        for length in lengths:
            plain = source[begin : begin + (length & ~HOLE)]
            begin += len(plain)
            if length & HOLE:
                words.append(0)
                continue
            packed: bytes | memoryview = compress(plain) if compress else plain
            words.append(len(packed) if len(packed) < length else length | PLAIN)
            if len(packed) >= length:
                packed = plain
            target[written : written + len(packed)] = packed
            written += len(packed)
        return tuple(words)


def message(*numbers: int) -> bytes:
    """Numbers on their way between the processes."""
    return struct.pack(f"<{len(numbers)}I", *numbers)


def numbers_of(connection: socket.socket) -> tuple[int, ...]:
    """The numbers of the next message; none when the other side has ended."""
    data = connection.recv(_LARGEST_MESSAGE)
    return struct.unpack(f"<{len(data) // 4}I", data)


def serve(descriptor: int, count: int, size: int, compression: Compression) -> None:
    """Pack slots until the other side of the standard input ends, with an answer under way or not."""
    compress = compression.compressor()
    slots = Slots(descriptor, count, size)
    with socket.socket(fileno=0) as connection, suppress(ConnectionError):
        while numbers := numbers_of(connection):
            connection.send(message(*slots.pack(numbers[0], numbers[1:], compress)))


def main() -> None:
    """Such a process: its arguments are what `serve` takes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: who started this process ends it
    os.nice(_NICE)
    keep_freed_memory()
    descriptor, count, size, block_size = map(int, sys.argv[1:5])
    serve(descriptor, count, size, Compression.parse(sys.argv[5], block_size=block_size))
