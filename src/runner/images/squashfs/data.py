"""File contents of a squashfs, compressed blocks in runs, one run per layer; and the tree of files that has them.

A run's bytes depend only on its contents and their order, not on its position or the number of threads. So a run can
be copied from one squashfs to another.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from isal import isal_zlib

from runner.errors import RunnerError
from runner.images.layers.layer import Reader, view
from runner.images.squashfs.compression import SUPERBLOCK, Compression
from runner.images.squashfs.disk import Block, Disk
from runner.images.squashfs.workers import PLAIN, Workers

FRAGMENT = struct.Struct("<QI")
NO_FRAGMENT = 0xFFFFFFFF
_WORD = struct.Struct("<I")
_LARGEST_SMALL = (1 << 20) - 1  # a file in a fragment is smaller than the largest block
# a small file: (its fragment + 1, offset, size) in one int, 20 bits each; a large one: size, start, size words
Place = int | tuple[int, int, bytes]


@dataclass(slots=True)
class Run:
    """A contiguous piece of the squashfs that holds the data blocks and the fragments of some files."""

    offset: int  # in the file
    length: int = 0
    fragments: bytes = b""  # each: start relative to the run (u64), size word (u32)
    first_fragment: int = 0  # the index of its first one in the whole squashfs
    check: int = 0  # CRC-32 of its bytes, once it has ended


class FileData:
    """The place of a file's content: its own blocks, or a part of a fragment of its run.

    Small files are many, so their fragment, the offset in it and the size share one int: 80 bytes in all.
    """

    __slots__ = ("place", "run")

    def __init__(self, run: Run, place: Place) -> None:
        self.run = run
        self.place = place
        """relative to the run, so it stays valid if the run is copied; for a large file, it is set once all its blocks
        are written"""

    def located(self) -> tuple[int, int, bytes, int, int]:
        """The fields of an inode: size, start of the blocks, their size words, fragment, offset in the plain fragment.

        A size word is a u32, with PLAIN where its block is uncompressed; 0 is a hole. Without blocks the start is 0.
        """
        place, run = self.place, self.run
        if not isinstance(place, int):
            size, start, sizes = place
            return size, run.offset + start if sizes else 0, sizes, NO_FRAGMENT, 0
        fragment = place >> 40
        if not fragment:
            return place, 0, b"", NO_FRAGMENT, 0
        return (
            place & _LARGEST_SMALL,
            0,
            b"",
            run.first_fragment + fragment - 1,
            place >> 20 & _LARGEST_SMALL,
        )


class _Unfinished:
    """A large file with blocks that are not written yet."""

    __slots__ = ("data", "size", "start", "words")

    def __init__(self, data: FileData, size: int) -> None:
        self.data, self.size = data, size
        self.start = -1
        self.words = bytearray()

    def add(self, start: int, word: int, block_size: int) -> None:
        """Add the next block: its position relative to the run, and its size word."""
        if self.start < 0:
            self.start = start
        self.words += _WORD.pack(word)
        if len(self.words) * block_size >= self.size * _WORD.size:
            self.data.place = (self.size, self.start, bytes(self.words))


class DataWriter:
    """Writes runs of file contents to `file`, compressing with `threads` threads; use it as a context.

    Blocks are written in the order of the contents. Files smaller than a block share fragments; the tail of a larger
    one is a block of its own, as mksquashfs does.
    """

    def __init__(self, file: BinaryIO, compression: Compression, threads: int) -> None:
        self.runs: list[Run] = []
        self.fragment_count = 0  # of the runs that have ended
        self._file = file
        self._block_size = compression.block_size
        self._zeros = bytes(compression.block_size)
        self._run: Run | None = None
        self._empty: FileData | None = None
        # the superblock is written last: until then no program accepts the file as a squashfs
        header = bytes(SUPERBLOCK.size) + compression.options()
        file.write(header)
        self._position = len(header)
        # of each block, in the order of writing, the file (None: it is a fragment)
        self._workers: Workers[_Unfinished | None] = Workers(compression, threads, self._write)
        self._disk = Disk(file.fileno())

    def __enter__(self) -> DataWriter:
        return self

    def __exit__(self, *error: object) -> None:
        """End the threads. Data that `settle` did not wait for is lost."""
        self._workers.close()
        self._disk.close()

    @property
    def position(self) -> int:
        """The end of the runs."""
        assert self._run is None, "a run is ended before anything is put behind it"
        return self._position

    def begin_run(self) -> Run:
        assert self._run is None, "a run is ended before the next begins"
        self._run = Run(self._position, first_fragment=self.fragment_count)
        self._empty = FileData(self._run, 0)
        self._fragments = bytearray()
        self._begin_fragment(0)
        return self._run

    def add(self, size: int, stream: Reader) -> FileData:
        """Read a content of `size` bytes; its place is known when the run has ended.

        Raises RunnerError if the stream ends too early, OSError for the disk, perhaps about earlier contents.
        """
        assert self._run is not None and self._empty is not None, "contents belong to a run"
        if size >= self._block_size:
            return self._add_blocks(size, stream)
        if size == 0:
            return self._empty
        content = stream.read(size)
        if len(content) != size:
            raise _broken_off(size, len(content))
        if self._fragment_size + size > self._block_size:
            self._submit_fragment()
        data = FileData(self._run, ((self._fragment + 1) << 20 | self._fragment_size) << 20 | size)
        self._pieces.append(content)
        self._fragment_size += size
        return data

    def end_run(self) -> Run:
        """The run, with all its blocks in progress; `settle` waits until they are written."""
        assert self._run is not None, "no run has begun"
        run = self._run
        if self._pieces:
            self._submit_fragment()
        self._workers.flush()
        run.length = self._position - run.offset
        run.fragments = bytes(self._fragments)
        self._run = None
        self._keep(run)
        return run

    def copy_run(self, source: BinaryIO, run: Run) -> Run:
        """Copy a run of another squashfs of the same compression; the places of its contents stay valid.

        The bytes come over while the caller goes on; `settle` waits for them. `source` may be closed before.
        """
        assert self._run is None, "a run is ended before the next begins"
        copy = Run(self._position, run.length, run.fragments, self.fragment_count)
        self._disk.copy(source.fileno(), run.offset, self._position, run.length)
        self._position += run.length
        self._file.seek(self._position)
        self._keep(copy)
        return copy

    def settle(self) -> None:
        """Wait until all is written. Raises RunnerError if a copy's source was too short, OSError for the disk."""
        self._disk.settle()

    def fragments(self) -> Iterator[bytes]:
        """The entries of the fragment table, 16 bytes each."""
        for run in self.runs:
            for start, word in FRAGMENT.iter_unpack(run.fragments):
                yield struct.pack("<QII", run.offset + start, word, 0)

    def _keep(self, run: Run) -> None:
        self.fragment_count += len(run.fragments) // FRAGMENT.size
        self.runs.append(run)

    def _begin_fragment(self, index: int) -> None:
        self._fragment = index
        self._fragment_size = 0
        self._pieces: list[bytes] = []

    def _submit_fragment(self) -> None:
        self._workers.add(b"".join(self._pieces), None)
        self._begin_fragment(self._fragment + 1)

    def _add_blocks(self, size: int, stream: Reader) -> FileData:
        assert self._run is not None
        data = FileData(self._run, (size, 0, b""))
        unfinished, left = _Unfinished(data, size), size
        while left > 0:
            wanted = min(left, self._block_size)
            block = view(stream, wanted)
            if len(block) != wanted:
                raise _broken_off(size, size - left + len(block))
            left -= wanted
            # few blocks both begin and end with a zero
            hole = not (block[0] or block[-1]) and bytes(block) == self._zeros[:wanted]
            self._workers.add(None if hole else block, unfinished)
        return data

    def _write(self, packed: list[Block], written: list[tuple[_Unfinished | None, int]]) -> None:
        """Write packed blocks, and record the position of each."""
        assert self._run is not None
        start = self._position - self._run.offset
        for block in packed:
            self._run.check = isal_zlib.crc32(block, self._run.check)
        size = sum(map(len, packed))
        self._disk.write(packed, self._position)
        self._position += size
        for unfinished, word in written:
            if unfinished is None:
                self._fragments += FRAGMENT.pack(start, word)
            else:
                unfinished.add(start, word, self._block_size)
            start += word & ~PLAIN


