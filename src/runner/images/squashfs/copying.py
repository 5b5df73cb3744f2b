"""Bytes from one file to another, copied by the kernel if it can."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import BinaryIO

from runner.errors import RunnerError

_PIECE = 64 << 20  # per call, so that Ctrl-C takes effect
_BUFFER = 1 << 20
_MOST_PIECES = 1024  # of one call: Linux's limits.h, UIO_MAXIOV
# file systems, kernels and files that copy_file_range does not support
_REFUSED = (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all of `data`: an unbuffered file may accept only a part."""
    written = file.write(data)
    while written < len(data):
        written += file.write(data[written:])


def write_pieces(target: int, pieces: Sequence[bytes | memoryview], position: int) -> int:
    """Write the pieces to a descriptor in order, from `position` on; returns their bytes."""
    end = position
    for start in range(0, len(pieces), _MOST_PIECES):
        some = pieces[start : start + _MOST_PIECES]
        expected, written = sum(map(len, some)), os.pwritev(target, some, end)
        end += written
        if written < expected:  # a signal, or the disk is nearly full
            end += write_pieces(target, [memoryview(b"".join(some))[written:]], end)
    return end - position


def copy_range(source: int, source_offset: int, target: int, target_offset: int, length: int) -> None:
    """Copy bytes between open descriptors without moving their positions.

    Raises RunnerError if `source` ends too early, OSError for the disk.
    """
    done = _by_kernel(source, source_offset, target, target_offset, length)
    while done < length:
        data = os.pread(source, min(_BUFFER, length - done), source_offset + done)
        if not data:
            raise RunnerError(
                "the previous squashfs file of this image is damaged",
                f"the file is {length - done} bytes too short",
                "import without the cache: --no-cache",
            )
        while data:
            written = os.pwrite(target, data, target_offset + done)
            done += written
            data = data[written:]


def _by_kernel(source: int, source_offset: int, target: int, target_offset: int, length: int) -> int:
    """How many bytes copy_file_range copied; fewer than `length` if it fails or the file ends."""
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
    """Counts the memory that blocks hold: a view holds its whole buffer, counted once for consecutive views."""

    __slots__ = ("_source",)

    def __init__(self) -> None:
        self._source: object = None  # of the last block, where that was a view

    def more(self, block: Block) -> int:
        """Bytes that this block holds in addition to the one before."""
        if not isinstance(block, memoryview):
            return len(block)
        if block.obj is self._source:
            return 0
        self._source = block.obj
        return memoryview(block.obj).nbytes
