"""How blocks are compressed: compressor, level, and their representation in squashfs; the superblock."""

from __future__ import annotations

import lzma
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import zstandard

from runner.errors import RunnerError

Compress = Callable[[bytes | memoryview], bytes]


@dataclass(frozen=True)
class _Kind:
    number: int  # in the superblock
    levels: range  # empty: no levels
    default: int | None


# "none" is gzip whose blocks are all stored plain: every reader has gzip
_KINDS = {
    "zstd": _Kind(6, range(1, 23), 3),
    "gzip": _Kind(1, range(1, 10), 6),
    "xz": _Kind(4, range(0, 10), 6),
    "lz4": _Kind(5, range(0), None),
    "none": _Kind(1, range(0), None),
}


@dataclass(frozen=True)
class Compression:
    """The compression of all blocks of a squashfs. Raises RunnerError for values that squashfs does not support."""

    name: str  # zstd, gzip, xz, lz4 or none
    level: int | None = None  # None: the default of the compressor
    block_size: int = 131072  # a power of two, 4 KiB to 1 MiB

    def __post_init__(self) -> None:
        kind = _KINDS.get(self.name)
        if kind is None or (self.level is not None and self.level not in kind.levels):
            text = str(self)
            known = "; ".join(
                f"{name}:{kind.levels[0]} to {name}:{kind.levels[-1]}" if kind.levels else name
                for name, kind in _KINDS.items()
            )
            raise RunnerError(f"--compression cannot be {text!r}", f"runner supports {known}", "use lz4 or zstd:1")
        assert self.block_size in (1 << power for power in range(12, 21)), self.block_size

    @classmethod
    def parse(cls, text: str) -> Compression:
        """The compression `NAME[:LEVEL]`. Raises RunnerError for an unknown compressor or level."""
        name, colon, level = text.partition(":")
        if colon and not (level.isascii() and level.isdigit()):
            raise RunnerError(
                f"--compression cannot be {text!r}", "the level is not a number", "use lz4 or zstd:1", exit_code=2
            )
        return cls(name, int(level) if colon else None)

    @property
    def number(self) -> int:
        """The compressor as the superblock names it."""
        return _KINDS[self.name].number

    @property
    def effective_level(self) -> int | None:
        return _KINDS[self.name].default if self.level is None else self.level

    def __str__(self) -> str:
        return self.name if self.level is None else f"{self.name}:{self.level}"

    @property
    def identity(self) -> str:
        """A text that determines the bytes of a packed block, together with its content."""
        level = "" if self.effective_level is None else f"level {self.effective_level}"
        words = (self.name, _version(self.name), level)
        return f"{' '.join(word for word in words if word)}, blocks of {self.block_size}"

    def options(self) -> bytes:
        """The compressor's options after the superblock, which tell people the level; readers do not need them.

        The kernel reads xz's dictionary size and lz4's block format from here: 1, the legacy one.
        Source: squashfs-tools 4.5, *_wrapper.h.
        """
        if self.name == "lz4":
            return struct.pack("<II", 1, 0)
        if self.name == "zstd":
            return struct.pack("<I", self.effective_level)
        if self.name == "gzip":
            return struct.pack("<IHH", self.effective_level, 15, 0)
        return struct.pack("<II", self.block_size, 0) if self.name == "xz" else b""

    def compressor(self) -> Compress | None:
        """A new function that compresses a block, for one thread. None: blocks are stored plain."""
        level = self.effective_level
        if self.name == "lz4":
            import lz4.block  # slow to import

            return lambda data: lz4.block.compress(data, store_size=False)
        if level is None:
            return None
        if self.name == "zstd":
            return zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=False).compress
        if self.name == "gzip":
            return lambda data: zlib.compress(data, level)
        filters = [{"id": lzma.FILTER_LZMA2, "preset": level, "dict_size": self.block_size}]
        return lambda data: lzma.compress(data, lzma.FORMAT_XZ, lzma.CHECK_CRC32, None, filters)

    def decompressor(self) -> Callable[[bytes], bytes]:
        """A function that reads a block that `compressor` packed."""
        if self.name == "lz4":
            import lz4.block  # slow to import

            return lambda data: lz4.block.decompress(data, self.block_size)
        if self.name == "zstd":
            return zstandard.ZstdDecompressor().decompress
        return lzma.decompress if self.name == "xz" else zlib.decompress


def _version(name: str) -> str:
    """The version of the compression library, on which the bytes may depend."""
    if name == "lz4":
        import lz4

        return str(lz4.library_version_string())
    return {"zstd": ".".join(map(str, zstandard.ZSTD_VERSION)), "gzip": zlib.ZLIB_RUNTIME_VERSION}.get(name, "")


SUPERBLOCK_SIZE = 96
ABSENT = (1 << 64) - 1  # the place of a missing table
_LAYOUT = struct.Struct("<4sIIIIHHHHHHQQQQQQQQ")
_PLAIN_INODES, _PLAIN_DATA, _PLAIN_FRAGMENTS, _PLAIN_XATTRS, _PLAIN_IDS = 0x1, 0x2, 0x8, 0x100, 0x800
_EXPORTABLE, _NO_XATTRS, _COMPRESSOR_OPTIONS = 0x80, 0x200, 0x400


@dataclass(frozen=True)
class Superblock:
    """The counts of a squashfs and the positions of its tables."""

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
        flags = _EXPORTABLE | _PLAIN_INODES | _PLAIN_XATTRS | _PLAIN_IDS
        if self.xattr_table == ABSENT:
            flags |= _NO_XATTRS
        if compression.options():
            flags |= _COMPRESSOR_OPTIONS
        if compression.name == "none":
            flags |= _PLAIN_DATA | _PLAIN_FRAGMENTS
        return flags


def compressor_options(compression: Compression) -> bytes:
    """The metadata block after the superblock, never compressed; empty if the compressor has no options."""
    options = compression.options()
    return struct.pack("<H", len(options) | 0x8000) + options if options else b""
