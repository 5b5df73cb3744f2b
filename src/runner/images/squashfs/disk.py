"""What the disk does while the processor works: runs come over from an earlier file, and bytes go out early.

Without it the copy, and the writing out of all that lies in the page cache, would stand behind the work, not beside it.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from queue import SimpleQueue

from runner.images.squashfs.copying import copy_range

_STEP = 64 << 20  # bytes that are sent to the disk at a time


class Disk:
    """One thread that copies into a file and sends it to the disk, in the order of the calls; close it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # a copy: offset here, length, a descriptor of our own and the offset there; without these: to be sent out
        self._work: SimpleQueue[tuple[int, ...] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._closed = False
        self._sent = 0
        self._thread: threading.Thread | None = None

    def copy(self, source: int, source_offset: int, offset: int, length: int) -> None:
        """Copy bytes of another file to `offset`; the caller may close that file."""
        self._put((offset, length, os.dup(source), source_offset))
        self._sent = offset + length

    def written(self, end: int) -> None:
        """The file is written up to `end`."""
        if end - self._sent >= _STEP:
            self._put((self._sent, end - self._sent))
            self._sent = end

    def settle(self) -> None:
        """Wait for the copies. Raises what went wrong: RunnerError for a source too short, OSError for the disk."""
        self._end()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread; copies that have not begun are left out."""
        self._closed = True
        self._end()

    def _put(self, work: tuple[int, ...]) -> None:
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
                    self._do(*work)
            except BaseException as error:  # `settle` raises it; a thread that dies would leave it waiting
                self._error = error
            finally:
                if len(work) > 2:
                    os.close(work[2])

    def _do(self, offset: int, length: int, source: int = -1, source_offset: int = 0) -> None:
        for done in range(0, length, _STEP):
            if self._closed:
                return  # Ctrl-C does not wait for gigabytes
            step = min(_STEP, length - done)
            if source >= 0:
                copy_range(source, source_offset + done, self._descriptor, offset + done, step)
            # Linux begins to write these pages out, and does not wait (mm/fadvise.c); they stay in the cache, since
            # they are not clean yet. Where nothing begins, the fsync at the end has more to do
            with suppress(OSError):
                os.posix_fadvise(self._descriptor, offset + done, step, os.POSIX_FADV_DONTNEED)
