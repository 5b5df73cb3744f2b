"""Bytes from one file into another, by the kernel where it can."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import BinaryIO

from runner.errors import RunnerError

_PIECE = 64 << 20  # of one call, so that Ctrl-C is heard
_BUFFER = 1 << 20
_MOST_PIECES = 1024  # of one call: Linux's limits.h, UIO_MAXIOV
# other file systems, kernels and files that copy_file_range does not take
_REFUSED = (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all of `data`: a file without a buffer may take a part only."""
    written = file.write(data)
    while written < len(data):
        written += file.write(data[written:])


def write_pieces(target: int, pieces: Sequence[bytes | memoryview], position: int) -> int:
    """Write the pieces to a descriptor, one behind another from `position` on; how many bytes they are."""
    end = position
    for start in range(0, len(pieces), _MOST_PIECES):
        some = pieces[start : start + _MOST_PIECES]
        expected, written = sum(map(len, some)), os.pwritev(target, some, end)
        end += written
        if written < expected:  # a signal, or the disk is nearly full
            end += write_pieces(target, [memoryview(b"".join(some))[written:]], end)
    return end - position


def copy_range(source: int, source_offset: int, target: int, target_offset: int, length: int) -> None:
    """Copy bytes between open files, given by their descriptors, whose positions stay.

    Raises RunnerError where `source` ends too early, OSError for the disk.
    """
    done = _by_kernel(source, source_offset, target, target_offset, length)
    while done < length:
        data = os.pread(source, min(_BUFFER, length - done), source_offset + done)
        if not data:
            raise RunnerError(
                "the earlier squashfs of this image is damaged",
                f"it ends {length - done} bytes before it should",
                "import without the cache: --no-cache",
            )
        while data:
            written = os.pwrite(target, data, target_offset + done)
            done += written
            data = data[written:]


def _by_kernel(source: int, source_offset: int, target: int, target_offset: int, length: int) -> int:
    """How many bytes copy_file_range copied; fewer than `length` where it refuses or finds no more."""
    done = 0
    while done < length:
        try:
            count = os.copy_file_range(
                source, target, min(_PIECE, length - done), source_offset + done, target_offset + done
            )
        except OSError as error:
            if error.errno in _REFUSED:
                return done
            raise
        if count == 0:
            return done
        done += count
    return done


Block = bytes | memoryview


class Memory:
    """Counts what blocks keep in memory: a view keeps all that it is a view of, counted once for views in a row."""

    __slots__ = ("_source",)

    def __init__(self) -> None:
        self._source: object = None  # of the last block, where that was a view

    def more(self, block: Block) -> int:
        """Bytes that stay for this block and did not for the one before."""
        if not isinstance(block, memoryview):
            return len(block)
        if block.obj is self._source:
            return 0
        self._source = block.obj
        return memoryview(block.obj).nbytes
