"""Flatten layers to one tree in one pass, from the top layer down. The first entry for a path wins.

Rules: OCI image-spec 1.1, layer.md. Where the specification does not define the result:
- If a layer has two entries for a path, the later one applies.
- A whiteout or an opaque marker hides lower layers only, whatever its position, and creates no directory.
- A directory without an entry of its own is 0755, of root, at time 0. Otherwise it has the attributes of the uppermost
  layer that names it, unless a layer in between replaced it.
- Below a symlink of a LOWER layer: the path's own directory replaces the symlink, as overlay (podman, docker) does;
  containerd would follow it. A symlink of the SAME layer is followed inside the image's root, at most 40 steps, as
  the engines' unpackers do.
- The target of a hard link is searched in its own layer, then in the layers below; whiteouts of its own layer do not
  count. A link to a directory, or to nothing, is refused.
- `.wh..wh.*`, except the opaque marker, is AUFS metadata and hidden; hard links into `.wh..wh.plnk` work.

Layers are numbered from 0, the top one.
"""

import stat

from runner.images.flatten.view import (
    IMPLICIT,
    PHANTOM,
    WHITEOUT,
    Awaited,
    LinkTargets,
    Passed,
    View,
    Work,
    close,
    refused,
)
from runner.images.layers.tar import Entry
from runner.images.layers.tar_fields import shown
from runner.images.squashfs.data import Directory, Leaf, device_number

# a name that hides lower layers
_GONE = Leaf(mode=0, uid=0, gid=0, mtime=0, xattrs=(), data=None, layer=-1)
_LINKS = 40  # as Linux
_TIMES = 4096  # shared between files
_LATEST = (1 << 32) - 1  # limits of squashfs: unsigned seconds and ids of 32 bits
_OPAQUE, _AUFS = b".wh..wh..opq", b".wh..wh."
_TYPE, _DIRECTORY, _FILE = 0o170000, stat.S_IFDIR, stat.S_IFREG


