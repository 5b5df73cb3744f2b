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
            raise RunnerError(
                f"the compression cannot be {text!r}",
                f"runner supports {known}",
                "use lz4 or zstd:1",
            )
        assert self.block_size in (1 << power for power in range(12, 21)), self.block_size

    @classmethod
    def parse(cls, text: str) -> Compression:
        """The compression `NAME[:LEVEL]`. Raises RunnerError for an unknown compressor or level."""
        name, colon, level = text.partition(":")
        if colon and not (level.isascii() and level.isdigit()):
            raise RunnerError(
                f"the compression cannot be {text!r}",
                "the level after the colon must be a number",
                "for example zstd:1, or lz4, which has no level",
                exit_code=2,
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
        """The compressor's options, a block after the superblock, never compressed; empty if it has none.

        They tell people the level; the kernel reads xz's dictionary size and lz4's block format (1: the legacy one).
        Source: squashfs-tools 4.5, *_wrapper.h.
        """
        packed = {
            "lz4": struct.pack("<II", 1, 0),
            "zstd": struct.pack("<I", self.effective_level or 0),
            "gzip": struct.pack("<IHH", self.effective_level or 0, 15, 0),
            "xz": struct.pack("<II", self.block_size, 0),
        }.get(self.name)
        return struct.pack("<H", len(packed) | 0x8000) + packed if packed else b""

    def compressor(self) -> Compress | None:
        """A new function that compresses a block, for one thread. None: blocks are stored plain."""
        level = self.effective_level
        if self.name == "lz4":
            import lz4.block  # slow to import

            return lambda data: lz4.block.compress(data, store_size=False)
        if level is None:
            return None
        if self.name == "zstd":
            return zstandard.ZstdCompressor(
                level=level, write_content_size=True, write_checksum=False
            ).compress
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
    return {
        "zstd": ".".join(map(str, zstandard.ZSTD_VERSION)),
        "gzip": zlib.ZLIB_RUNTIME_VERSION,
    }.get(name, "")


SUPERBLOCK = struct.Struct("<4sIIIIHHHHHHQQQQQQQQ")
ABSENT = (1 << 64) - 1  # the place of a missing table
_PLAIN_INODES = 0x1
_PLAIN_DATA = 0x2
_PLAIN_FRAGMENTS = 0x8
_PLAIN_XATTRS = 0x100
_PLAIN_IDS = 0x800
_EXPORTABLE, _NO_XATTRS, _COMPRESSOR_OPTIONS = 0x80, 0x200, 0x400


def superblock_flags(compression: Compression, *, xattrs: bool) -> int:
    """The flags of the superblock of a squashfs with or without a table of extended attributes."""
    flags = _EXPORTABLE | _PLAIN_INODES | _PLAIN_XATTRS | _PLAIN_IDS
    if not xattrs:
        flags |= _NO_XATTRS
    if compression.options():
        flags |= _COMPRESSOR_OPTIONS
    if compression.name == "none":
        flags |= _PLAIN_DATA | _PLAIN_FRAGMENTS
    return flags
