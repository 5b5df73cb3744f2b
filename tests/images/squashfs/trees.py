"""Trees written by our own squashfs writer, and read back by every program that reads squashfs."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import subprocess
import tarfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from runner.images.squashfs.compression import Compression
from runner.images.squashfs.data import DataWriter
from runner.images.squashfs.tables import write_tables
from runner.images.squashfs.tree import Directory, Leaf, device_number

READERS = ("unsquashfs", "sqfs2tar", "rdsquashfs", "squashfuse", "squashfuse_ll", "kernel")
# the account knows Debian's packages; the kernel's own squashfs needs root and loop devices
PARTS = {
    "unsquashfs": ("unsquashfs",),
    "sqfs2tar": ("tar2sqfs",),
    "rdsquashfs": ("tar2sqfs",),
    "squashfuse": ("squashfuse", "/dev/fuse"),
    "squashfuse_ll": ("squashfuse", "/dev/fuse"),
    "kernel": (),
}


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
        what = _what(kind, node.content, *node.device)
        found[path] = Seen(node.mode, node.uid, node.gid, mtime, what, tuple(sorted(node.xattrs)), group)
    return found


def _what(kind: int, content: bytes, major: int, minor: int) -> str:
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


def can_mount() -> bool:
    """Whether this process may mount a squashfs by the kernel."""
    return (
        os.geteuid() == 0
        and "\tsquashfs\n" in Path("/proc/filesystems").read_text()
        and os.access("/dev/loop-control", os.W_OK)
    )


def usable_readers() -> list[str]:
    return [name for name in READERS if name != "kernel" or can_mount()]


def compare(reader: str, tree: Tree, image: Path, folder: Path) -> None:
    """Read the image back and compare it with the tree, entry by entry; `folder` is an empty place for that."""
    wanted, found = expected(tree), read_back(reader, image, folder)
    if reader in ("sqfs2tar", "rdsquashfs"):  # a tar has no entry for the root, rdsquashfs leaves its mode
        del wanted[b""]
        found.pop(b"", None)
    shown = {path: as_shown(reader, path, seen) for path, seen in wanted.items()}
    differences = [path for path in sorted({*found, *shown}) if found.get(path) != shown.get(path)]
    assert not differences, [(path[:40], found.get(path), shown.get(path)) for path in differences[:3]]


_SWAPPED = {b"trusted": b"security", b"security": b"trusted", b"user": b"user"}


def as_shown(reader: str, path: bytes, seen: Seen) -> Seen:
    """With the faults that this reader has with the files of mksquashfs 4.5 too."""
    names, xattrs = seen.names, seen.xattrs
    if reader in ("rdsquashfs", "squashfuse") and names:  # every name is a file of its own
        names = frozenset({path})
    if reader == "rdsquashfs" and stat.S_ISREG(seen.mode):  # it sets the owner last, and the kernel then drops these
        xattrs = tuple(pair for pair in xattrs if pair[0] != b"security.capability")
    if reader.startswith("squashfuse"):  # 0.1.105 takes security. for trusted., and an empty value for none
        parts = [(name.partition(b"."), value) for name, value in xattrs]
        xattrs = tuple(sorted((_SWAPPED[space] + dot + name, value) for (space, dot, name), value in parts if value))
    return replace(seen, names=names, xattrs=xattrs)


def read_back(reader: str, image: Path, folder: Path) -> dict[bytes, Seen]:
    """What a reader finds in the image; `folder` is an empty place for it."""
    folder.mkdir()
    if reader == "sqfs2tar":
        return seen_in_tar(run("sqfs2tar", "--no-skip", image))
    if reader == "unsquashfs":
        run("unsquashfs", "-quiet", "-no-progress", "-dest", folder / "out", image)
        return seen_in_folder(folder / "out")
    if reader == "rdsquashfs":
        run("rdsquashfs", "-q", "--unpack-path", "/", "--unpack-root", folder / "out", "-CTOX", image)
        return seen_in_folder(folder / "out")
    with mounted(reader, image, folder):
        return seen_in_folder(folder)


def run(*command: object) -> bytes:
    done = subprocess.run([str(word) for word in command], capture_output=True, check=False)
    assert done.returncode == 0 and not done.stderr.strip(), (command, done.stderr)
    return done.stdout


@contextmanager
def mounted(reader: str, image: Path, folder: Path) -> Iterator[Path]:
    """The image, mounted at `folder` by squashfuse, squashfuse_ll or the kernel."""
    if reader == "kernel":
        run("mount", "-t", "squashfs", "-o", "loop,ro", image, folder)
    else:
        run(reader, image, folder)
    try:
        yield folder
    finally:
        # a process of the machine may still look at a new mount (an indexer); it leaves soon
        for attempt in range(20):
            if subprocess.run(("umount", str(folder)), check=attempt == 19, capture_output=True).returncode == 0:
                break
            time.sleep(0.1)


def seen_in_folder(top: Path) -> dict[bytes, Seen]:
    """Every entry below `top`, read by system calls."""
    root = os.fsencode(top)
    prefix = root + b"/"
    paths = [b""]
    for folder, folders, files in os.walk(root):
        paths += [(folder + b"/" + name).removeprefix(prefix) for name in (*folders, *files)]
    names: dict[int, set[bytes]] = defaultdict(set)
    states = {path: os.lstat(prefix + path) for path in paths}
    for path, state in states.items():
        names[state.st_ino].add(path)
    found = {}
    for path, state in states.items():
        full = prefix + path
        kind = stat.S_IFMT(state.st_mode)
        content = b""
        if kind == stat.S_IFREG:
            content = Path(os.fsdecode(full)).read_bytes()
            assert len(content) == state.st_size
        elif kind == stat.S_IFLNK:
            content = os.readlink(full)  # noqa: PTH115 - a Path cannot hold every target
        group = frozenset() if kind == stat.S_IFDIR else frozenset(names[state.st_ino])
        what = _what(kind, content, os.major(state.st_rdev), os.minor(state.st_rdev))
        found[path] = Seen(state.st_mode, state.st_uid, state.st_gid, int(state.st_mtime), what, _xattrs(full), group)
    return found


def _xattrs(path: bytes) -> tuple[tuple[bytes, bytes], ...]:
    found, names = [], []
    with suppress(OSError):  # the kernel's answer where the image has none at all
        names = os.listxattr(path, follow_symlinks=False)
    for name in names:
        with suppress(OSError):  # squashfuse lists some that it does not give
            found.append((os.fsencode(name), os.getxattr(path, name, follow_symlinks=False)))
    return tuple(sorted(found))


_TAR_KINDS = {
    tarfile.REGTYPE: stat.S_IFREG,
    tarfile.AREGTYPE: stat.S_IFREG,
    tarfile.DIRTYPE: stat.S_IFDIR,
    tarfile.SYMTYPE: stat.S_IFLNK,
    tarfile.CHRTYPE: stat.S_IFCHR,
    tarfile.BLKTYPE: stat.S_IFBLK,
    tarfile.FIFOTYPE: stat.S_IFIFO,
}


def seen_in_tar(stream: bytes) -> dict[bytes, Seen]:
    """Every entry of a tar archive; it has none for the root."""
    names: dict[bytes, set[bytes]] = defaultdict(set)
    found: dict[bytes, Seen] = {}
    firsts: dict[bytes, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(stream)) as archive:
        for entry in archive:
            path = _bytes(entry.name).strip(b"/")
            firsts[path] = _bytes(entry.linkname).strip(b"/") if entry.islnk() else path
            names[firsts[path]].add(path)
            if not entry.islnk():
                found[path] = _seen_entry(archive, entry)
    whole = {path: found[first] for path, first in firsts.items()}
    return {
        path: Seen(
            **{**vars(seen), "names": frozenset() if stat.S_ISDIR(seen.mode) else frozenset(names[firsts[path]])}
        )
        for path, seen in whole.items()
    }


def _seen_entry(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> Seen:
    kind = _TAR_KINDS[entry.type]
    held = archive.extractfile(entry) if entry.isreg() else None
    content = held.read() if held else _bytes(entry.linkname)
    prefix = "SCHILY.xattr."
    xattrs = tuple(
        sorted(
            (_bytes(key.removeprefix(prefix)), _bytes(value))
            for key, value in entry.pax_headers.items()
            if key.startswith(prefix)
        )
    )
    what = _what(kind, content, entry.devmajor, entry.devminor)
    return Seen(kind | entry.mode, entry.uid, entry.gid, int(entry.mtime), what, xattrs, frozenset())


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
