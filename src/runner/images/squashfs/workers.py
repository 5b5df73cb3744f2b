"""Threads that compress blocks. Each has a compressor of its own; they share one queue.

concurrent.futures takes 20 us of the submitting thread for each block, a queue and a lock take 2.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue

from runner.images.squashfs.compression import Compress, Compression

PLAIN = 1 << 24  # in a block's size word: stored uncompressed


class Block:
    """A block on its way: its plain pieces, then what is to be written for it."""

    __slots__ = ("_done", "_error", "_packed", "_pieces", "_word")

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._packed = b""
        self._word = 0
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def is_done(self) -> bool:
        return not self._done.locked()

    def result(self) -> tuple[bytes, int]:
        """The bytes to write and their size word; waits for them. Raises what the thread raised."""
        with self._done:
            if self._error is not None:
                raise self._error
            return self._packed, self._word

    def work(self, compress: Compress | None) -> None:
        """Compress, or keep plain what would not get smaller."""
        try:
            data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces = []
            packed = compress(data) if compress else data
            if len(packed) < len(data):
                self._packed, self._word = packed, len(packed)
            else:
                self._packed, self._word = data, len(data) | PLAIN
        except BaseException as error:  # the submitting thread raises it; a thread that dies would leave it waiting
            self._error = error
        finally:
            self._done.release()


class Workers:
    """`threads` threads; none for blocks that stay plain. `close` ends them, whatever is still in the queue."""

    def __init__(self, compression: Compression, threads: int) -> None:
        self._queue: SimpleQueue[Block | None] = SimpleQueue()
        self._closed = False
        self._inline = compression.compressor() is None
        self._threads = [
            threading.Thread(target=self._run, args=(compression,), name=f"compress-{number}", daemon=True)
            for number in range(0 if self._inline else threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, pieces: list[bytes]) -> Block:
        block = Block(pieces)
        if self._inline:
            block.work(None)
        else:
            self._queue.put(block)
        return block

    def close(self) -> None:
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _run(self, compression: Compression) -> None:
        compress = compression.compressor()
        while (block := self._queue.get()) is not None:
            if not self._closed:
                block.work(compress)
