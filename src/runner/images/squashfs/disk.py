"""Writes and copies, by the kernel if it can; and a thread that does them while the processor works.

Without that thread the reader, the bottleneck, would wait for each write (a third of its time if the kernel allocates
pages slowly), and copies and the writeback of the page cache would follow the work instead of overlapping it.
"""

import errno
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import BinaryIO

from runner.errors import RunnerError

_PIECE = 64 << 20  # per call, so that Ctrl-C takes effect
_BUFFER = 1 << 20
_MOST_PIECES = 1024  # of one call: Linux's limits.h, UIO_MAXIOV
# file systems, kernels and files that copy_file_range does not support
_REFUSED = (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)


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


def copy_range(
    source: int, source_offset: int, target: int, target_offset: int, length: int
) -> None:
    """Copy bytes between open descriptors without moving their positions.

    Raises RunnerError if `source` ends too early, OSError for the disk.
    """
    done, by_kernel = 0, True
    while done < length:
        at, to, left = source_offset + done, target_offset + done, length - done
        if by_kernel:
            try:
                count = os.copy_file_range(source, target, min(_PIECE, left), at, to)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                count = 0
            by_kernel = count > 0
        else:
            data = os.pread(source, min(_BUFFER, left), at)
            if not data:
                raise RunnerError(
                    "the squashfs file to copy layers from is damaged",
                    f"the file is {left} bytes too short",
                    "to import without copying layers: runner import IMAGE --no-cache",
                )
            count = os.pwrite(target, data, to)
        done += count


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


_STEP = 64 << 20  # bytes that are sent to the disk at a time
_SYNC_FILE_RANGE_WRITE = 2
MOST_UNWRITTEN = 16 << 20  # bytes of memory that wait for the disk


class Disk:
    """A thread that writes a file and starts its writeback, in the order of the calls; close it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pool = ThreadPoolExecutor(1, "disk")
        self._error: BaseException | None = None
        self._closed = False
        self._memory, self._unwritten = Memory(), 0
        self._less = threading.Condition()
        self._sent = 0  # writeback has started up to here; used by the thread only

    def write(self, blocks: list[Block], offset: int) -> None:
        """Write blocks in order, and empty the list then; waits while too much is unwritten.

        Raises what went wrong with what was to be written before: OSError for the disk.
        """
        held = sum(map(self._memory.more, blocks))
        with self._less:
            while self._unwritten and self._unwritten + held > MOST_UNWRITTEN:
                self._less.wait()
            self._check()
            self._unwritten += held
        self._pool.submit(self._write, blocks, offset, held)

    def copy(self, source: int, source_offset: int, offset: int, length: int) -> None:
        """Copy bytes of another file to `offset`; the caller may close that file."""
        self._pool.submit(self._copy, os.dup(source), source_offset, offset, length)

    def settle(self) -> None:
        """Wait for all writes. Raises RunnerError for a source that is too short, OSError for the disk."""
        self._pool.submit(self._check).result()

    def close(self) -> None:
        """End the thread; writes that have not begun are dropped."""
        self._closed = True
        self._pool.shutdown()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    @contextmanager
    def _failing_later(self) -> Iterator[None]:
        """Keep an error of the block for the next call of the caller."""
        try:
            yield
        except BaseException as error:
            self._error = error

    def _write(self, blocks: list[Block], offset: int, held: int) -> None:
        with self._failing_later():
            if not self._closed and self._error is None:
                self._send_out(offset + write_pieces(self._descriptor, blocks, offset))
        blocks.clear()  # release the memory before the caller continues
        with self._less:
            self._unwritten -= held
            self._less.notify()

    def _copy(self, source: int, source_offset: int, offset: int, length: int) -> None:
        with self._failing_later():
            self._sent = offset
            for done in range(0, length, _STEP):
                if self._closed or self._error is not None:
                    break  # Ctrl-C does not wait for gigabytes
                step = min(_STEP, length - done)
                copy_range(source, source_offset + done, self._descriptor, offset + done, step)
                self._send_out(offset + done + step)
        os.close(source)

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


METADATA_SIZE = 8192
_HEADER = struct.Struct("<H")
_PLAIN = 0x8000


class MetadataStream:
    """A stream of records in blocks of 8 KiB; full blocks go to `emit` at once. A record may span blocks.

    They are never compressed: they take 60 bytes more for a file, and squashfuse_ll finds paths four times faster (5000
    of 50,000 in 0.13 s, not 0.48 s with zstd and 0.93 s with gzip).
    """

    __slots__ = ("_emit", "buffer", "start")

    def __init__(self, emit: Callable[[bytes], object]) -> None:
        self._emit = emit
        self.start = 0  # of the current block: bytes emitted before it
        self.buffer = bytearray()  # always shorter than a block

    def reference(self) -> int:
        """The reference of the next record: start of its block << 16 | offset in the block."""
        return self.start << 16 | len(self.buffer)

    def write(self, record: bytes | bytearray) -> None:
        self.buffer += record
        while len(self.buffer) >= METADATA_SIZE:
            self._flush(bytes(self.buffer[:METADATA_SIZE]))
            del self.buffer[:METADATA_SIZE]

    def finish(self) -> None:
        if self.buffer:
            self._flush(bytes(self.buffer))
            self.buffer.clear()

    def _flush(self, plain: bytes) -> None:
        block = _HEADER.pack(len(plain) | _PLAIN) + plain
        self._emit(block)
        self.start += len(block)


class FileStream(MetadataStream):
    """A metadata stream that goes to a file from `position` on."""

    __slots__ = ("_file", "blocks", "position")

    def __init__(self, file: BinaryIO, position: int) -> None:
        super().__init__(self._append)
        self._file = file
        self.position = position
        self.blocks: list[int] = []  # where each block begins in the file

    def _append(self, block: bytes) -> None:
        self.blocks.append(self.position)
        self._file.write(block)
        self.position += len(block)


def write_lookup_table(
    file: BinaryIO, position: int, records: Iterable[bytes], head: bytes = b""
) -> tuple[int, int]:
    """Write a table with a list of its blocks; returns the start of `head` and that list, and their end."""
    stream = FileStream(file, position)
    for record in records:
        stream.write(record)
    stream.finish()
    index = head + struct.pack(f"<{len(stream.blocks)}Q", *stream.blocks)
    file.write(index)
    return stream.position, stream.position + len(index)
