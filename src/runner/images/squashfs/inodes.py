"""Inodes as squashfs packs them. Source: Linux 6.1, fs/squashfs/squashfs_fs.h, struct squashfs_*_inode."""

import stat
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from runner.errors import RunnerError
from runner.images.squashfs.compression import ABSENT
from runner.images.squashfs.data import Directory, FileData, Leaf
from runner.images.squashfs.disk import METADATA_SIZE, FileStream, MetadataStream, write_lookup_table

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
            f"cannot import the image: it has a file of mode {mode:o}",
            "squashfs has no file type for that mode",
            "build the image without that file",
        )
    return kind


def _clamped(mtime: int) -> int:
    return 0 if mtime < 0 else min(mtime, _LARGEST)


@dataclass(frozen=True, slots=True)
class Listing:
    """The place of a directory's entries in the directory table."""

    reference: int  # block << 16 | offset
    size: int  # in bytes, headers included
    indexes: int  # number of index entries
    index: bytes
    subdirectories: int


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
                    f"cannot import the image: it has a symlink with a target of {len(data)} bytes",
                    f"a target has at most {_LONGEST_TARGET} bytes in squashfs, and at most 4095 bytes under Linux",
                    "build the image without that file",
                )
            packed = _SYMLINK.pack(*head, len(data)) + data
        elif kind in (BLOCK_DEVICE, CHARACTER_DEVICE) and isinstance(data, int):
            packed = _DEVICE.pack(*head, data)
        elif kind in (FIFO, SOCKET):
            packed = _PIPE.pack(*head)
        else:
            raise AssertionError(f"mode {leaf.mode:o} does not fit data of type {type(data).__name__}")
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
        """The bytes in holes, less than the size, as in mksquashfs: readers may reject a file of holes only."""
        if bytes(4) not in sizes:
            return 0
        words = array("I", sizes)  # only compared with 0: the byte order does not matter
        holes = words.count(0) * self._block_size
        if words[-1] == 0 and size % self._block_size:
            holes -= self._block_size - size % self._block_size
        return min(holes, size - 1)

    def directory(self, directory: Directory, listing: Listing, number: int, parent: int) -> bytes:
        """An inode; extended if the listing is large or indexed, or the directory has extended attributes."""
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


_HEADER = struct.Struct("<III")  # entries - 1, inode block, base inode number of the entries
_ENTRY = struct.Struct("<HhHH")  # offset in the inode block, inode number - that of the header, type, name length - 1
_INDEX = struct.Struct("<III")  # position of the header in the listing, its metadata block, name length - 1
_MOST_ENTRIES = 256
_LONGEST_NAME = 256
_MOST_INDEXES = 65535  # counted in 16 bits; without more indexes, a lookup only takes longer


class ListingWriter:
    """Writes the entries of one directory, given in the order of their names."""

    def __init__(self, stream: MetadataStream) -> None:
        self._stream = stream
        self._reference = stream.reference()
        self._size = 0
        self._last_block = stream.start  # in which the header before lies
        self._index = bytearray()
        self._indexes = 0
        self._subdirectories = 0
        self._begin(0, 0, b"")

    def _begin(self, block: int, number: int, name: bytes) -> None:
        self._block, self._number, self._name = block, number, name
        self._count = 0
        self._entries = bytearray()
        self._room = METADATA_SIZE - len(self._stream.buffer) - _HEADER.size

    def add(self, name: bytes, reference: int, number: int, kind: int) -> None:
        """Add an entry. Raises RunnerError for a name that is invalid or too long for squashfs."""
        # find(): `in` first tries its left side as a number, which takes longer than the search
        if not 0 < len(name) <= _LONGEST_NAME or name.find(b"/") >= 0 or name.find(0) >= 0 or name in (b".", b".."):
            raise _bad_name(name)
        block, difference = reference >> 16, number - self._number
        # a header never extends far into the next metadata block: the index points readers to the right block
        if (
            block != self._block
            or not -32768 <= difference <= 32767
            or self._count == _MOST_ENTRIES
            or len(self._entries) >= self._room
        ):
            self._flush()
            self._begin(block, number, name)
            difference = 0
        elif self._count == 0:
            self._number, self._name, difference = number, name, 0
        self._entries += _ENTRY.pack(reference & 0xFFFF, difference, kind, len(name) - 1) + name
        self._count += 1
        if kind == DIRECTORY:
            self._subdirectories += 1

    def finish(self) -> Listing:
        self._flush()
        return Listing(self._reference, self._size, self._indexes, bytes(self._index), self._subdirectories)

    def _flush(self) -> None:
        """Write the pending header and entries, with an index if it is the first of a metadata block."""
        if not self._count:
            return
        stream = self._stream
        if stream.start != self._last_block and self._indexes < _MOST_INDEXES:
            self._index += _INDEX.pack(self._size, stream.start, len(self._name) - 1) + self._name
            self._indexes += 1
        self._last_block = stream.start
        stream.write(_HEADER.pack(self._count - 1, self._block, self._number) + self._entries)
        self._size += _HEADER.size + len(self._entries)


def _bad_name(name: bytes) -> RunnerError:
    shown = name[:80].decode(errors="replace")
    why = (
        f"squashfs stores names of at most {_LONGEST_NAME} bytes"
        if len(name) > _LONGEST_NAME
        else "this is not a valid name for a file"
    )
    return RunnerError(f"cannot import the file {shown!r} of the image", why, "build the image without that file")


NO_XATTRS = 0xFFFFFFFF
_MOST_IDS = 65535  # the superblock counts them in 16 bits
_PREFIXES = ((b"user.", 0), (b"trusted.", 1), (b"security.", 2))
XattrSet = tuple[tuple[bytes, bytes], ...]


class IdTable(dict[int, int]):
    """uid or gid -> its index; a new id gets the next index."""

    def __missing__(self, number: int) -> int:
        if not 0 <= number <= 0xFFFFFFFF:
            raise RunnerError(
                f"cannot import the image: it has a file whose owner is {number}",
                "an owner must be a 32-bit number",
                "build the image without that file",
            )
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


class XattrTable(dict[XattrSet, int]):
    """A file's extended attributes -> the index of the set; equal sets share an index."""

    def __init__(self) -> None:
        super().__init__({(): NO_XATTRS})
        self._sets: list[XattrSet] = []

    def __missing__(self, xattrs: XattrSet) -> int:
        ordered = tuple(sorted(xattrs))
        if ordered not in self:
            for name, _ in ordered:
                # POSIX ACLs (system.*) are among those that squashfs does not support
                if not any(name.startswith(prefix) and len(name) - len(prefix) <= 0xFFFF for prefix, _ in _PREFIXES):
                    raise RunnerError(
                        f"cannot import the image: a file has the extended attribute {name.decode(errors='replace')!r}",
                        "squashfs can store only attributes in the namespaces user, trusted and security",
                        "import the image without extended attributes: --xattrs drop",
                    )
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
                prefix, number = next(known for known in _PREFIXES if name.startswith(known[0]))
                key = name[len(prefix) :]
                pair = struct.pack("<HH", number, len(key)) + key + struct.pack("<I", len(value)) + value
                stream.write(pair)
                size += len(pair)
            yield struct.pack("<QII", reference, len(xattrs), size)
