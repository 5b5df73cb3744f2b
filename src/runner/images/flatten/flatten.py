"""Layers flattened to one tree in one pass, from the top layer down: a path is decided when it is first seen.

Rules: OCI image-spec 1.1, layer.md, and where it is silent:
- Of two entries of one path in a layer the later counts, as if the earlier had not been there.
- A whiteout or an opaque marker hides lower layers only, wherever it stands in its layer, and makes no directory.
- A directory that no layer names, but something lies in, is 0755, of root, of time 0. Otherwise it has the attributes
  of the uppermost layer that names it, unless something between replaced it.
- Below a symlink of a LOWER layer: the path's own directory replaces the symlink, as overlay (podman, docker) does;
  containerd would follow it. Below a symlink of the SAME layer: it is followed within the image's root, at most 40
  steps, as the engines' unpackers do.
- A hard link leads to what its target is in its own layer or, where that has none, in the layers below; whiteouts of
  its own layer do not count. A link to a directory, or to nothing, is refused.
- `.wh..wh.*` but for the opaque marker is AUFS's own and does not show; hard links into `.wh..wh.plnk` work.

Layers are numbered from 0, the top one.
"""

from __future__ import annotations

import stat

from runner.images.flatten.links import Awaited, Passed, Wanted, Work
from runner.images.flatten.view import IMPLICIT, PHANTOM, WHITEOUT, View, close, refused
from runner.images.layers.tar import Entry
from runner.images.squashfs.tree import Directory, Leaf, device_number

_GONE = Leaf(0, 0, 0, 0, (), None, -1)  # a name that no lower layer shows
_TIMES = 4096  # shared between files
_LATEST = (1 << 32) - 1  # what squashfs holds: unsigned seconds, ids of 32 bits
_OPAQUE, _AUFS = b".wh..wh..opq", b".wh..wh."
_TYPE, _DIRECTORY, _FILE = 0o170000, stat.S_IFDIR, stat.S_IFREG


