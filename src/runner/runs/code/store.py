"""Code snapshots by content: launches of the same code share one copy of it, RUNS/.code/SUM, by hard links.

Only where containers see RUN/code read-only: a program without one would write into the code of other runs too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from runner.errors import RunnerError
from runner.machine import folders
from runner.runs.code import fingerprint, snapshot
from runner.runs.code.snapshot import Snapshot

STORE = ".code"
_LAUNCH_SECONDS = 3600
"""how long a copy without a link is taken for that of a launch at work"""


def take(taken: Snapshot, run_folder: Path, *, shared: bool) -> Snapshot:
    """Lay the files into RUN/code: as links to the copy by content, which is made where it is not there yet.

    Returns what was taken: without untracked files that changed meanwhile.
    """
    if not shared or not taken.content or not taken.files:
        snapshot.take(taken, run_folder)
        return taken
    store = run_folder.parent / STORE / taken.content[:32]
    if not store.is_dir():
        fresh = store.parent / f".{store.name}.{os.getpid()}.partial"
        snapshot.copy(taken, fresh)
        try:
            taken = fingerprint.unchanged(taken, fresh)
        except RunnerError:
            folders.remove(fresh)
            raise
        store = run_folder.parent / STORE / taken.content[:32]
        if store.is_dir():  # another launch of the same code was faster
            folders.remove(fresh)
        else:
            folders.move(fresh, store)
    folders.copy(taken.files, store, run_folder / "code", link=True)
    snapshot.write_diff(taken, run_folder)
    return taken


def unused(runs: Path) -> tuple[Path, ...]:
    """The copies to which no run has a link any more; those that a launch may be making are left out."""
    if not (runs / STORE).is_dir():
        return ()
    old = (path for path in (runs / STORE).iterdir() if time.time() - path.lstat().st_mtime > _LAUNCH_SECONDS)
    return tuple(path for path in old if path.is_dir() and not _has_links(path))


def _has_links(store: Path) -> bool:
    for folder, _, names in os.walk(store):
        for name in names:
            if os.lstat(f"{folder}/{name}").st_nlink > 1:
                return True
    return False
