"""A part of an open file as a reader."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.errors import RunnerError
from runner.images.layers.layer import Reader


class Section:
    """`size` bytes of a file from `start` on. It keeps its own position: several can read one file at the same time."""

    def __init__(self, descriptor: int, start: int, size: int, what: str) -> None:
        self.descriptor = descriptor
        self.position = start
        self.end = start + size
        self.what = what

    def read(self, size: int = -1, /) -> bytes:
        left = self.end - self.position
        wanted = left if size < 0 else min(size, left)
        chunks = []
        while wanted:
            # the kernel gives at most 2 GiB at once
            try:
                chunk = os.pread(self.descriptor, min(wanted, 1 << 30), self.position)
            except OSError as error:  # a stale file handle, a broken disk
                raise unreadable(self.what, error) from error
            if not chunk:
                raise RunnerError(f"cannot read {self.what}", "the file is truncated", "create or copy the file again")
            self.position += len(chunk)
            wanted -= len(chunk)
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


@contextmanager
def opened(descriptor: int, start: int, size: int, what: str) -> Iterator[Reader]:
    """A reader of a part of an open file, which may be closed meanwhile."""
    own = os.dup(descriptor)
    try:
        yield Section(own, start, size, what)
    finally:
        os.close(own)


@contextmanager
def open_regular(path: Path, what: str) -> Iterator[int]:
    """A descriptor of a regular file; a FIFO or device, which may block, is refused."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise unreadable(what, error) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RunnerError(f"cannot read {what}", "it is not a regular file", "give the path of a regular file")
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        yield descriptor
    finally:
        os.close(descriptor)


def unreadable(what: str, error: OSError) -> RunnerError:
    """The error for a file that cannot be opened."""
    return RunnerError(f"cannot read {what}", error.strerror or str(error), "check the file's path and mode")
