"""Inodes as squashfs packs them. Source: Linux 6.1, fs/squashfs/squashfs_fs.h, struct squashfs_*_inode.

The readers of tar and the flattener refuse what squashfs cannot hold, except for what is refused here.
"""

from __future__ import annotations

import stat
import struct
from array import array
from collections.abc import Iterator
from typing import BinaryIO

from runner.errors import RunnerError
from runner.images.squashfs.compression import ABSENT
from runner.images.squashfs.data import Directory, FileData, Leaf, Xattrs
from runner.images.squashfs.disk import (
    METADATA_SIZE,
    FileStream,
    MetadataStream,
    write_lookup_table,
)

DIRECTORY, FILE, SYMLINK, BLOCK_DEVICE, CHARACTER_DEVICE, FIFO, SOCKET = range(1, 8)
_EXTENDED = 7  # added to the type of an inode that has more fields
_LARGEST = 0xFFFFFFFF
_LONGEST_TARGET = 65535  # what unsquashfs reads; the kernel follows 4095
_LARGEST_BASIC_LISTING = 65535
TYPES = {
    stat.S_IFREG: FILE,
    stat.S_IFLNK: SYMLINK,
    stat.S_IFBLK: BLOCK_DEVICE,
    stat.S_IFCHR: CHARACTER_DEVICE,
    stat.S_IFIFO: FIFO,
    stat.S_IFSOCK: SOCKET,
}
# each begins with type, permissions, uid, gid, mtime, number
_FILE = struct.Struct("<HHHHIIIIII")  # start, fragment, offset, size
# start, size, sparse, links, fragment, offset, xattrs
_LARGE_FILE = struct.Struct("<HHHHIIQQQIIII")
_SYMLINK = struct.Struct("<HHHHIIII")  # links, size
_DEVICE = struct.Struct("<HHHHIIII")  # links, device
_PIPE = struct.Struct("<HHHHIII")  # links
_DIRECTORY = struct.Struct("<HHHHIIIIHHI")  # start, links, size, offset, parent
# links, size, start, parent, indexes, offset, xattrs
_LARGE_DIRECTORY = struct.Struct("<HHHHIIIIIIHHI")
_WORD = struct.Struct("<I")


class InodePacker:
    """Packs inodes; collects their owners and extended attributes."""

    def __init__(self, block_size: int) -> None:
        self.ids = IdTable()
        self.xattrs = XattrTable()
        self._block_size = block_size

    def leaf(self, leaf: Leaf, kind: int, number: int) -> bytes:
        if kind == FILE:
            return self._file(leaf, number)
        xattrs = self.xattrs[leaf.xattrs]
        extended = xattrs != NO_XATTRS
        ids, data = self.ids, leaf.data
        kind_word, mode = kind + _EXTENDED if extended else kind, leaf.mode & 0o7777
        head = (kind_word, mode, ids[leaf.uid], ids[leaf.gid], leaf.mtime, number, leaf.links)
        if kind == SYMLINK and isinstance(data, bytes) and len(data) <= _LONGEST_TARGET:
            packed = _SYMLINK.pack(*head, len(data)) + data
        elif kind in (BLOCK_DEVICE, CHARACTER_DEVICE) and isinstance(data, int):
            packed = _DEVICE.pack(*head, data)
        elif kind in (FIFO, SOCKET):
            packed = _PIPE.pack(*head)
        else:
            raise AssertionError(
                f"mode {leaf.mode:o} does not fit data of type {type(data).__name__}"
            )
        return packed + _WORD.pack(xattrs) if extended else packed

    def _file(self, leaf: Leaf, number: int) -> bytes:
        data, ids = leaf.data, self.ids
        assert isinstance(data, FileData), f"a file's data is {type(data).__name__}"
        size, start, sizes, fragment, offset = data.located()
        xattrs, links = self.xattrs[leaf.xattrs], leaf.links
        sparse = self._sparse_bytes(size, sizes) if sizes else 0
        mode, uid, gid, mtime = leaf.mode & 0o7777, ids[leaf.uid], ids[leaf.gid], leaf.mtime
        small = size <= _LARGEST and start <= _LARGEST
        if small and links == 1 and xattrs == NO_XATTRS and not sparse:
            head = (FILE, mode, uid, gid, mtime, number)
            return _FILE.pack(*head, start, fragment, offset, size) + sizes
        head = (FILE + _EXTENDED, mode, uid, gid, mtime, number)
        return _LARGE_FILE.pack(*head, start, size, sparse, links, fragment, offset, xattrs) + sizes

    def _sparse_bytes(self, size: int, sizes: bytes) -> int:
        """The bytes in holes, less than the size, as in mksquashfs: readers may reject a file of holes only."""
        if bytes(4) not in sizes:
            return 0
        words = array("I", sizes)  # only compared with 0: the byte order does not matter
        holes = words.count(0) * self._block_size
        if words[-1] == 0 and size % self._block_size:
            holes -= self._block_size - size % self._block_size
        return min(holes, size - 1)

    def directory(
        self, directory: Directory, listing: ListingWriter, number: int, parent: int
    ) -> bytes:
        """An inode; extended if the listing is large or indexed, or the directory has extended attributes."""
        xattrs = self.xattrs[directory.xattrs]
        size = listing.size + 3  # "." and ".." count as 3 bytes
        mode, uid, gid = directory.mode & 0o7777, self.ids[directory.uid], self.ids[directory.gid]
        mtime, links = directory.mtime, listing.subdirectories + 2
        start, offset = listing.reference >> 16, listing.reference & 0xFFFF
        if size <= _LARGEST_BASIC_LISTING and xattrs == NO_XATTRS and not listing.indexes:
            head = (DIRECTORY, mode, uid, gid, mtime, number)
            return _DIRECTORY.pack(*head, start, links, size, offset, parent)
        head = (DIRECTORY + _EXTENDED, mode, uid, gid, mtime, number)
        places = (links, size, start, parent, listing.indexes, offset, xattrs)
        return _LARGE_DIRECTORY.pack(*head, *places) + listing.index


