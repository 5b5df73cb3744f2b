"""Files that killed imports left behind: found by a lock that is free again, and removed."""

from __future__ import annotations

import re
from pathlib import Path

from runner.machine import files
from runner.machine.report import Report

SUFFIX = ".import"
SQUASHFS, LAYERS, SIDECAR = "squashfs", "layers", "sidecar"
"""what an import writes into its hidden folder `.TARGET.RANDOM.import` beside the target"""
_HIDDEN = re.compile(r"\.(?P<target>.+)\.[a-z0-9_]{8}\.import")  # see folders.beside


def clear_leftovers(folder: Path, report: Report, held: Path | None = None) -> None:
    """Remove the hidden folders of imports that were killed.

    `held`: a target whose lock the caller holds. Where locks do not work, nothing is removed.
    """
    for path in sorted(folder.glob(f".*{SUFFIX}")):
        found = _HIDDEN.fullmatch(path.name)
        if found and is_stale(folder / found["target"], held) and _remove(path):
            report.say(f"removed {path.name}, which an interrupted import left behind")


def _remove(folder: Path) -> bool:
    """Remove an import's hidden folder; whether that was possible: it may be another user's, or hold other files."""
    try:
        for name in (SQUASHFS, LAYERS, SIDECAR):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
        return True
    except OSError:
        return False


def is_stale(owner: Path, held: Path | None) -> bool:
    """Whether the import that works on `owner` is gone: its lock is ours, free, or in a folder that is gone."""
    if owner == held:
        return True
    if not owner.name or not owner.parent.is_dir():
        return bool(owner.name)
    return not files.is_locked(owner)
