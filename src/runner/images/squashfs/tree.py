"""The tree that becomes a squashfs's tables."""

from __future__ import annotations


class Leaf:
    """Anything but a directory; a hard link's names share one Leaf."""

    __slots__ = ("data", "gid", "layer", "mode", "mtime", "uid", "xattrs")

    def __init__(
        self,
        mode: int,
        uid: int,
        gid: int,
        mtime: int,
        xattrs: tuple[tuple[bytes, bytes], ...],
        data: object,
        layer: int,
    ) -> None:
        self.mode, self.uid, self.gid, self.mtime = mode, uid, gid, mtime
        self.xattrs, self.data, self.layer = xattrs, data, layer


class Directory:
    """A directory and what it holds."""

    __slots__ = ("children", "gid", "layer", "mode", "mtime", "opaque", "uid", "xattrs")

    def __init__(
        self,
        mode: int,
        uid: int,
        gid: int,
        mtime: int,
        xattrs: tuple[tuple[bytes, bytes], ...] = (),
        layer: int = -1,
        opaque: int = -1,
    ) -> None:
        self.mode, self.uid, self.gid, self.mtime, self.xattrs = mode, uid, gid, mtime, xattrs
        self.children: dict[bytes, Leaf | Directory] = {}
        self.layer = layer
        self.opaque = opaque
