"""The tree as one layer sees it, without what layers above hide; and hard links whose target has not been seen yet."""

import stat
from array import array
from collections.abc import Iterator
from typing import Literal

from runner.errors import RunnerError
from runner.images.layers.tar_fields import shown
from runner.images.squashfs.data import Directory, Leaf

# an image that needs more search steps is a denial of service
_WORK = 10_000_000
_REMEMBERED = 64 << 20  # bytes of paths above targets
_ABOVE = -1  # the layer has a file where the target's parent would be
_DIRECTORY = -2  # the layer has a directory where the target would be


class Awaited(Leaf):
    """A placeholder for a hard link's target in the tree until the target is known."""

    __slots__ = ("claimed", "known", "names", "target")

    def __init__(self, target: bytes, layer: int) -> None:
        super().__init__(mode=0, uid=0, gid=0, mtime=0, xattrs=(), data=None, layer=layer)
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
                "squash its layers: podman build --squash-all",
            )


class LinkTargets:
    """Targets that have not been seen yet, and what the current layer says about each.

    They follow later in the same layer, or in a layer below: layers above have no influence on a link's target.
    """

    def __init__(self, work: Work) -> None:
        self.targets: dict[bytes, Awaited] = {}
        self._work = work
        self._below: dict[bytes, list[bytes]] = {}  # an ancestor's path: the targets below it
        self._remembered = 0
        # an int >= 0: the ordinal of a content that was not read
        self._found: dict[bytes, Leaf | int] = {}
        self._hidden: set[bytes] = set()
        # of layers above, with targets that links of the current layer need too
        self._joined: list[Awaited] = []

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
            if (
                target not in self._found
                and target in self.targets
                and self.targets[target].layer != layer
            ):
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
        # drop placeholders without a place, and remember the paths to the others
        self.targets = {
            target: awaited for target, awaited in self.targets.items() if awaited.names
        }
        self._below, self._remembered = {}, 0
        for target in self.targets:
            self._watch(target)
        return again


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


# values of Directory.layer: without an entry of its own; with whiteouts only
IMPLICIT, PHANTOM = -1, -2
WHITEOUT = b".wh."
DEFAULT_MODE = stat.S_IFDIR | 0o755
_STEPS = 40  # as Linux, namei.h, MAXSYMLINKS


