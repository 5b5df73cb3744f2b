"""Trees as values: what a folder, a squashfs file or a tar holds, entry by entry, to be compared."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import subprocess
import tarfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO

KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "symlink",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}
TAR_KINDS = {
    tarfile.DIRTYPE: "folder",
    tarfile.SYMTYPE: "symlink",
    tarfile.CHRTYPE: "character device",
    tarfile.BLKTYPE: "block device",
    tarfile.FIFOTYPE: "fifo",
}
# what file systems add of their own to a mounted or unpacked tree
FOREIGN_XATTRS = ("trusted.overlay.", "security.selinux", "system.posix_acl", "user.overlay.")


@dataclass(frozen=True)
class Node:
    """One path of a tree."""

    kind: str
    mode: int  # permission bits, with set-uid, set-gid and sticky
    owner: tuple[int, int]
    mtime: int
    size: int = 0  # of a file
    content: str = ""  # sha256 of a file's bytes
    target: bytes = b""  # of a symlink
    device: tuple[int, int] = (0, 0)
    xattrs: tuple[tuple[str, bytes], ...] = ()
    links: frozenset[bytes] = frozenset()  # all names of the file, where it has more than one


Tree = dict[bytes, Node]  # by path without leading slash, b"" is the root


def walk(folder: Path) -> Tree:
    """The tree in a folder, mounted or unpacked."""
    top = os.fsencode(folder)
    groups: dict[tuple[int, int], set[bytes]] = defaultdict(set)
    found: dict[bytes, tuple[Node, tuple[int, int]]] = {}

    def visit(path: bytes, name: bytes) -> None:
        status = os.lstat(path)
        same = (status.st_dev, status.st_ino)
        if not stat.S_ISDIR(status.st_mode) and status.st_nlink > 1:
            groups[same].add(name)
        found[name] = (_node(path, status), same)
        if stat.S_ISDIR(status.st_mode):
            for child in os.listdir(path):  # noqa: PTH208 (bytes)
                visit(path + b"/" + child, name + b"/" + child if name else child)

    visit(top, b"")
    return {name: replace(node, links=_group(groups.get(same, ()))) for name, (node, same) in found.items()}


def _node(path: bytes, status: os.stat_result) -> Node:
    kind, content, size = KINDS[stat.S_IFMT(status.st_mode)], "", 0
    device = (os.major(status.st_rdev), os.minor(status.st_rdev)) if kind.endswith("device") else (0, 0)
    if kind == "file":
        size = status.st_size
        with open(path, "rb") as stream:  # noqa: PTH123 (bytes)
            content = hashlib.file_digest(stream, "sha256").hexdigest()
    return Node(
        kind,
        stat.S_IMODE(status.st_mode) if kind != "symlink" else 0o777,
        (status.st_uid, status.st_gid),
        int(status.st_mtime // 1),
        size,
        content,
        os.readlink(path) if kind == "symlink" else b"",  # noqa: PTH115 (bytes)
        device,
        tuple(_xattrs(path)),
    )


def _xattrs(path: bytes) -> Iterator[tuple[str, bytes]]:
    try:
        names = sorted(os.listxattr(path, follow_symlinks=False))
    except OSError as error:
        if error.errno != errno.ENOTSUP:  # squashfuse's answer for a file system without a table of xattrs
            raise
        return
    for name in names:
        if not name.startswith(FOREIGN_XATTRS):
            yield name, os.getxattr(path, name, follow_symlinks=False)


def _group(names: set[bytes] | tuple[()]) -> frozenset[bytes]:
    return frozenset(names) if len(names) > 1 else frozenset()


def from_tar(stream: IO[bytes]) -> Tree:
    """The tree in a tar stream that says each path once."""
    found: Tree = {}
    groups: dict[bytes, set[bytes]] = defaultdict(set)
    with tarfile.open(fileobj=stream, mode="r|", errors="surrogateescape") as tar:
        for member in tar:
            name = os.fsencode(member.name).removeprefix(b"./").strip(b"/").removeprefix(b".")
            if member.islnk():
                groups[os.fsencode(member.linkname).removeprefix(b"./").strip(b"/")].add(name)
            else:
                found[name] = _from_member(tar, member)
    for first, others in groups.items():
        links = frozenset({first, *others})
        found.update({name: replace(found[first], links=links) for name in links})
    return found


def _from_member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Node:
    kind = TAR_KINDS.get(member.type, "file")
    content = ""
    if kind == "file":
        stream = tar.extractfile(member)
        assert stream is not None
        content = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
    xattrs = (
        (name.removeprefix("SCHILY.xattr."), os.fsencode(value))
        for name, value in member.pax_headers.items()
        if name.startswith("SCHILY.xattr.")
    )
    return Node(
        kind,
        member.mode & 0o7777 if kind != "symlink" else 0o777,
        (member.uid, member.gid),
        int(member.mtime // 1),
        member.size if kind == "file" else 0,
        content,
        os.fsencode(member.linkname) if kind == "symlink" else b"",
        (member.devmajor, member.devminor) if kind.endswith("device") else (0, 0),
        tuple(sorted(xattrs)),
    )


def by_kernel(squashfs: Path, folder: Path) -> Tree:
    """The tree as the kernel's own squashfs shows it."""
    with mounted(squashfs, folder, "mount", "-t", "squashfs", "-o", "loop,ro"):
        return walk(folder)


