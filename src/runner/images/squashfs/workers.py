"""Processes that compress blocks. Contents go to them, and packed blocks come back, in shared memory.

Threads would do, were it not that each block's end waits for the interpreter: with two cores a fourth of the processor
stayed unused. Blocks go over by the megabyte, since to wake another process costs as much as to compress a small block.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from runner.errors import RunnerError
from runner.images.squashfs import blocks
from runner.images.squashfs.blocks import Slots, message, numbers_of
from runner.images.squashfs.compression import Compression

Owner = TypeVar("Owner")
# what is called with the packed bytes of some blocks, and for each block its owner and size word, in their order
Write = Callable[[memoryview, "list[tuple[Owner, int]]"], None]
SLOT = 2 << 20  # bytes; half of them where there are many slots
SLOTS = 4  # under way for each process: while the reader parses small files, all have work
MOST_SLOTS = 64
MOST_BYTES = 64 << 20  # plain ones under way; as much again is kept for packed ones


class _Process:
    """One process that compresses; it ends with its connection, so with this process too."""

    def __init__(self, slots: Slots, descriptor: int, compression: Compression) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        numbers = (descriptor, slots.count, slots.size, compression.block_size)
        # it imports what this process would: neither the folder that it stands in nor a site decides
        code = f"import sys; sys.path[:] = {sys.path!r}; from {blocks.__name__} import main; main()"
        argv = (sys.executable, "-I", "-S", "-c", code, *map(str, numbers), str(compression))
        try:
            self._program = subprocess.Popen(
                argv, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, pass_fds=(descriptor,)
            )
        except OSError as error:
            self._connection.close()
            raise RunnerError(
                "no process can be started that compresses", str(error), "see the limit of processes: ulimit -u"
            ) from error
        finally:
            theirs.close()

    def send(self, slot: int, lengths: Sequence[int]) -> None:
        try:
            self._connection.send(message(slot, *lengths))
        except OSError:
            self._raise_ended()

    def receive(self) -> tuple[int, ...]:
        try:
            words = numbers_of(self._connection)
        except OSError:
            words = ()
        return words or self._raise_ended()

    def _raise_ended(self) -> tuple[int, ...]:
        code = self._program.wait()
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        raise RunnerError(
            "a process that compresses ended early",
            f"it ended {how}",
            "see the memory of this machine, and try again with fewer --threads" if code == -9 else "try again",
        )

    def end(self) -> None:
        self._connection.close()
        self._program.kill()
        self._program.wait()


class _Filling(Generic[Owner]):
    """A slot that blocks are put into."""

    def __init__(self, slots: Slots, number: int) -> None:
        self.number, self.used = number, 0
        self.room = slots.plain(number)
        self.lengths: list[int] = []
        self.owners: list[Owner] = []

    def has_room(self, size: int) -> bool:
        return self.used + size <= len(self.room) and len(self.lengths) < blocks.MOST_BLOCKS

    def keep(self, length: int, owner: Owner) -> None:
        """The next bytes of the room, which were put there before, are a block."""
        self.used += length & ~blocks.HOLE
        self.lengths.append(length)
        self.owners.append(owner)


class Workers(Generic[Owner]):
    """Packs blocks with `threads` processes and hands them to `write` in the order of `keep`. `close` ends them.

    The processes begin when the first slot is full: what is smaller is packed by this process. Blocks that stay plain
    need none.
    """

    def __init__(self, compression: Compression, threads: int, write: Write[Owner]) -> None:
        self._compression, self._compress, self._write = compression, compression.compressor(), write
        self._threads = min(threads, MOST_SLOTS // 2)
        count = min(SLOTS * threads, MOST_SLOTS)
        size = max(min(SLOT, MOST_BYTES // count), compression.block_size)
        self._descriptor = os.memfd_create("runner-blocks")
        os.truncate(self._descriptor, 2 * count * size)
        self._slots = Slots(self._descriptor, count, size)
        self._processes: list[_Process] = []
        self._sent: deque[tuple[_Process, _Filling[Owner]]] = deque()
        self._filling: _Filling[Owner] = _Filling(self._slots, 0)

    def room(self, size: int) -> memoryview:
        """Where the next block is put before `keep`, and those behind it: shared memory of `size` bytes or more."""
        if not self._filling.has_room(size):
            self._send()
        return self._filling.room[self._filling.used :]

    def keep(self, length: int, owner: Owner, *, hole: bool = False) -> None:
        """The next `length` bytes of the room are a block; `write` hears of it in a later call of `room` or `flush`.

        Both raise what `write` raises, and RunnerError where a process has ended.
        """
        self._filling.keep(length | blocks.HOLE if hole else length, owner)

    def flush(self) -> None:
        """Have everything written."""
        if self._processes and self._filling.owners:
            self._send()
        while self._sent:
            self._receive()
        if self._filling.owners:
            self._pack_here()

    def close(self) -> None:
        """End the processes, whatever they are at."""
        for process in self._processes:
            process.end()
        self._processes = []
        self._sent.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _begin(self) -> None:
        """Fill the next slot; the oldest one under way is waited for where none is free."""
        if len(self._sent) == self._slots.count - 1:
            self._receive()
        self._filling = _Filling(self._slots, (self._filling.number + 1) % self._slots.count)

    def _send(self) -> None:
        """Have a process pack the slot that is filled."""
        if self._compress is None:
            self._pack_here()
            return
        if not self._processes:
            self._processes = [_Process(self._slots, self._descriptor, self._compression) for _ in range(self._threads)]
        filled = self._filling
        process = self._processes[filled.number % self._threads]
        process.send(filled.number, filled.lengths)
        self._sent.append((process, filled))
        self._begin()

    def _receive(self) -> None:
        process, filled = self._sent.popleft()
        self._hand_over(self._slots.packed(filled.number), filled, process.receive())

    def _pack_here(self) -> None:
        filled, packed = self._filling, self._slots.packed(self._filling.number)
        self._hand_over(packed, filled, self._slots.pack(filled.number, filled.lengths, self._compress))
        self._begin()

    def _hand_over(self, packed: memoryview, filled: _Filling[Owner], words: tuple[int, ...]) -> None:
        total = sum(word & ~blocks.PLAIN for word in words)
        self._write(packed[:total], list(zip(filled.owners, words, strict=True)))
