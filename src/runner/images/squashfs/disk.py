"""A thread for the disk: it writes blocks and copies runs while the processor works.

Without it the reader, the bottleneck, would wait for each write (a third of its time if the kernel allocates pages
slowly), and copies and the writeback of the page cache would follow the work instead of overlapping it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from runner.images.squashfs.copying import Block, Memory, copy_range, write_pieces

_STEP = 64 << 20  # bytes that are sent to the disk at a time
_SYNC_FILE_RANGE_WRITE = 2
MOST_UNWRITTEN = 16 << 20  # bytes of memory that wait for the disk


@dataclass(slots=True)
class _Write:
    """Blocks for `offset`, and the memory that they hold until they are written."""

    offset: int
    blocks: Sequence[Block]
    held: int


@dataclass(slots=True)
class _Copy:
    """Bytes of another file for `offset`; `source` is a duplicate descriptor."""

    offset: int
    length: int
    source: int
    source_offset: int


class Disk:
    """A thread that writes a file and starts its writeback, in the order of the calls; close it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._work: SimpleQueue[_Write | _Copy | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._memory, self._unwritten = Memory(), 0
        self._less = threading.Condition()
        self._sent = 0  # writeback has started up to here; used by the thread only

    def write(self, blocks: Sequence[Block], offset: int) -> None:
        """Write blocks in order; waits while too much is unwritten.

        Raises what went wrong with what was to be written before: OSError for the disk.
        """
        held = sum(map(self._memory.more, blocks))
        with self._less:
            while self._unwritten and self._unwritten + held > MOST_UNWRITTEN:
                self._less.wait()
            self._check()
            self._unwritten += held
        self._put(_Write(offset, blocks, held))

    def copy(self, source: int, source_offset: int, offset: int, length: int) -> None:
        """Copy bytes of another file to `offset`; the caller may close that file."""
        self._put(_Copy(offset, length, os.dup(source), source_offset))

    def settle(self) -> None:
        """Wait for all writes. Raises RunnerError for a source that is too short, OSError for the disk."""
        self._end()
        self._check()

    def close(self) -> None:
        """End the thread; writes that have not begun are dropped."""
        self._closed = True
        self._end()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _put(self, work: _Write | _Copy) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="disk", daemon=True)
            self._thread.start()
        self._work.put(work)

    def _end(self) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                if not self._closed and self._error is None:
                    self._fill(work)
            except BaseException as error:  # raised again in the caller, which would wait for a dead thread
                self._error = error
            finally:
                self._let_go(work)

    def _fill(self, work: _Write | _Copy) -> None:
        if isinstance(work, _Write):
            self._send_out(work.offset + write_pieces(self._descriptor, work.blocks, work.offset))
            return
        self._sent = work.offset
        for done in range(0, work.length, _STEP):
            if self._closed:
                return  # Ctrl-C does not wait for gigabytes
            step = min(_STEP, work.length - done)
            copy_range(work.source, work.source_offset + done, self._descriptor, work.offset + done, step)
            self._send_out(work.offset + done + step)

    def _let_go(self, work: _Write | _Copy) -> None:
        if isinstance(work, _Copy):
            os.close(work.source)
            return
        work.blocks = ()  # release the memory before the caller continues
        with self._less:
            self._unwritten -= work.held
            self._less.notify()

    def _send_out(self, end: int) -> None:
        """The file is written up to `end`."""
        if end - self._sent < _STEP:
            return
        _begin_writing_out(self._descriptor, self._sent, end - self._sent)
        self._sent = end


def _begin_writing_out(descriptor: int, offset: int, length: int) -> None:
    """Start the writeback of dirty pages without waiting; they remain in the cache, for the sha256 of the file.

    The fsync at the end has more to do where this does nothing. posix_fadvise, which begins too, drops what the disk is
    quick to take: a quarter of a file. Source: sync_file_range(2).
    """
    import ctypes  # Python's os has no such call

    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call(descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)
