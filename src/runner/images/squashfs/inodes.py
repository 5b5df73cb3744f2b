"""Inodes as squashfs packs them. Source: Linux 6.1, fs/squashfs/squashfs_fs.h, struct squashfs_*_inode."""

from __future__ import annotations

import stat
import struct
from array import array
from dataclasses import dataclass

from runner.errors import RunnerError
from runner.images.squashfs.data import FileData
from runner.images.squashfs.identities import NO_XATTRS, IdTable, XattrTable
from runner.images.squashfs.tree import Directory, Leaf

DIRECTORY, FILE, SYMLINK, BLOCK_DEVICE, CHARACTER_DEVICE, FIFO, SOCKET = range(1, 8)
_EXTENDED = 7  # added to the type of an inode that has more fields
_LARGEST = 0xFFFFFFFF
_LONGEST_TARGET = 65535  # what unsquashfs reads; the kernel follows 4095
_LARGEST_BASIC_LISTING = 65535
_TYPES = {
    stat.S_IFREG: FILE,
    stat.S_IFLNK: SYMLINK,
    stat.S_IFBLK: BLOCK_DEVICE,
    stat.S_IFCHR: CHARACTER_DEVICE,
    stat.S_IFIFO: FIFO,
    stat.S_IFSOCK: SOCKET,
}
# each begins with type, permissions, uid, gid, mtime, number
_FILE = struct.Struct("<HHHHIIIIII")  # start, fragment, offset, size
_LARGE_FILE = struct.Struct("<HHHHIIQQQIIII")  # start, size, sparse, links, fragment, offset, xattrs
_SYMLINK = struct.Struct("<HHHHIIII")  # links, size
_DEVICE = struct.Struct("<HHHHIIII")  # links, device
_PIPE = struct.Struct("<HHHHIII")  # links
_DIRECTORY = struct.Struct("<HHHHIIIIHHI")  # start, links, size, offset, parent
_LARGE_DIRECTORY = struct.Struct("<HHHHIIIIIIHHI")  # links, size, start, parent, indexes, offset, xattrs
_WORD = struct.Struct("<I")


def leaf_type(mode: int) -> int:
    """The type of a directory entry. Raises RunnerError for a mode without a known one."""
    kind = _TYPES.get(stat.S_IFMT(mode))
    if kind is None:
        raise RunnerError(
            f"the image has a file of mode {mode:o}", "no such type of file is known", "mend the image's layer"
        )
    return kind


def _clamped(mtime: int) -> int:
    return 0 if mtime < 0 else min(mtime, _LARGEST)


@dataclass(frozen=True, slots=True)
class Listing:
    """Where a directory's entries lie in the directory table."""

    reference: int  # block << 16 | offset
    size: int  # in bytes, headers included
    indexes: int  # how many index entries there are
    index: bytes
    subdirectories: int


class InodePacker:
    """Packs inodes; gathers the owners and the extended attributes they name."""

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
        head = (
            kind + _EXTENDED if extended else kind,
            leaf.mode & 0o7777,
            ids[leaf.uid],
            ids[leaf.gid],
            _clamped(leaf.mtime),
            number,
            leaf.links,
        )
        if kind == SYMLINK and isinstance(data, bytes):
            if len(data) > _LONGEST_TARGET:
                raise RunnerError(
                    f"the image has a symlink of {len(data)} bytes",
                    f"squashfs holds {_LONGEST_TARGET}, Linux follows 4095",
                    "mend the image's layer",
                )
            packed = _SYMLINK.pack(*head, len(data)) + data
        elif kind in (BLOCK_DEVICE, CHARACTER_DEVICE) and isinstance(data, int):
            packed = _DEVICE.pack(*head, data)
        elif kind in (FIFO, SOCKET):
            packed = _PIPE.pack(*head)
        else:
            raise AssertionError(f"mode {leaf.mode:o} and data {type(data).__name__} do not go together")
        return packed + _WORD.pack(xattrs) if extended else packed

    def _file(self, leaf: Leaf, number: int) -> bytes:
        data, ids = leaf.data, self.ids
        assert isinstance(data, FileData), f"a file's data is {type(data).__name__}"
        size, start, sizes, fragment, offset = data.located()
        xattrs, links = self.xattrs[leaf.xattrs], leaf.links
        sparse = self._sparse_bytes(size, sizes) if sizes else 0
        mode, uid, gid, mtime = leaf.mode & 0o7777, ids[leaf.uid], ids[leaf.gid], _clamped(leaf.mtime)
        if links == 1 and xattrs == NO_XATTRS and not sparse and size <= _LARGEST and start <= _LARGEST:
            return _FILE.pack(FILE, mode, uid, gid, mtime, number, start, fragment, offset, size) + sizes
        return (
            _LARGE_FILE.pack(
                *(FILE + _EXTENDED, mode, uid, gid, mtime, number),
                *(start, size, sparse, links, fragment, offset, xattrs),
            )
            + sizes
        )

    def _sparse_bytes(self, size: int, sizes: bytes) -> int:
        """The bytes in holes; less than the size, as mksquashfs has it: a reader may take all of it for an error."""
        if bytes(4) not in sizes:
            return 0
        words = array("I", sizes)  # only compared with 0: the byte order is all the same
        holes = words.count(0) * self._block_size
        if words[-1] == 0 and size % self._block_size:
            holes -= self._block_size - size % self._block_size
        return min(holes, size - 1)

    def directory(self, directory: Directory, listing: Listing, number: int, parent: int) -> bytes:
        """An inode; extended where the listing is large, has an index, or the directory extended attributes."""
        xattrs, size = self.xattrs[directory.xattrs], listing.size + 3  # "." and ".." count as 3 bytes
        mode, uid, gid = directory.mode & 0o7777, self.ids[directory.uid], self.ids[directory.gid]
        mtime, links = _clamped(directory.mtime), listing.subdirectories + 2
        start, offset = listing.reference >> 16, listing.reference & 0xFFFF
        if size <= _LARGEST_BASIC_LISTING and xattrs == NO_XATTRS and not listing.indexes:
            return _DIRECTORY.pack(*(DIRECTORY, mode, uid, gid, mtime, number), *(start, links, size, offset, parent))
        return (
            _LARGE_DIRECTORY.pack(
                *(DIRECTORY + _EXTENDED, mode, uid, gid, mtime, number),
                *(links, size, start, parent, listing.indexes, offset, xattrs),
            )
            + listing.index
        )
