"""Layers made by hand for tests, and what an image of them holds."""

from __future__ import annotations

import io
import stat
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runner.images.flatten.flatten import Flattener
from runner.images.layers.tar import entries
from runner.images.squashfs.tree import Directory, Leaf

TYPES = {"d": tarfile.DIRTYPE, "f": tarfile.REGTYPE, "l": tarfile.SYMTYPE, "h": tarfile.LNKTYPE, "p": tarfile.FIFOTYPE}
Operation = tuple[str, str, str, int]  # kind, path, content or target, mode and mtime


@dataclass(frozen=True)
class Content:
    """What stands for a packed file's data."""

    data: bytes


def layer(operations: Iterable[Operation | tuple[str, str] | tuple[str, str, str]]) -> bytes:
    """The tar stream of operations: (kind, path, content or target, mode and mtime).

    Kinds: d, f, l (symlink), h (hard link), p (fifo), w (whiteout of the path), o (opaque marker in the path).
    """
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for kind, path, *rest in operations:
            text, number = str(rest[0]) if rest else "", int(rest[1]) if len(rest) > 1 else 0
            parent, _, name = path.rpartition("/")
            if kind == "w":
                path = f"{parent}/.wh.{name}".lstrip("/")
            elif kind == "o":
                path = f"{path}/.wh..wh..opq".lstrip("/")
            entry = tarfile.TarInfo(path)
            entry.type = TYPES.get(kind, tarfile.REGTYPE)
            entry.mode, entry.mtime = (number & 0o777) or 0o644, number
            data = text.encode() if kind == "f" else b""
            entry.size = len(data)
            entry.linkname = text if kind in "lh" else ""
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def flattened(layers: Sequence[bytes], **options: object) -> Directory:
    """The tree of layers given bottom first, with a Content in every regular file."""
    flattener = Flattener(**options)  # type: ignore[arg-type]
    for data in reversed(layers):
        flattener.begin_layer()
        for entry, content in entries(io.BytesIO(data)):
            _fill(flattener.offer(entry), content)
        if flattener.end_layer():
            for entry, content in entries(io.BytesIO(data)):
                _fill(flattener.again(entry), content)
    return flattener.finish()


def _fill(leaf: Leaf | None, content) -> None:
    if leaf is not None:
        assert leaf.data is None, "a content is asked for once"
        leaf.data = Content(content.read())  # type: ignore[assignment]


def listing(root: Directory) -> dict[str, tuple]:
    """Every path with its type, mode, mtime, content or target, and the first of the names it shares."""
    found: dict[str, tuple] = {"": ("d", stat.S_IMODE(root.mode), root.mtime, "", "")}
    first: dict[int, str] = {}
    todo = [("", root)]
    while todo:
        place, directory = todo.pop()
        for name, node in directory.children.items():
            path = f"{place}/{name.decode()}".lstrip("/")
            if isinstance(node, Directory):
                todo.append((path, node))
                found[path] = ("d", stat.S_IMODE(node.mode), node.mtime, "", path)
                continue
            first[id(node)] = min(first.get(id(node), path), path)
            kind = {stat.S_IFREG: "f", stat.S_IFLNK: "l", stat.S_IFIFO: "p"}.get(stat.S_IFMT(node.mode), "?")
            if kind == "f":
                assert isinstance(node.data, Content), f"{path} has no content"
                text = node.data.data.decode()
            else:
                text = node.data.decode() if isinstance(node.data, bytes) else ""
            found[path] = (kind, stat.S_IMODE(node.mode), node.mtime, text, id(node))
    return {
        path: (*what[:4], first[what[4]] if isinstance(what[4], int) else what[4])
        for path, what in sorted(found.items())
    }


def shown(layers: Sequence[Sequence], **options: object) -> dict[str, str]:
    """Path -> content, "-> target" or "/" for a directory, of layers given as operations, bottom first."""
    found = listing(flattened([layer(operations) for operations in layers], **options))
    return {
        path: {"d": "/", "f": what[3], "l": f"-> {what[3]}"}.get(what[0], what[0])
        for path, what in found.items()
        if path
    }