def _broken_off(size: int, got: int) -> RunnerError:
    return RunnerError(
        "a file of the image is truncated",
        f"only {got} of its {size} bytes are there",
        "pull or build the image again",
    )


Xattrs = tuple[tuple[bytes, bytes], ...]


@dataclass(slots=True, eq=False)
class Leaf:
    """Any inode but a directory. Hard links are several names for one Leaf."""

    mode: int  # with the type bits
    uid: int
    gid: int
    mtime: int  # seconds since 1970, limited to 0 to 2**32 - 1
    xattrs: Xattrs
    # of a file, a symlink's target, a device (see `device_number`), nothing
    data: FileData | bytes | int | None
    layer: int
    links: int = field(default=0, init=False)  # number of visible names; counted by write_tables


@dataclass(slots=True, eq=False)
class Directory:
    """A directory and its children."""

    mode: int
    uid: int
    gid: int
    mtime: int
    xattrs: Xattrs
    children: dict[bytes, Leaf | Directory] = field(default_factory=dict)
    layer: int = -1  # the layer of its attributes; -1: no entry of its own
    opaque: int = -1  # layers below this one are hidden; -1: none


def device_number(major: int, minor: int) -> int:
    """Linux's 32-bit encoding of a device. Source: Linux 6.1, include/linux/kdev_t.h, new_encode_dev."""
    return (minor & 0xFF) | (major & 0xFFF) << 8 | (minor & 0xFFF00) << 12
