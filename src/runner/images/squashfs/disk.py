"""What the disk does while the processor works: runs come over from an earlier file, and bytes are forced out early.

Without it the copy, and the fsync of all that was written, would stand behind the work instead of beside it.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from queue import SimpleQueue

from runner.images.squashfs.copying import copy_range

_STEP = 128 << 20  # bytes between two syncs: few enough calls, and little left for the last one


class Disk:
    """One thread that copies into a file and syncs it, in the order of the calls; close it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # a copy: source (a descriptor of our own), its offset, offset here, length; an empty one: a sync
        self._work: SimpleQueue[tuple[int, ...] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._closed = False
        self._synced = 0  # the end of what a sync was asked for
        self._syncing = threading.Lock()  # held while a sync waits its turn: a slow disk gets one at a time
        self._thread: threading.Thread | None = None

    def copy(self, source: int, source_offset: int, offset: int, length: int) -> None:
        """Copy bytes of another file to `offset`; the caller may close that file."""
        self._put((os.dup(source), source_offset, offset, length))
        self.written(offset + length)

    def written(self, end: int) -> None:
        """The file is written, or being written, up to `end`."""
        if end - self._synced >= _STEP and self._syncing.acquire(blocking=False):
            self._synced = end
            self._put(())

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
            idle = self._closed or self._error is not None
            try:
                if work and not idle:
                    copy_range(work[0], work[1], self._descriptor, work[2], work[3])
                elif not idle:
                    with suppress(OSError):  # the sync at the end says it again, to everybody
                        os.fdatasync(self._descriptor)
            except BaseException as error:  # `settle` raises it; a thread that dies would leave it waiting
                self._error = error
            finally:
                if work:
                    os.close(work[0])
                else:
                    self._syncing.release()
