"""Files that become visible only when complete: NAME.partial, fsync, rename."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def unfinished(path: Path) -> Path:
    """Return a hidden name beside `path` that no other process uses.

    A process id alone is not enough: in two containers that share a cache, or on two nodes, it is often the same.
    """
    return path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.partial")


def write_text(path: Path, text: str) -> None:
    """Write a file; a reader sees the old content or the new, never a part."""
    partial = unfinished(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; it becomes `path` if the block succeeds, and is removed otherwise.

    If another job has made `path` meanwhile, that one stays: both were made from the same key.
    """
    partial = unfinished(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.mkdir()
    try:
        yield partial
        sync_tree(partial)
        with contextlib.suppress(FileExistsError, OSError):
            partial.rename(path)
        if not path.is_dir():
            raise OSError(f"{partial} could not be renamed to {path}")
        sync_folder(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def replace_folder(new: Path, path: Path) -> None:
    """Rename the folder `new` to `path`; an old one is renamed first and then removed."""
    sync_tree(new)
    old = unfinished(path).with_suffix(".old")
    if path.exists():
        path.rename(old)
    new.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def sizes(folder: Path) -> dict[str, int]:
    """Return size_bytes of every file below a folder, by relative path."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}


def sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make a rename durable; some file systems cannot sync a folder."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
