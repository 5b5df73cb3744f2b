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
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

from runner.errors import RunnerError
from runner.images.squashfs.compression import Compress, Compression
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

    __slots__ = ("answer", "blocks", "held", "owners", "size")

    def __init__(self) -> None:
        self.blocks: list[Block | None] = []
        self.owners: list[Owner] = []
        self.size = 0
        self.held = 0  # bytes of memory held until the batch is done
        self.answer: SimpleQueue[tuple[list[Block], list[int]] | BaseException] = SimpleQueue()


class Workers(Generic[Owner]):
    """Packs blocks with `threads` threads and hands them to `write` in the order of `add`. `close` ends them.

    The threads start when the first batch is full: the caller's thread packs anything smaller. Plain blocks need no
    threads.
    """

    def __init__(self, compression: Compression, threads: int, write: Write[Owner]) -> None:
        self._compression, self._write = compression, write
        self._count = min(threads, MOST_UNDER_WAY // BATCH // 2)  # each with one more batch waiting
        self._compress = compression.compressor()
        self._most = min(UNDER_WAY * threads, MOST_UNDER_WAY)
        self._held = 0
        self._threads: list[threading.Thread] = []
        self._work: SimpleQueue[_Batch[Owner] | None] = SimpleQueue()
        self._sent: deque[_Batch[Owner]] = deque()
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
        if self._threads and self._filling.blocks:
            self._send()
        while self._sent:
            self._receive()
        if self._filling.blocks:
            self._pack_here()

    def close(self) -> None:
        """End the threads, after each has packed its current block."""
        self._closed = True
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._sent.clear()

    def _send(self) -> None:
        """Give the full batch to a thread; waits for the oldest ones while too much is in progress."""
        if self._compress is None:
            self._pack_here()
            return
        if not self._threads:
            self._begin()
        batch, self._filling = self._filling, _Batch()
        while self._sent and self._held + batch.held > self._most:
            self._receive()
        self._held += batch.held
        self._sent.append(batch)
        self._work.put(batch)

    def _begin(self) -> None:
        try:
            for number in range(self._count):
                compress = self._compression.compressor()  # here, so that its errors are raised in the caller
                thread = threading.Thread(target=self._run, args=(compress,), name=f"compress {number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:
            raise RunnerError(
                "cannot start the threads that compress data", str(error), "check your process limit: ulimit -u"
            ) from error

    def _receive(self) -> None:
        batch = self._sent.popleft()
        answer = batch.answer.get()
        self._held -= batch.held
        if isinstance(answer, BaseException):
            raise answer
        self._write(answer[0], list(zip(batch.owners, answer[1], strict=True)))

    def _pack_here(self) -> None:
        batch, self._filling = self._filling, _Batch()
        packed, words = self._pack(batch.blocks, self._compress)
        self._write(packed, list(zip(batch.owners, words, strict=True)))

    def _run(self, compress: Compress | None) -> None:
        with suppress(OSError):  # a sandbox may forbid it
            os.nice(_NICE)  # of this thread alone: nice(2), "C library/kernel differences"
        while (batch := self._work.get()) is not None:
            try:
                batch.answer.put(self._pack(batch.blocks, compress))
            except BaseException as error:  # raised again in `_receive`, which would wait for a dead thread
                batch.answer.put(error)

    def _pack(self, blocks: Sequence[Block | None], compress: Compress | None) -> tuple[list[Block], list[int]]:
        """The stored bytes of the blocks, and the size word of each."""
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