_HEADER = struct.Struct("<III")  # entries - 1, inode block, base inode number of the entries
# offset in the inode block, inode number - that of the header, type, name length - 1
_ENTRY = struct.Struct("<HhHH")
# position of the header in the listing, its metadata block, name length - 1
_INDEX = struct.Struct("<III")
_MOST_ENTRIES = 256
_LONGEST_NAME = 256
_MOST_INDEXES = 65535  # counted in 16 bits; without more indexes, a lookup only takes longer


class ListingWriter:
    """Writes the entries of one directory, given in the order of their names."""

    def __init__(self, stream: MetadataStream) -> None:
        self._stream = stream
        self.reference = stream.reference()  # of the first header: block << 16 | offset
        self.size = 0  # in bytes, headers included
        self._last_block = stream.start  # in which the header before lies
        self.index = bytearray()
        self.indexes = 0  # number of index entries
        self.subdirectories = 0
        self._begin(0, 0, b"")

    def _begin(self, block: int, number: int, name: bytes) -> None:
        self._block, self._number, self._name = block, number, name
        self._count = 0
        self._entries = bytearray()
        self._room = METADATA_SIZE - len(self._stream.buffer) - _HEADER.size

    def add(self, name: bytes, reference: int, number: int, kind: int) -> None:
        """Add an entry. Raises RunnerError for a name that is invalid or too long for squashfs."""
        # find(): `in` first tries its left side as a number, which takes longer than the search
        if (
            not 0 < len(name) <= _LONGEST_NAME
            or name.find(b"/") >= 0
            or name.find(0) >= 0
            or name in (b".", b"..")
        ):
            why = f"squashfs stores names of 1 to {_LONGEST_NAME} bytes, without '/' and NUL, and neither '.' nor '..'"
            what = f"cannot import the file {name[:80].decode(errors='replace')!r} of the image"
            raise RunnerError(what, why, "build the image without that file")
        block, difference = reference >> 16, number - self._number
        # a header never extends far into the next metadata block: the index points readers to the right block
        if (
            block != self._block
            or not -32768 <= difference <= 32767
            or self._count == _MOST_ENTRIES
            or len(self._entries) >= self._room
        ):
            self.finish()
            self._begin(block, number, name)
            difference = 0
        elif self._count == 0:
            self._number, self._name, difference = number, name, 0
        self._entries += _ENTRY.pack(reference & 0xFFFF, difference, kind, len(name) - 1) + name
        self._count += 1
        if kind == DIRECTORY:
            self.subdirectories += 1

    def finish(self) -> None:
        """Write the pending header and entries, with an index if it is the first of a metadata block."""
        if not self._count:
            return
        stream = self._stream
        if stream.start != self._last_block and self.indexes < _MOST_INDEXES:
            self.index += _INDEX.pack(self.size, stream.start, len(self._name) - 1) + self._name
            self.indexes += 1
        self._last_block = stream.start
        stream.write(_HEADER.pack(self._count - 1, self._block, self._number) + self._entries)
        self.size += _HEADER.size + len(self._entries)


NO_XATTRS = 0xFFFFFFFF
_MOST_IDS = 65535  # the superblock counts them in 16 bits
_NAMESPACES = {b"user": 0, b"trusted": 1, b"security": 2}


class IdTable(dict[int, int]):
    """uid or gid -> its index; a new id gets the next index."""

    def __missing__(self, number: int) -> int:
        assert 0 <= number <= _LARGEST, number
        if len(self) == _MOST_IDS:
            raise RunnerError(
                f"cannot import the image: its files have more than {_MOST_IDS} different owners",
                "squashfs stores users and groups in one table of 16-bit indexes",
                "make root the owner of all files: --owners root",
            )
        self[number] = index = len(self)
        return index

    def write(self, file: BinaryIO, position: int) -> tuple[int, int]:
        """Write the table; returns the start of its index, and its end."""
        return write_lookup_table(file, position, (struct.pack("<I", number) for number in self))


class XattrTable(dict[Xattrs, int]):
    """A file's extended attributes -> the index of the set; equal sets share an index."""

    def __init__(self) -> None:
        super().__init__({(): NO_XATTRS})
        self._sets: list[Xattrs] = []

    def __missing__(self, xattrs: Xattrs) -> int:
        ordered = tuple(sorted(xattrs))
        if ordered not in self:
            dict.__setitem__(self, ordered, len(self._sets))
            self._sets.append(ordered)
        self[xattrs] = index = self[ordered]
        return index

    def write(self, file: BinaryIO, position: int) -> tuple[int, int]:
        """Write the table; returns the start of its head (ABSENT: no table), and its end."""
        if not self._sets:
            return ABSENT, position
        pairs = FileStream(file, position)
        records = list(self._write_pairs(pairs))
        pairs.finish()
        head = struct.pack("<QII", position, len(records), 0)
        return write_lookup_table(file, pairs.position, records, head)

    def _write_pairs(self, stream: FileStream) -> Iterator[bytes]:
        for xattrs in self._sets:
            reference, size = stream.reference(), 0
            for name, value in xattrs:
                namespace, _, key = name.partition(b".")
                head = struct.pack("<HH", _NAMESPACES[namespace], len(key))
                pair = head + key + struct.pack("<I", len(value)) + value
                stream.write(pair)
                size += len(pair)
            yield struct.pack("<QII", reference, len(xattrs), size)
