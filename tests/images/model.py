"""What an image's layers make, said as simply as can be: applied to a dictionary, from the bottom up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT = (0o755, 0)


@dataclass(eq=False)
class Node:
    """kind: d, f, l, p, or "broken" for a hard link that leads nowhere. implicit: a directory that nothing names."""

    kind: str
    attributes: tuple[int, int] = DEFAULT
    text: str = ""
    implicit: bool = False


class Unsure(Exception):
    """The image says two things at once, and either will do."""


def parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def under(path: str, other: str) -> bool:
    return other != "" if path == "" else other.startswith(path + "/")


def remove(tree: dict[str, Node], path: str, *, itself: bool = True) -> None:
    for other in [other for other in tree if under(path, other) or (itself and other == path)]:
        del tree[other]


def own_tree(operations: Sequence, below: dict[str, Node]) -> tuple[dict[str, Node], list[str], list[str]]:
    """One layer by itself: of two entries of one path the later counts. And its whiteouts, and its opaque folders."""
    own: dict[str, Node] = {}
    pending: list[tuple[str, Node, str]] = []
    whiteouts, opaque = [], []
    for kind, path, text, number in operations:
        if kind in "wo":
            (whiteouts if kind == "w" else opaque).append(path)
            continue
        for parent in parents(path):
            if parent not in own or own[parent].kind != "d":
                own[parent] = Node("d", implicit=True)
        attributes = ((number & 0o777) or 0o644, number)
        if kind == "d":
            own[path] = Node("d", attributes)
            continue
        node = Node(kind, attributes, text)
        if kind == "h":
            if under(path, text):
                raise Unsure  # it takes the place of the directory that its target lies in
            target = own.get(text)
            node = target if target is not None else Node("pending")
            if node.kind == "d":
                raise Unsure  # refused at once, though it may not show
            if target is None:
                if any(own.get(parent, Node("d")).kind != "d" for parent in parents(text)):
                    raise Unsure
                pending.append((path, node, text))
        remove(own, path)
        own[path] = node
    settle(own, below, pending)
    return own, whiteouts, opaque


def settle(own: dict[str, Node], below: dict[str, Node], pending: list[tuple[str, Node, str]]) -> None:
    """Give links to what came later, or lies below, their target."""
    known: dict[int, Node] = {}
    for _, node, target in pending:
        if target in own:
            found = own[target]
        elif any(own.get(parent, Node("d")).kind != "d" for parent in parents(target)):
            raise Unsure
        else:
            found = below.get(target, Node("broken"))
        known[id(node)] = Node("broken") if found.kind == "d" else found
    for _, node, _ in pending:
        seen = []
        while id(node) in known and node not in seen:
            seen.append(node)
            node = known[id(node)]
        for one in seen:
            known[id(one)] = Node("broken") if node in seen else node
    for path, node in own.items():
        own[path] = known.get(id(node), node)


def apply(below: dict[str, Node], operations: Sequence) -> dict[str, Node]:
    """The tree with one more layer."""
    own, whiteouts, opaque = own_tree(operations, below)
    tree = dict(below)
    for path in whiteouts:
        remove(tree, path)
    for path in opaque:
        if path == "" or (path in tree and tree[path].kind == "d"):
            remove(tree, path, itself=False)
            if path == "":
                tree.setdefault("", below[""])
    for path in sorted(own):
        node = own[path]
        if node.kind == "d":
            if path in tree and tree[path].kind == "d":
                tree[path] = tree[path] if node.implicit else node
            else:
                remove(tree, path)
                tree[path] = node
        else:
            remove(tree, path)
            tree[path] = node
    return tree


def expected(layers: Sequence[Sequence]) -> dict[str, tuple] | None:
    """As `layers.listing`, of layers given bottom first; None where a link that shows leads nowhere."""
    tree = {"": Node("d", implicit=True)}
    for operations in layers:
        tree = apply(tree, operations)
    if any(node.kind == "broken" for node in tree.values()):
        return None
    first: dict[int, str] = {}
    for path, node in tree.items():
        first[id(node)] = min(first.get(id(node), path), path)
    return {
        path: (node.kind, *node.attributes, node.text, path if node.kind == "d" else first[id(node)])
        for path, node in sorted(tree.items())
    }