class Flattener:
    """Takes the entries of each layer, the top layer first; gives the tree.

    owners: "root" gives everything to root, as enroot does, "keep" leaves the numbers. xattrs: "keep" takes user.*
    and security.capability (trusted.*, security.selinux and ACLs mean nothing elsewhere), "drop" none.
    """

    def __init__(self, *, owners: str = "root", xattrs: str = "keep") -> None:
        assert owners in ("root", "keep") and xattrs in ("keep", "drop"), (owners, xattrs)
        self._keep_owners, self._keep_xattrs = owners == "keep", xattrs == "keep"
        self._modes: dict[int, int] = {}
        self._times: dict[int, int] = {}
        work = Work()
        self._view = View(work)
        self._wanted = Wanted(work)
        self.root = self._view.root
        self._layer = -1

    def begin_layer(self) -> None:
        """The next layer's entries follow, in their order."""
        self._view.begin_layer()
        self._layer = self._view.layer
        self._ordinal = -1
        self._head: bytes | None = None  # the directory of the entry before; its node, and its path without symlinks
        self._directory: Directory | None = None
        self._place = b""
        self._moved = False  # whether symlinks led there
        self._whiteouts: list[tuple[Directory, bytes]] = []
        self._opaque: list[Directory] = []
        self._passed = Passed()
        self._again: dict[int, Awaited] = {}

    def offer(self, entry: Entry) -> Leaf | None:
        """The Leaf that wants the content: a file that shows, or that a hard link waits for; None: nothing to read."""
        self._ordinal += 1
        path = entry.path
        head, _, name = path.rpartition(b"/")
        if name[:4] == WHITEOUT:
            return self._mark(entry, head, name)
        if head != self._head:
            self._enter(head)
        if self._moved:
            path = self._place + b"/" + name if self._place else name
        mode = entry.mode
        if mode & _TYPE == _DIRECTORY:
            self._offer_directory(entry, name, path)
            return None
        if not name:
            raise refused("its root is no directory", path)
        directory = self._directory
        if directory is None:
            return self._pass_by(entry, path)
        node = directory.children.get(name)
        if node is not None:
            if isinstance(node, Leaf) and node.layer != self._layer:
                return self._pass_by(entry, path)
            self._head = None  # what lies below is no longer there, or not the same
            if isinstance(node, Directory) and not self._view.replace(directory, name, node):
                return self._pass_by(entry, path)
        if entry.hard_link:
            leaf = self._target(entry.target)
            if isinstance(leaf, Awaited):
                leaf.names.append((directory, name))
        else:
            leaf = self._leaf(entry)
        directory.children[name] = leaf
        if self._wanted.targets:
            self._wanted.file(path, leaf)
        return leaf if mode & _TYPE == _FILE else None

    def end_layer(self) -> bool:
        """Let whiteouts and opaque markers hide what lower layers have.

        True: a hard link wants a file whose own name is hidden, and that went by unread. Then the layer's entries are
        offered once more, to `again`.
        """
        for directory, name in self._whiteouts:
            node = directory.children.get(name)
            if node is None or (isinstance(node, Directory) and node.layer == PHANTOM):
                directory.children[name] = _GONE
            elif isinstance(node, Directory):
                close(node, self._layer)
        for directory in self._opaque:
            if directory.opaque < 0:
                directory.opaque = self._layer
        more = self._wanted.end_layer(self._layer)
        for ordinal, awaited in more.items():
            if ordinal in self._again:
                awaited.replace(self._again[ordinal])
            else:
                self._again[ordinal] = awaited
        self._again = {ordinal: awaited for ordinal, awaited in self._again.items() if awaited.names}
        self._ordinal = -1
        return bool(self._again)

    def again(self, entry: Entry) -> Leaf | None:
        """After end_layer() was true: as `offer`, for all entries of the layer once more."""
        self._ordinal += 1
        awaited = self._again.get(self._ordinal)
        if awaited is None or entry.hard_link or stat.S_ISDIR(entry.mode):
            return None
        leaf = self._leaf(entry)
        awaited.replace(leaf)
        return leaf if stat.S_ISREG(entry.mode) else None

    def finish(self) -> Directory:
        """The whole tree. Raises RunnerError where a hard link's target never came."""
        directories = [(b"", self.root)]
        while directories:
            place, directory = directories.pop()
            dropped = []
            for name, node in directory.children.items():
                if isinstance(node, Directory):
                    if node.layer == PHANTOM:
                        dropped.append(name)
                    else:
                        directories.append((place + b"/" + name, node))
                elif isinstance(node, Awaited):
                    raise refused(f"{place + b'/' + name!r} is a hard link to what is no file there", node.target)
                elif node is _GONE:
                    dropped.append(name)
            for name in dropped:
                del directory.children[name]
        return self.root

    def _offer_directory(self, entry: Entry, name: bytes, path: bytes) -> None:
        layer, parent = self._layer, self._directory
        node: Leaf | Directory | None = self.root if not path else parent.children.get(name) if parent else _GONE
        if isinstance(node, Leaf) and node.layer != layer:
            self._pass_by(entry, path)
            return
        if isinstance(node, Directory):
            self._view.reopen(node)
            if node.layer not in (IMPLICIT, layer):
                self._pass_by(entry, path)
                return
        else:
            if node is not None:
                self._head = None
            assert parent is not None
            node = self._view.new_directory(parent, name)
        node.mode, node.mtime, node.layer = entry.mode, min(max(entry.mtime, 0), _LATEST), layer
        node.uid, node.gid = self._owner(entry)
        node.xattrs = self._xattrs(entry)
        self._view.symlinks.pop(path, None)
        if self._wanted.targets:
            self._wanted.directory(path)

    def _leaf(self, entry: Entry) -> Leaf:
        mode = entry.mode
        kind = mode & _TYPE
        data: bytes | int | None = None
        if kind == stat.S_IFLNK:
            data = entry.target
        elif kind in (stat.S_IFCHR, stat.S_IFBLK):
            data = device_number(*entry.device)
        mtime = entry.mtime
        if not 0 <= mtime <= _LATEST:
            mtime = min(max(mtime, 0), _LATEST)
        uid, gid = self._owner(entry) if self._keep_owners else (0, 0)
        # an int of its own for each file would take 28 bytes, twice
        mode = self._modes.setdefault(mode, mode)
        mtime = self._times.setdefault(mtime, mtime) if len(self._times) < _TIMES else self._times.get(mtime, mtime)
        return Leaf(mode, uid, gid, mtime, self._xattrs(entry) if entry.xattrs else (), data, self._layer)

    def _owner(self, entry: Entry) -> tuple[int, int]:
        if not self._keep_owners:
            return 0, 0
        if not (0 <= entry.uid <= _LATEST and 0 <= entry.gid <= _LATEST):
            raise refused(f"there is no owner {entry.uid}:{entry.gid}", entry.path)
        return entry.uid, entry.gid

    def _xattrs(self, entry: Entry) -> tuple[tuple[bytes, bytes], ...]:
        if not self._keep_xattrs:
            return ()
        return tuple(pair for pair in entry.xattrs if pair[0].startswith(b"user.") or pair[0] == b"security.capability")

    def _enter(self, head: bytes) -> None:
        """Make `head` the present directory; where layers above hide it, there is none."""
        self._directory, self._place = self._view.walk(head, "make")
        self._head, self._moved = head, self._place != head
        if self._wanted.targets:
            self._wanted.inside(self._place)

    def _mark(self, entry: Entry, head: bytes, name: bytes) -> Leaf | None:
        """Note a whiteout or an opaque marker."""
        directory, place = (self._directory, self._place) if head == self._head else self._view.walk(head, "mark")
        if name == _OPAQUE:
            if directory is not None:
                self._opaque.append(directory)
            self._wanted.hide(place, itself=False)
            return None
        if name.startswith(_AUFS):
            return self._pass_by(entry, entry.path)
        hidden = name[len(WHITEOUT) :]
        if hidden in (b"", b".", b".."):
            raise refused("a whiteout names nothing", entry.path)
        if directory is not None:
            self._whiteouts.append((directory, hidden))
        if self._wanted.targets:
            self._wanted.hide(place + b"/" + hidden if place else hidden, itself=True)
        return None

    def _pass_by(self, entry: Entry, path: bytes) -> Leaf | None:
        """An entry that layers above hide: only hard links can want it."""
        self._passed.add(path, self._ordinal)
        self._view.symlinks.pop(path, None)
        if stat.S_ISDIR(entry.mode):
            if self._wanted.targets:
                self._wanted.directory(path)
            return None
        if stat.S_ISLNK(entry.mode):
            self._view.symlinks[path] = entry.target
        leaf: Leaf | None = None
        if entry.hard_link:
            leaf = self._passed.links[self._ordinal] = self._target(entry.target)
        awaited = self._wanted.targets.get(path)
        if leaf is None and awaited is not None and (awaited.names or awaited.claimed):
            leaf = self._leaf(entry)
        if self._wanted.targets:
            self._wanted.file(path, self._ordinal if leaf is None else leaf)
        return leaf if stat.S_ISREG(entry.mode) else None

    def _target(self, target: bytes) -> Leaf:
        """What a hard link of this layer leads to; an Awaited where that is still to come."""
        head, _, name = target.rpartition(b"/")
        directory, place = self._view.walk(head, "look")
        path = place + b"/" + name if place else name
        node = directory.children.get(name) if directory else None
        if isinstance(node, Leaf) and node.layer == self._layer:
            return node
        if not name or (isinstance(node, Directory) and self._view.is_own(node)):
            raise refused("a hard link leads to a directory", path)
        ordinal = self._passed.ordinal(path)
        if ordinal is None:
            return self._wanted.want(path, self._layer)
        link = self._passed.links.get(ordinal)
        return self._again.setdefault(ordinal, Awaited(path, self._layer)) if link is None else link
