"""Threads that compress blocks and return them in order.

A compressor lets the other threads run while it works on a block, and takes it from where it was inflated: nothing is
copied. Blocks go over by the megabyte, since to wake a thread costs as much as to compress a small block. Processes
with shared memory, of which none waits for the interpreter, took a twelfth more of the processor for their copies.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, TypeVar

from runner.errors import RunnerError
from runner.images.squashfs.compression import Compression
from runner.images.squashfs.disk import Block, Memory

Owner = TypeVar("Owner")
# called with the packed bytes of some blocks, and the owner and size word of each, in order
Write = Callable[["list[Block]", "list[tuple[Owner, int]]"], None]
PLAIN = 1 << 24  # in a block's size word: stored uncompressed
BATCH = 1 << 20  # bytes per task of a thread
UNDER_WAY = 12 << 20  # bytes per thread: enough work while the reader parses small files
MOST_UNDER_WAY = 64 << 20
_HOLE = 1024  # bytes that a block of zeros counts as, so that a terabyte of zeros is not one batch
# the reader, the bottleneck, has priority: 10 % of two cores are unused, not 12 %
_NICE = 5


class _Batch(Generic[Owner]):
    """Blocks in progress; None is a block of zeros, which is not stored."""

    __slots__ = ("blocks", "held", "owners", "size")

    def __init__(self) -> None:
        self.blocks: list[Block | None] = []
        self.owners: list[Owner] = []
        self.size = 0
        self.held = 0  # bytes of memory held until the batch is done


class _Compressor(threading.local):
    """A compressor for each thread that asks for it."""

    def __init__(self, compression: Compression) -> None:
        self.compress = compression.compressor()


def _lower_priority() -> None:
    with suppress(OSError):  # a sandbox may forbid it
        os.nice(_NICE)  # of this thread alone: nice(2), "C library/kernel differences"


class Workers(Generic[Owner]):
    """Packs blocks with `threads` threads and hands them to `write` in the order of `add`. `close` ends them.

    The threads start with the first full batches: the caller's thread packs anything smaller. Plain blocks need no
    threads.
    """

    def __init__(self, compression: Compression, threads: int, write: Write[Owner]) -> None:
        self._write = write
        self._own = _Compressor(compression)
        count = min(threads, MOST_UNDER_WAY // BATCH // 2)  # each with one more batch waiting
        self._pool = ThreadPoolExecutor(count, "compress", _lower_priority)
        self._most = min(UNDER_WAY * threads, MOST_UNDER_WAY)
        self._held = 0
        self._sent: deque[tuple[_Batch[Owner], Future[tuple[list[Block], list[int]]]]] = deque()
        self._filling: _Batch[Owner] = _Batch()
        self._memory = Memory()
        self._closed = False

    def add(self, block: Block | None, owner: Owner) -> None:
        """Pack a block (None: zeros); `write` gets it in a later call, or in `flush`.

        Both raise the errors of `write` and the compressor, and RunnerError if no thread can start.
        """
        batch = self._filling
        batch.blocks.append(block)
        batch.owners.append(owner)
        batch.held += _HOLE if block is None else self._memory.more(block)
        batch.size += len(block or b"")
        if batch.size >= BATCH or batch.held >= self._most // 2:
            self._send()

    def flush(self) -> None:
        """Write everything."""
        if self._sent and self._filling.blocks:
            self._send()
        while self._sent:
            self._receive()
        if self._filling.blocks:
            self._pack_here()

    def close(self) -> None:
        """End the threads, after each has packed its current block."""
        self._closed = True
        self._pool.shutdown(cancel_futures=True)
        self._sent.clear()

    def _send(self) -> None:
        """Give the full batch to a thread; waits for the oldest ones while too much is in progress."""
        if self._own.compress is None:
            self._pack_here()
            return
        batch, self._filling = self._filling, _Batch()
        while self._sent and self._held + batch.held > self._most:
            self._receive()
        try:
            self._sent.append((batch, self._pool.submit(self._pack, batch.blocks)))
        except RuntimeError as error:
            raise RunnerError(
                "cannot start the threads that compress data",
                str(error),
                "check your process limit: ulimit -u",
            ) from error
        self._held += batch.held

    def _receive(self) -> None:
        batch, packed = self._sent.popleft()
        self._held -= batch.held
        self._hand_over(batch, *packed.result())

    def _pack_here(self) -> None:
        batch, self._filling = self._filling, _Batch()
        self._hand_over(batch, *self._pack(batch.blocks))

    def _hand_over(self, batch: _Batch[Owner], packed: list[Block], words: list[int]) -> None:
        self._write(packed, list(zip(batch.owners, words, strict=True)))

    def _pack(self, blocks: Sequence[Block | None]) -> tuple[list[Block], list[int]]:
        """The stored bytes of the blocks, and the size word of each."""
        compress = self._own.compress
        stored: list[Block] = []
        words = []
        for block in blocks:
            if block is None or self._closed:
                words.append(0)
                continue
            packed: Block = compress(block) if compress else block
            if len(packed) < len(block):
                words.append(len(packed))
            else:
                packed = block
                words.append(len(block) | PLAIN)
            stored.append(packed)
        return stored, words
