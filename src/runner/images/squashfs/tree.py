"""The tree that becomes a squashfs, in as few bytes per file as Python allows."""

from __future__ import annotations

from dataclasses import dataclass, field

from runner.images.squashfs.data import FileData

Xattrs = tuple[tuple[bytes, bytes], ...]


@dataclass(slots=True, eq=False)
class Leaf:
    """Any inode but a directory. Hard links are several names for one Leaf."""

    mode: int  # with the type bits
    uid: int
    gid: int
    mtime: int  # seconds since 1970, limited to 0 to 2**32 - 1
    xattrs: Xattrs
    data: FileData | bytes | int | None  # of a file, a symlink's target, a device (see `device_number`), nothing
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