class Flattener:
    """Takes the entries of each layer, the top layer first, and builds the tree.

    owners: "root" makes root the owner of everything, as enroot does; "keep" keeps the ids. xattrs: "keep" keeps user.*
    and security.capability (trusted.*, security.selinux and ACLs are useless on other machines); "drop" drops all.
    """

    def __init__(self, *, owners: str = "root", xattrs: str = "keep") -> None:
        assert owners in ("root", "keep") and xattrs in ("keep", "drop"), (owners, xattrs)
        self._keep_owners, self._keep_xattrs = owners == "keep", xattrs == "keep"
        self._modes: dict[int, int] = {}
        self._times: dict[int, int] = {}
        work = Work()
        self._view = View(work)
        self._wanted = LinkTargets(work)
        self.root = self._view.root
        self._layer = -1

    def begin_layer(self) -> None:
        """Start the next layer; its entries follow in order."""
        self._view.begin_layer()
        self._layer = self._view.layer
        self._ordinal = -1
        self._head: bytes | None = (
            None  # the directory of the entry before; its node, and its path without symlinks
        )
        self._directory: Directory | None = None
        self._place = b""
        self._moved = False  # whether symlinks led there
        self._whiteouts: list[tuple[Directory, bytes]] = []
        self._opaque: list[Directory] = []
        self._passed = Passed()
        self._again: dict[int, Awaited] = {}

    def offer(self, entry: Entry) -> Leaf | None:
        """The Leaf that needs this entry's content: a visible file, or the target of a hard link; None: skip it."""
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
            raise refused("the image's root is not a directory", path)
        directory = self._directory
        if directory is None:
            return self._pass_by(entry, path)
        node = directory.children.get(name)
        if node is not None:
            if isinstance(node, Leaf) and node.layer != self._layer:
                return self._pass_by(entry, path)
            self._head = None  # the directory below may have been replaced
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
        """Apply whiteouts and opaque markers to lower layers.

        Returns true if a hard link needs a file whose own name is hidden, so that it was not read. Then pass the
        layer's entries once more, to `again`.
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
        self._again = {
            ordinal: awaited for ordinal, awaited in self._again.items() if awaited.names
        }
        self._ordinal = -1
        return bool(self._again)

    def again(self, entry: Entry) -> Leaf | None:
        """As `offer`, for the second pass over a layer after end_layer() returned true."""
        self._ordinal += 1
        awaited = self._again.get(self._ordinal)
        if awaited is None or entry.hard_link or stat.S_ISDIR(entry.mode):
            return None
        leaf = self._leaf(entry)
        awaited.replace(leaf)
        return leaf if stat.S_ISREG(entry.mode) else None

    def finish(self) -> Directory:
        """The whole tree. Raises RunnerError if the target of a hard link is missing."""
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
                    raise refused(
                        f"{shown(place + b'/' + name)} is a hard link to something else than a file",
                        node.target,
                    )
                elif node is _GONE:
                    dropped.append(name)
            for name in dropped:
                del directory.children[name]
        return self.root

    def place(self, path: bytes, leaf: Leaf) -> None:
        """Put a file into the finished tree. Links on the way are followed inside the image's root, so that the rest of
        the folder that they lead to stays visible; what has the file's name is replaced."""
        head, _, name = path.rpartition(b"/")
        trail, todo, links = [self.root], head.split(b"/")[::-1], 0
        while todo:
            step = todo.pop()
            if step in (b"", b".", b".."):
                trail = trail[:-1] or [self.root] if step == b".." else trail
                continue
            node = trail[-1].children.get(step)
            if isinstance(node, Leaf) and isinstance(node.data, bytes) and links < _LINKS:
                links += 1
                todo += node.data.split(b"/")[::-1]
                trail = [self.root] if node.data.startswith(b"/") else trail
            else:
                if not isinstance(node, Directory):
                    node = self._view.new_directory(trail[-1], step)
                trail.append(node)
        trail[-1].children[name] = leaf

    def _offer_directory(self, entry: Entry, name: bytes, path: bytes) -> None:
        layer, parent = self._layer, self._directory
        node: Leaf | Directory | None
        if not path:
            node = self.root
        elif parent:
            node = parent.children.get(name)
        else:
            node = _GONE
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
        # share ints: each new one takes 28 bytes
        mode = self._modes.setdefault(mode, mode)
        mtime = (
            self._times.setdefault(mtime, mtime)
            if len(self._times) < _TIMES
            else self._times.get(mtime, mtime)
        )
        return Leaf(
            mode=mode,
            uid=uid,
            gid=gid,
            mtime=mtime,
            xattrs=self._xattrs(entry) if entry.xattrs else (),
            data=data,
            layer=self._layer,
        )

    def _owner(self, entry: Entry) -> tuple[int, int]:
        if not self._keep_owners:
            return 0, 0
        if not (0 <= entry.uid <= _LATEST and 0 <= entry.gid <= _LATEST):
            raise refused(f"owner {entry.uid}:{entry.gid} does not fit into 32 bits", entry.path)
        return entry.uid, entry.gid

    def _xattrs(self, entry: Entry) -> tuple[tuple[bytes, bytes], ...]:
        if not self._keep_xattrs:
            return ()
        return tuple(
            pair
            for pair in entry.xattrs
            if pair[0].startswith(b"user.") or pair[0] == b"security.capability"
        )

    def _enter(self, head: bytes) -> None:
        """Make `head` the current directory; None if layers above hide it."""
        self._directory, self._place = self._view.walk(head, "make")
        self._head, self._moved = head, self._place != head
        if self._wanted.targets:
            self._wanted.inside(self._place)

    def _mark(self, entry: Entry, head: bytes, name: bytes) -> Leaf | None:
        """Record a whiteout or an opaque marker."""
        if head == self._head:
            directory, place = self._directory, self._place
        else:
            directory, place = self._view.walk(head, "mark")
        if name == _OPAQUE:
            if directory is not None:
                self._opaque.append(directory)
            self._wanted.hide(place, itself=False)
            return None
        if name.startswith(_AUFS):
            return self._pass_by(entry, entry.path)
        hidden = name[len(WHITEOUT) :]
        if hidden in (b"", b".", b".."):
            raise refused("a whiteout has no name", entry.path)
        if directory is not None:
            self._whiteouts.append((directory, hidden))
        if self._wanted.targets:
            self._wanted.hide(place + b"/" + hidden if place else hidden, itself=True)
        return None

    def _pass_by(self, entry: Entry, path: bytes) -> Leaf | None:
        """An entry that layers above hide: only hard links can need it."""
        if entry.hard_link and entry.target == entry.path:
            return None  # no file: it cannot be the target of another link
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
        """The target of a hard link of this layer; an Awaited if it has not been seen yet."""
        head, _, name = target.rpartition(b"/")
        directory, place = self._view.walk(head, "look")
        path = place + b"/" + name if place else name
        node = directory.children.get(name) if directory else None
        if isinstance(node, Leaf) and node.layer == self._layer:
            return node
        if not name or (isinstance(node, Directory) and self._view.is_own(node)):
            raise refused("a hard link points to a directory", path)
        ordinal = self._passed.ordinal(path)
        if ordinal is None:
            return self._wanted.want(path, self._layer)
        link = self._passed.links.get(ordinal)
        return self._again.setdefault(ordinal, Awaited(path, self._layer)) if link is None else link
