"""What flattening gives of layers that are made by hand."""

from __future__ import annotations

import io
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from runner.images.flatten.flatten import Flattener
from runner.images.layers.tar import entries
from runner.images.squashfs.data import Directory, Leaf
from tests.images.handmade import layer


@dataclass(frozen=True)
class Content:
    """What stands for a packed file's data."""

    data: bytes


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
