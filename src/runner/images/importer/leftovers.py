"""Find and remove files of killed imports, which are recognized by a lock that is free again."""

import re
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from runner.machine import files
from runner.machine.report import Report

SUFFIX = ".import"
SQUASHFS, LAYERS, SIDECAR = "squashfs", "layers", "sidecar"
"""what an import writes into its hidden folder `.TARGET.RANDOM.import` beside the target"""
_HIDDEN = re.compile(r"\.(?P<target>.+)\.[a-z0-9_]{8}\.import")  # see folders.beside


def clear_leftovers(folder: Path, report: Report, held: Path | None = None) -> None:
    """Remove the hidden folders of imports that were killed.

    `held`: a target whose lock the caller holds. If the file system has no locks, nothing is removed.
    """
    for path in sorted(folder.glob(f".*{SUFFIX}")):
        if not (found := _HIDDEN.fullmatch(path.name)):
            continue
        target = folder / found["target"]
        if (target == held or not files.is_locked(target)) and _remove(path):
            report.say(f"removed {path.name}, which an interrupted import left behind")


def clear_unclaimed(folder: Path, claimed: Collection[str], idle_seconds: float) -> None:
    """Remove the hidden folders of the importer's killed imports, also where the file system has no locks.

    `claimed`: the beginnings of the names of those whose process lives. An import writes to its folder all the time.
    """
    for path in folder.glob(f".*{SUFFIX}"):
        with suppress(OSError):
            used = max(part.stat().st_mtime for part in (path, *path.iterdir()))
            if not path.name.startswith(tuple(claimed)) and time.time() - used > idle_seconds:
                _remove(path)


def _remove(folder: Path) -> bool:
    """Remove an import's hidden folder. Returns false if another user owns it, or if it contains other files."""
    try:
        for name in (SQUASHFS, LAYERS, SIDECAR):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
        return True
    except OSError:
        return False