def by_squashfuse(squashfs: Path, folder: Path) -> Tree:
    """The tree as squashfuse shows it."""
    with mounted(squashfs, folder, "squashfuse"):
        return _exchanged(walk(folder))


def by_squashfuse_ll(squashfs: Path, folder: Path) -> Tree:
    """The tree as squashfuse_ll shows it."""
    with mounted(squashfs, folder, "squashfuse_ll"):
        return _exchanged(walk(folder))


def _exchanged(tree: Tree) -> Tree:
    """squashfuse (0.1.104, xattr.c) names security.* trusted.* and the other way round."""
    other = {"security": "trusted", "trusted": "security"}

    def renamed(name: str) -> str:
        first, _, rest = name.partition(".")
        return f"{other.get(first, first)}.{rest}"

    return {
        path: replace(node, xattrs=tuple(sorted((renamed(name), value) for name, value in node.xattrs)))
        for path, node in tree.items()
    }


def by_unsquashfs(squashfs: Path, folder: Path) -> Tree:
    """The tree as unsquashfs unpacks it."""
    argv = ("unsquashfs", "-quiet", "-no-progress", "-xattrs", "-dest", str(folder / "root"), str(squashfs))
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return walk(folder / "root")


def by_sqfs2tar(squashfs: Path, folder: Path) -> Tree:
    """The tree as squashfs-tools-ng writes it into a tar."""
    argv = ("sqfs2tar", "--root-becomes", ".", str(squashfs))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=folder.parent) as child:
        assert child.stdout is not None
        found = from_tar(child.stdout)
    assert child.returncode == 0
    return found


READERS: Mapping[str, Callable[[Path, Path], Tree]] = {
    "kernel": by_kernel,
    "squashfuse": by_squashfuse,
    "squashfuse_ll": by_squashfuse_ll,
    "unsquashfs": by_unsquashfs,
    "sqfs2tar": by_sqfs2tar,
}


@contextmanager
def mounted(squashfs: Path, folder: Path, *command: str) -> Iterator[Path]:
    """A squashfs file mounted on a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run((*command, str(squashfs), str(folder)), check=True)
    try:
        yield folder
    finally:
        while subprocess.run(("umount", str(folder)), capture_output=True, check=False).returncode != 0:
            time.sleep(0.05)


def differences(one: Tree, other: Tree, *, without: frozenset[str] = frozenset()) -> list[str]:
    """Each difference as a line; `without` names fields of Node that are not compared."""
    said = [f"only in the first: {name!r} {one[name].kind}" for name in sorted(one.keys() - other.keys())]
    said += [f"only in the second: {name!r} {other[name].kind}" for name in sorted(other.keys() - one.keys())]
    for name in sorted(one.keys() & other.keys()):
        for field in fields(Node):
            first, second = getattr(one[name], field.name), getattr(other[name], field.name)
            if first != second and field.name not in without:
                said.append(f"{name!r} {field.name}: {first!r} != {second!r}")
    return said
