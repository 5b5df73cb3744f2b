"""The tables after the data of a squashfs: inodes, directories, fragments, inode numbers, owners, xattrs."""

from __future__ import annotations

import stat
import struct
from array import array
from collections.abc import Iterator
from typing import BinaryIO

import zstandard

from runner.images.squashfs.compression import ABSENT, SUPERBLOCK, Compression, superblock_flags
from runner.images.squashfs.data import DataWriter, Directory
from runner.images.squashfs.disk import FileStream, MetadataStream, write_lookup_table
from runner.images.squashfs.inodes import DIRECTORY, TYPES, InodePacker, ListingWriter

_UNWRITTEN = (1 << 64) - 1
_DEVICE_BLOCK = 4096  # a squashfs is padded to it, for loop devices
_PIECE = 1024  # inode references packed at a time


def write_tables(
    file: BinaryIO, data: DataWriter, root: Directory, *, time: int, compression: Compression
) -> None:
    """Write all tables after the data, then the superblock; `file` is then a complete squashfs, and flushed.

    `data` has no open run. The bytes depend on the tree, the runs, `time` and the compression alone.
    Raises RunnerError if squashfs cannot represent the tree, OSError for the disk.
    """
    file.seek(data.position)
    tree = _TreeWriter(FileStream(file, data.position), compression.block_size, root)
    root_reference = tree.write()
    directory_table = position = tree.inodes.position
    for piece in tree.listings.pieces():
        file.write(piece)
        position += len(piece)
    fragment_table = ABSENT
    if data.fragment_count:
        fragment_table, position = write_lookup_table(file, position, data.fragments())
    export_table, position = write_lookup_table(file, position, _packed(tree.references))
    id_table, position = tree.packer.ids.write(file, position)
    xattr_table, position = tree.packer.xattrs.write(file, position)
    file.write(bytes(-position % _DEVICE_BLOCK))
    time, block_size = max(0, min(time, 0xFFFFFFFF)), compression.block_size
    flags, ids = superblock_flags(compression, xattrs=xattr_table != ABSENT), len(tree.packer.ids)
    superblock = SUPERBLOCK.pack(
        b"hsqs",
        len(tree.references),
        time,
        block_size,
        data.fragment_count,
        compression.number,
        block_size.bit_length() - 1,
        flags,
        ids,
        4,  # the major and the minor version of squashfs
        0,
        root_reference,
        position,
        id_table,
        xattr_table,
        data.position,
        directory_table,
        fragment_table,
        export_table,
    )
    data.settle()  # the superblock makes the file a squashfs: all data must be in it
    file.seek(0)
    file.write(superblock)
    file.flush()


def _packed(references: array[int]) -> Iterator[bytes]:
    for start in range(0, len(references), _PIECE):
        piece = references[start : start + _PIECE]
        yield struct.pack(f"<{len(piece)}Q", *piece)


class _Spool:
    """Bytes that are read back once, in order; compressed until then, from 30 to 5 bytes per file."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=1).compressobj()
        self._packed: list[bytes] = []

    def append(self, data: bytes) -> None:
        if packed := self._compressor.compress(data):
            self._packed.append(packed)

    def pieces(self) -> Iterator[bytes]:
        self._packed.append(self._compressor.flush())
        decompressor = zstandard.ZstdDecompressor().decompressobj()
        for packed in self._packed:
            yield decompressor.decompress(packed)


class _Frame:
    """A directory in progress: its children have numbers, its subdirectories are written first."""

    __slots__ = ("directory", "first", "names", "number", "parent", "waiting", "written")

    def __init__(self, directory: Directory, number: int, parent: int, first: int) -> None:
        self.directory, self.number, self.parent = directory, number, parent
        self.first = first  # the number of the first child
        self.names = sorted(directory.children)
        # subdirectories and their numbers, in reverse order
        self.waiting: list[tuple[Directory, int]] = []
        self.written: list[bytes] = []  # the inodes of finished subdirectories


class _TreeWriter:
    """Writes inodes and listings, the deepest first, without recursion.

    The children of a directory have consecutive numbers and lie side by side in the inode table, in the order of their
    names: their entries need few headers, and a reader that lists them reads few blocks.
    """

    def __init__(self, inodes: FileStream, block_size: int, root: Directory) -> None:
        self.inodes = inodes
        self.listings = _Spool()  # they follow the inodes, whose length is unknown until the end
        self.packer = InodePacker(block_size)
        self.references = array("Q", [_UNWRITTEN]) * _count(root)
        self._directories = MetadataStream(self.listings.append)
        self._root = root
        self._next = 2  # the root is 1
        self._linked: dict[int, int] = {}  # id of a Leaf with several names -> inode number

    def write(self) -> int:
        """The reference to the root's inode."""
        # the root's parent is not an inode number, as in mksquashfs
        stack = [self._enter(self._root, 1, len(self.references) + 1)]
        while True:
            frame = stack[-1]
            if frame.waiting:
                directory, number = frame.waiting.pop()
                stack.append(self._enter(directory, number, frame.number))
                continue
            stack.pop()
            inode = self._leave(frame)
            if not stack:
                break
            stack[-1].written.append(inode)
        reference = self._write_inode(inode, 1)
        self.inodes.finish()
        self._directories.finish()
        return reference

    def _enter(self, directory: Directory, number: int, parent: int) -> _Frame:
        """Assign inode numbers to the children."""
        frame = _Frame(directory, number, parent, self._next)
        children, linked, following = directory.children, self._linked, self._next
        for name in frame.names:
            child = children[name]
            if isinstance(child, Directory):
                frame.waiting.append((child, following))
            elif child.links > 1:
                if id(child) in linked:
                    continue
                linked[id(child)] = following
            following += 1
        self._next = following
        frame.waiting.reverse()
        return frame

    def _leave(self, frame: _Frame) -> bytes:
        """Write the children's inodes and the listing; the directory's own inode, which its parent will write."""
        listing = ListingWriter(self._directories)
        children, packer, references = frame.directory.children, self.packer, self.references
        following, subdirectories = frame.first, iter(frame.written)
        for name in frame.names:
            child, number = children[name], following
            if isinstance(child, Directory):
                kind, reference = DIRECTORY, self._write_inode(next(subdirectories), number)
            else:
                kind, reference = TYPES[stat.S_IFMT(child.mode)], _UNWRITTEN
                if child.links > 1:
                    number = self._linked[id(child)]
                    reference = references[number - 1]
                if reference == _UNWRITTEN:
                    reference = self._write_inode(packer.leaf(child, kind, number), number)
            if number == following:
                following += 1
            listing.add(name, reference, number, kind)
        listing.finish()
        return packer.directory(frame.directory, listing, frame.number, frame.parent)

    def _write_inode(self, inode: bytes, number: int) -> int:
        reference = self.inodes.reference()
        self.references[number - 1] = reference
        self.inodes.write(inode)
        return reference


def _count(root: Directory) -> int:
    """The number of inodes; counts the names of each Leaf on the way."""
    inodes, stack = 1, [root]
    while stack:
        for child in stack.pop().children.values():
            if isinstance(child, Directory):
                stack.append(child)
                inodes += 1
            else:
                child.links += 1
                inodes += child.links == 1
    return inodes
