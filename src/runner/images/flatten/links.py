"""Hard links whose target follows later in the same layer, or in a layer below.

The link's own layer and the layers below it determine the target. Layers above have no influence.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from runner.errors import RunnerError
from runner.images.squashfs.tree import Directory, Leaf

# an image that needs more search steps is a denial of service
_WORK = 10_000_000
_REMEMBERED = 64 << 20  # bytes of paths above targets
_ABOVE = -1  # the layer has a file where the target's parent would be
_DIRECTORY = -2  # the layer has a directory where the target would be


class Awaited(Leaf):
    """A placeholder for a hard link's target in the tree until the target is known."""

    __slots__ = ("claimed", "known", "names", "target")

    def __init__(self, target: bytes, layer: int) -> None:
        super().__init__(0, 0, 0, 0, (), None, layer)
        self.target = target
        self.names: list[tuple[Directory, bytes]] = []  # its places in the tree
        self.claimed = False  # whether a link of a layer above needs it too
        self.known: Leaf | None = None

    def replace(self, leaf: Leaf) -> None:
        """Replace this placeholder by the target, or by another placeholder, in all its places."""
        for directory, name in self.names:
            if directory.children.get(name) is self:
                directory.children[name] = leaf
                if isinstance(leaf, Awaited):
                    leaf.names.append((directory, name))
        self.names = []


def ancestors(path: bytes) -> Iterator[bytes]:
    """The directories above a path, without the root, uppermost first."""
    at = path.find(b"/")
    while at >= 0:
        yield path[:at]
        at = path.find(b"/", at + 1)


class Work:
    """The remaining search steps that an image may cause, in addition to one per entry."""

    def __init__(self) -> None:
        self._left = _WORK

    def spend(self, steps: int) -> None:
        """Count steps. Raises RunnerError if there are too many."""
        self._left -= steps
        if self._left < 0:
            raise RunnerError(
                "cannot import the image",
                "the image has too many layers that replace large folders",
                "build the image so that fewer layers replace large folders",
            )


class LinkTargets:
    """Targets that have not been seen yet, and what the current layer says about each."""

    def __init__(self, work: Work) -> None:
        self.targets: dict[bytes, Awaited] = {}
        self._work = work
        self._below: dict[bytes, list[bytes]] = {}  # an ancestor's path: the targets below it
        self._remembered = 0
        self._found: dict[bytes, Leaf | int] = {}  # an int >= 0: the ordinal of a content that was not read
        self._hidden: set[bytes] = set()
        self._joined: list[Awaited] = []  # of layers above, with targets that links of the current layer need too

    def want(self, target: bytes, layer: int) -> Awaited:
        """The placeholder for a target that the layer has not contained so far."""
        known = self.targets.get(target)
        if known is not None and known.layer == layer:
            return known
        awaited = Awaited(target, layer)
        if known is None:
            self._watch(target)
        else:
            known.known, awaited.claimed = awaited, True
            self._joined.append(known)
        self.targets[target] = awaited
        return awaited

    def _watch(self, target: bytes) -> None:
        for ancestor in ancestors(target):
            if ancestor not in self._below:
                self._remembered += len(ancestor) + 128
            self._below.setdefault(ancestor, []).append(target)
        self._remembered += len(target) + 8
        if self._remembered > _REMEMBERED:
            raise RunnerError(
                "cannot import the image",
                "too many hard links of the image point to files of lower layers",
                "squash its layers: podman build --squash-all",
            )

    def file(self, path: bytes, found: Leaf | int) -> None:
        """The layer has a file, or a link, at `path`."""
        if path in self.targets:
            self._found[path] = found
        for target in self._under(path):
            self._found[target] = _ABOVE

    def directory(self, path: bytes) -> None:
        """The layer has a directory at `path`."""
        if path in self.targets:
            self._found[path] = _DIRECTORY
        if self._found:
            for target in self._under(path):
                if self._found.get(target) == _ABOVE:
                    del self._found[target]

    def inside(self, path: bytes) -> None:
        """The layer has something in the directory `path`."""
        self._work.spend(len(path) >> 4)
        for ancestor in ancestors(path):
            self.directory(ancestor)
        if path:
            self.directory(path)

    def hide(self, path: bytes, *, itself: bool) -> None:
        """The layer deletes `path` and everything below it from lower layers."""
        if itself and path in self.targets:
            self._hidden.add(path)
        if not path:
            self._work.spend(len(self.targets))
        self._hidden.update(self._under(path) if path else self.targets)

    def _under(self, path: bytes) -> list[bytes]:
        found = self._below.get(path, [])
        self._work.spend(len(found))
        return found

    def end_layer(self, layer: int) -> dict[int, Awaited]:
        """Resolve the links to files of this layer. Returns those to read again, by ordinal in the layer."""
        again: dict[int, Awaited] = {}
        for target in self._hidden:
            # whiteouts of a layer do not affect its own links
            if target not in self._found and target in self.targets and self.targets[target].layer != layer:
                del self.targets[target]
        settled = self._joined
        for target, found in self._found.items():
            awaited = self.targets.pop(target)
            settled.append(awaited)
            if isinstance(found, Leaf):
                awaited.known = found
            elif found >= 0:
                awaited.known = again.setdefault(found, Awaited(target, layer))
        for awaited in settled:
            leaf = _last(awaited)
            if leaf is not None and leaf is not awaited:
                awaited.replace(leaf)
        self._found, self._hidden, self._joined = {}, set(), []
        self._forget()
        return again

    def _forget(self) -> None:
        """Drop placeholders without a place, and remember the paths to the others."""
        self.targets = {target: awaited for target, awaited in self.targets.items() if awaited.names}
        self._below, self._remembered = {}, 0
        for target in self.targets:
            self._watch(target)


class Passed:
    """The hidden entries of a layer, in 16 bytes each: hash of the path, and ordinal."""

    def __init__(self) -> None:
        self.links: dict[int, Leaf] = {}  # the targets of hard links among them
        self._paths, self._ordinals = array("q"), array("Q")
        self._last: dict[int, int] = {}  # built on first use
        self._indexed = 0

    def add(self, path: bytes, ordinal: int) -> None:
        """Remember the entry."""
        self._paths.append(hash(path))
        self._ordinals.append(ordinal)

    def ordinal(self, path: bytes) -> int | None:
        """The ordinal of the last entry of that path."""
        for at in range(self._indexed, len(self._paths)):
            self._last[self._paths[at]] = self._ordinals[at]
        self._indexed = len(self._paths)
        return self._last.get(hash(path))


def _last(awaited: Awaited) -> Leaf | None:
    """The end of a chain of links; None for a circle."""
    seen: set[int] = set()
    leaf: Leaf = awaited
    while isinstance(leaf, Awaited) and leaf.known is not None:
        if id(leaf) in seen:
            return None
        seen.add(id(leaf))
        leaf = leaf.known
    return leaf
