"""The tree as one layer sees it: creates directories, follows symlinks, and leaves out what layers above hide."""

from __future__ import annotations

import stat
from typing import Literal

from runner.errors import RunnerError
from runner.images.flatten.links import Work
from runner.images.squashfs.tree import Directory, Leaf

IMPLICIT, PHANTOM = -1, -2  # values of Directory.layer: without an entry of its own; with whiteouts only
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
        self._replaced: set[int] = set()  # ids of directories of layers above where this layer has a file

    def begin_layer(self) -> None:
        """Switch to the next layer."""
        self.layer += 1
        self._made, self._aside, self.symlinks, self._replaced = set(), {}, {}, set()

    def walk(self, path: bytes, way: Literal["make", "mark", "look"]) -> tuple[Directory | None, bytes]:
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

    def _followed(self, node: Leaf | Directory | None, done: list[bytes], name: bytes) -> bytes | None:
        """The target of a symlink of this layer."""
        if isinstance(node, Leaf) and node.layer == self.layer and isinstance(node.data, bytes):
            return node.data
        if not self.symlinks:
            return None
        self._work.spend(len(done))
        return self.symlinks.get(b"/".join((*done, name)))

    def new_directory(self, parent: Directory, name: bytes, layer: int = IMPLICIT) -> Directory:
        """A new directory without an entry of its own, in its place."""
        directory = self._aside.pop((id(parent), name), None) or Directory(DEFAULT_MODE, 0, 0, 0, ())
        directory.layer = layer
        if layer != PHANTOM:
            self._made.add(id(directory))
        parent.children[name] = directory
        return directory

    def _step(self, parent: Directory, name: bytes, node: Leaf | Directory | None, way: str) -> Directory | None:
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
        named = directory.layer == self.layer or (id(directory) in self._made and directory.layer == IMPLICIT)
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
    return RunnerError(f"a layer of the image is invalid at {path[:200]!r}", why, "build the image again")
