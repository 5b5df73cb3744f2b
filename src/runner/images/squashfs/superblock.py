"""The first bytes of a squashfs 4.0. Source: Linux 6.1, fs/squashfs/squashfs_fs.h, struct squashfs_super_block."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from runner.images.squashfs.compression import Compression

SUPERBLOCK_SIZE = 96
ABSENT = (1 << 64) - 1  # the place of a table that there is not
_LAYOUT = struct.Struct("<4sIIIIHHHHHHQQQQQQQQ")
_PLAIN_INODES, _PLAIN_DATA, _PLAIN_FRAGMENTS, _PLAIN_XATTRS, _PLAIN_IDS = 0x1, 0x2, 0x8, 0x100, 0x800
_EXPORTABLE, _NO_XATTRS, _COMPRESSOR_OPTIONS = 0x80, 0x200, 0x400


@dataclass(frozen=True)
class Superblock:
    """How many of everything there are, and where the tables lie."""

    inodes: int
    time: int  # seconds since 1970
    fragments: int
    ids: int
    root: int  # the reference to its inode
    bytes_used: int
    id_table: int
    xattr_table: int  # or ABSENT
    inode_table: int
    directory_table: int
    fragment_table: int
    export_table: int

    def pack(self, compression: Compression) -> bytes:
        return _LAYOUT.pack(
            b"hsqs",
            self.inodes,
            max(0, min(self.time, 0xFFFFFFFF)),
            compression.block_size,
            self.fragments,
            compression.number,
            compression.block_size.bit_length() - 1,
            self._flags(compression),
            self.ids,
            4,
            0,
            self.root,
            self.bytes_used,
            self.id_table,
            self.xattr_table,
            self.inode_table,
            self.directory_table,
            self.fragment_table,
            self.export_table,
        )

    def _flags(self, compression: Compression) -> int:
        flags = _EXPORTABLE
        if self.xattr_table == ABSENT:
            flags |= _NO_XATTRS
        if compression.options():
            flags |= _COMPRESSOR_OPTIONS
        if compression.name == "none":
            flags |= _PLAIN_DATA | _PLAIN_FRAGMENTS
        if compression.name == "none" or not compression.metadata:
            flags |= _PLAIN_INODES | _PLAIN_XATTRS | _PLAIN_IDS
        return flags


def compressor_options(compression: Compression) -> bytes:
    """The metadata block behind the superblock, never compressed; empty where the compressor has no options."""
    options = compression.options()
    return struct.pack("<H", len(options) | 0x8000) + options if options else b""
