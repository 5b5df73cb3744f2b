"""Squashfs files read back by every program that reads them, and compared entry by entry."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import tarfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from tests.images.squashfs.trees import Seen, Tree, expected, what

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


def can_mount() -> bool:
    """Whether this process may mount a squashfs by the kernel."""
    return (
        os.geteuid() == 0
        and "\tsquashfs\n" in Path("/proc/filesystems").read_text()
        and os.access("/dev/loop-control", os.W_OK)
    )


def usable_readers() -> list[str]:
    """Those that show every entry as it is: the two that unpack need root to make devices and to give files away."""
    if os.geteuid() != 0:
        return [name for name in READERS if name not in ("kernel", "unsquashfs", "rdsquashfs")]
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
        if os.geteuid() != 0:  # the kernel shows these to root alone
            xattrs = tuple(pair for pair in xattrs if not pair[0].startswith(b"trusted."))
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
        told = what(kind, content, os.major(state.st_rdev), os.minor(state.st_rdev))
        found[path] = Seen(state.st_mode, state.st_uid, state.st_gid, int(state.st_mtime), told, _xattrs(full), group)
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
    told = what(kind, content, entry.devmajor, entry.devminor)
    return Seen(kind | entry.mode, entry.uid, entry.gid, int(entry.mtime), told, xattrs, frozenset())


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
