"""Trees that tests write with our own squashfs writer, and what a reader should find in them."""

from __future__ import annotations

import hashlib
import io
import stat
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runner.images.squashfs.compression import Compression
from runner.images.squashfs.data import DataWriter, Directory, Leaf, device_number
from runner.images.squashfs.tables import write_tables


@dataclass(frozen=True)
class Node:
    """What a test puts at a path; `content` is a symlink's target too."""

    mode: int
    content: bytes = b""
    uid: int = 0
    gid: int = 0
    mtime: int = 1_700_000_000
    device: tuple[int, int] = (0, 0)
    xattrs: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True)
class Link:
    """One more name of the file at `path`."""

    path: bytes


Tree = Mapping[bytes, Node | Link]  # b"" is the root; parents that are not named are made


@dataclass(frozen=True)
class Seen:
    """What a reader finds at a path, as far as all of them can tell."""

    mode: int
    uid: int
    gid: int
    mtime: int
    what: str  # size and hash, target, or device
    xattrs: tuple[tuple[bytes, bytes], ...]
    names: frozenset[bytes]  # all hard links of it; of a directory none


def file(content: bytes = b"", mode: int = 0o644, **more: object) -> Node:
    return Node(stat.S_IFREG | mode, content, **more)  # type: ignore[arg-type]


def directory(mode: int = 0o755, **more: object) -> Node:
    return Node(stat.S_IFDIR | mode, **more)  # type: ignore[arg-type]


def symlink(target: bytes, **more: object) -> Node:
    return Node(stat.S_IFLNK | 0o777, target, **more)  # type: ignore[arg-type]


def special(kind: int, mode: int = 0o600, **more: object) -> Node:
    return Node(kind | mode, **more)  # type: ignore[arg-type]


def whole(tree: Tree) -> dict[bytes, Node | Link]:
    """The tree with its root and its missing parents."""
    found = {b"": directory(mtime=0), **tree}
    for path in tree:
        while path:
            path = path.rpartition(b"/")[0]
            found.setdefault(path, directory(mtime=0))
    return found


def expected(tree: Tree) -> dict[bytes, Seen]:
    nodes = whole(tree)
    names: dict[bytes, set[bytes]] = defaultdict(set)
    for path, node in nodes.items():
        names[node.path if isinstance(node, Link) else path].add(path)
    found = {}
    for path, node in nodes.items():
        first = path
        if isinstance(node, Link):
            first, node = node.path, nodes[node.path]
        assert isinstance(node, Node)
        kind = stat.S_IFMT(node.mode)
        group = frozenset() if kind == stat.S_IFDIR else frozenset(names[first])
        mtime = max(0, min(node.mtime, 2**32 - 1))
        told = what(kind, node.content, *node.device)
        found[path] = Seen(node.mode, node.uid, node.gid, mtime, told, tuple(sorted(node.xattrs)), group)
    return found


def what(kind: int, content: bytes, major: int, minor: int) -> str:
    if kind == stat.S_IFREG:
        return f"{len(content)} {hashlib.sha256(content).hexdigest()}"
    if kind == stat.S_IFLNK:
        return repr(content)
    return f"{major},{minor}" if kind in (stat.S_IFCHR, stat.S_IFBLK) else ""


def make(
    tree: Tree,
    target: Path,
    compression: Compression | None = None,
    *,
    threads: int = 2,
    runs: int = 1,
    seconds: int = 0,
) -> Directory:
    """Write the tree as the squashfs `target`, its contents dealt out to `runs` runs."""
    compression = compression or Compression("zstd", 1)
    nodes = whole(tree)
    made: dict[bytes, Leaf | Directory] = {}
    with target.open("wb") as out, DataWriter(out, compression, threads) as data:
        for run in range(runs):
            data.begin_run()
            for number, (path, node) in enumerate(nodes.items()):
                if isinstance(node, Node) and number % runs == run:
                    made[path] = _entry(node, data, run)
            data.end_run()
        for path in sorted(nodes):
            node = nodes[path]
            folder, _, name = path.rpartition(b"/")
            if path:
                parent = made[folder]
                assert isinstance(parent, Directory)
                parent.children[name] = made[node.path] if isinstance(node, Link) else made[path]
        root = made[b""]
        assert isinstance(root, Directory)
        write_tables(out, data, root, time=seconds, compression=compression)
    return root


def _entry(node: Node, data: DataWriter, layer: int) -> Leaf | Directory:
    kind = stat.S_IFMT(node.mode)
    if kind == stat.S_IFDIR:
        return Directory(node.mode, node.uid, node.gid, node.mtime, node.xattrs)
    held: object = None
    if kind == stat.S_IFREG:
        held = data.add(len(node.content), io.BytesIO(node.content))
    elif kind == stat.S_IFLNK:
        held = node.content
    elif kind in (stat.S_IFCHR, stat.S_IFBLK):
        held = device_number(*node.device)
    return Leaf(node.mode, node.uid, node.gid, node.mtime, node.xattrs, held, layer)  # type: ignore[arg-type]


class Zeros:
    """So many zero bytes, none of them held."""

    def __init__(self, size: int, end: bytes = b"") -> None:
        self._left, self._end = size, end

    def read(self, size: int = -1, /) -> bytes:
        taken = min(size, self._left)
        self._left -= taken
        rest, self._end = self._end[: size - taken], self._end[size - taken :]
        return bytes(taken) + rest
