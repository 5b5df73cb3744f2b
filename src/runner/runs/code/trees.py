"""The code that a run sees as a tree of files, and what differs between two of them."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from runner.runs.code.snapshot import Snapshot
from runner.runs.run import Run

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Tree:
    """The files of a snapshot, or those that would go into one."""

    name: str
    files: Mapping[str, Path]
    """path in the snapshot -> where it lies"""
    since: float = float("inf")
    """a file that is newer may be the job's own, which works in this folder; infinite where no job has"""


def of_run(run: Run, count: int) -> Tree | None:
    """The tree of RUN/code, which had `count` files at launch; None where it is gone."""
    if not run.code.is_dir():
        return None
    files: dict[str, Path] = {}
    for folder, inner, names in os.walk(run.code):
        inner[:] = [name for name in inner if name != "__pycache__"]
        links = [name for name in inner if (Path(folder) / name).is_symlink()]
        for name in (*names, *links):
            path = Path(folder) / name
            files[path.relative_to(run.code).as_posix()] = path
    has_more = len(files) > count
    return Tree(run.name, files, datetime.fromisoformat(run.created).timestamp() if has_more else float("inf"))


def of_snapshot(snapshot: Snapshot) -> Tree:
    """The tree that a snapshot would become; of two sources with the same file the first one's counts."""
    return Tree(
        ".", {name: source.root / name for source in reversed(snapshot.sources) for name in source.files}
    )  # fmt: skip


def compare(left: Tree, right: Tree) -> tuple[list[tuple[str, str | None, str | None]], list[tuple[str, int]]]:
    """(file, left, right) for each file that differs, None where one has it not; and (name, count) of files that a
    run has written among its code, which are left out.
    """
    found: list[tuple[str, str | None, str | None]] = []
    written = {left.name: 0, right.name: 0}
    for name in sorted({*left.files, *right.files}):
        mine, theirs = left.files.get(name), right.files.get(name)
        if mine is not None and theirs is not None:
            said = _difference(mine, theirs)
            if said:
                found.append((name, *said))
            continue
        tree, path = (left, mine) if mine is not None else (right, theirs)
        assert path is not None
        if path.lstat().st_mtime > tree.since:
            written[tree.name] += 1
        else:
            found.append((name, "there", None) if tree is left else (name, None, "there"))
    return found, [(name, count) for name, count in written.items() if count]


def _difference(left: Path, right: Path) -> tuple[str, str] | None:
    """What two files of the same name have unlike."""
    one, two = left.lstat(), right.lstat()
    if stat.S_ISLNK(one.st_mode) or stat.S_ISLNK(two.st_mode):
        targets = tuple(f"link to {path.readlink()}" if path.is_symlink() else "a file" for path in (left, right))
        return None if targets[0] == targets[1] else (targets[0], targets[1])
    if one.st_size != two.st_size:
        return f"{one.st_size} bytes", f"{two.st_size} bytes"
    if not _same_bytes(left, right):
        return "other text", "other text"
    modes = tuple("executable" if each.st_mode & stat.S_IXUSR else "not executable" for each in (one, two))
    return None if modes[0] == modes[1] else (modes[0], modes[1])


def _same_bytes(left: Path, right: Path) -> bool:
    with left.open("rb") as one, right.open("rb") as two:
        while chunk := one.read(_CHUNK_BYTES):
            if chunk != two.read(_CHUNK_BYTES):
                return False
    return True