class View:
    """The tree for the entries of the current layer."""

    def __init__(self, work: Work) -> None:
        self.root = Directory(DEFAULT_MODE, 0, 0, 0, ())
        self.layer = -1
        self.symlinks: dict[bytes, bytes] = {}  # symlinks of this layer that layers above hide
        self._work = work
        self._made: set[int] = set()  # ids of the directories that this layer created
        # by parent and name: directories with only whiteouts of layers above, where this layer has a file
        self._aside: dict[tuple[int, bytes], Directory] = {}
        # ids of directories of layers above where this layer has a file
        self._replaced: set[int] = set()

    def begin_layer(self) -> None:
        """Switch to the next layer."""
        self.layer += 1
        self._made, self._aside, self.symlinks, self._replaced = set(), {}, {}, set()

    def walk(
        self, path: bytes, way: Literal["make", "mark", "look"]
    ) -> tuple[Directory | None, bytes]:
        """The directory at a path and its path without symlinks; None if layers above hide it.

        "make" creates missing directories, "mark" creates them only for whiteouts, "look" creates none.
        """
        trail = [self.root]
        done: list[bytes] = []
        todo = path.split(b"/")[::-1] if path else []
        steps = 0
        while todo:
            if 0 <= trail[-1].opaque < self.layer:
                return None, b"/".join((*done, *todo[::-1])) if steps else path
            name = todo.pop()
            if name in (b"", b".", b".."):  # of a symlink's target
                if name == b".." and done:
                    done.pop()
                    trail.pop()
                continue
            node = trail[-1].children.get(name)
            target = self._followed(node, done, name)
            if target is not None:
                steps += 1
                if steps > _STEPS:
                    raise refused("too many levels of symlinks", path)
                todo += target.split(b"/")[::-1]
                self._work.spend(len(todo))
                if target[:1] == b"/":
                    trail, done = [self.root], []
                continue
            directory = self._step(trail[-1], name, node, way)
            if directory is None:
                return None, b"/".join((*done, name, *todo[::-1])) if steps else path
            trail.append(directory)
            done.append(name)
        hidden = 0 <= trail[-1].opaque < self.layer
        return None if hidden else trail[-1], b"/".join(done) if steps else path

    def _followed(
        self, node: Leaf | Directory | None, done: list[bytes], name: bytes
    ) -> bytes | None:
        """The target of a symlink of this layer."""
        if isinstance(node, Leaf) and node.layer == self.layer and isinstance(node.data, bytes):
            return node.data
        if not self.symlinks:
            return None
        self._work.spend(len(done) >> 4)  # every link of a deep folder comes here
        return self.symlinks.get(b"/".join((*done, name)))

    def new_directory(self, parent: Directory, name: bytes, layer: int = IMPLICIT) -> Directory:
        """A new directory without an entry of its own, in its place."""
        directory = self._aside.pop((id(parent), name), None) or Directory(
            DEFAULT_MODE, 0, 0, 0, ()
        )
        directory.layer = layer
        if layer != PHANTOM:
            self._made.add(id(directory))
        parent.children[name] = directory
        return directory

    def _step(
        self, parent: Directory, name: bytes, node: Leaf | Directory | None, way: str
    ) -> Directory | None:
        """The directory `name`, created if needed; None if this layer cannot see one."""
        if isinstance(node, Directory):
            if way == "make":
                self.reopen(node)
            elif node.opaque == self.layer:
                return None  # a file of this layer
            return node
        if name[:4] == WHITEOUT or way == "look":
            return None
        if node is not None and (node.layer != self.layer or way == "mark"):
            return None
        return self.new_directory(parent, name, IMPLICIT if way == "make" else PHANTOM)

    def reopen(self, directory: Directory) -> None:
        """Make a directory visible that only had whiteouts, or that a file of the same layer replaced."""
        self._replaced.discard(id(directory))
        if directory.layer == PHANTOM:
            directory.layer = IMPLICIT
            self._made.add(id(directory))
        if directory.opaque == self.layer:
            directory.opaque = -1
            if directory.layer == self.layer:
                directory.layer = IMPLICIT

    def replace(self, parent: Directory, name: bytes, directory: Directory) -> bool:
        """Replace the directory's content of this and lower layers by a file; whether the file is visible."""
        if directory.opaque == self.layer:
            return False
        own = directory.layer == PHANTOM or id(directory) in self._made
        self._prune(directory)
        if own:
            self._aside[id(parent), name] = directory
        else:
            close(directory, self.layer)
            self._replaced.add(id(directory))
        return own

    def is_own(self, directory: Directory) -> bool:
        """Whether this layer, so far, has a directory there."""
        named = directory.layer == self.layer or (
            id(directory) in self._made and directory.layer == IMPLICIT
        )
        return named and directory.opaque != self.layer and id(directory) not in self._replaced

    def _prune(self, directory: Directory) -> None:
        """Remove what this layer added to a directory; names that layers above hide remain hidden."""
        directories = [directory]
        while directories:
            directory = directories.pop()
            self._work.spend(len(directory.children) + 1)
            if id(directory) in self._made:
                self._made.remove(id(directory))
                _make_default(directory, PHANTOM)
            elif directory.layer == self.layer:
                _make_default(directory, IMPLICIT)
            for name, node in list(directory.children.items()):
                if isinstance(node, Directory):
                    directories.append(node)
                elif node.layer == self.layer:
                    del directory.children[name]


def close(directory: Directory, layer: int) -> None:
    """Hide everything of lower layers in a directory, content and attributes."""
    if directory.opaque < 0:
        directory.opaque = layer
    if directory.layer == IMPLICIT:
        directory.layer = layer


def _make_default(directory: Directory, layer: int) -> None:
    directory.mode, directory.uid, directory.gid = DEFAULT_MODE, 0, 0
    directory.mtime, directory.xattrs, directory.layer = 0, (), layer


def refused(why: str, path: bytes) -> RunnerError:
    """The error for an invalid layer."""
    return RunnerError(
        f"a layer of the image is invalid at {shown(path)}", why, "build the image again"
    )
