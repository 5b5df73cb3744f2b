"""Whether there is room for a run where it writes: on the file system, and in this user's quota."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from runner.doctor import storage
from runner.errors import RunnerError

_LEAST_BYTES, _LEAST_FILES = 64 << 20, 1000


def check(folder: Path) -> tuple[str, ...]:
    """Warnings of a quota that is nearly used up. Raises RunnerError where the file system of the runs is full."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    _check_file_system(folder, there)
    with suppress(RunnerError):  # nobody can say
        found = storage.quota_of_folder(there)
        if found and found.nearly_used_up:
            return (f"your quota is nearly used up, and the job may fail to save: {found.text} (runner gc)",)
    return ()


def _check_file_system(folder: Path, there: Path) -> None:
    try:
        room = os.statvfs(there)
    except OSError:
        return
    free, full = room.f_bavail * room.f_frsize, room.f_files > 0 and room.f_favail < _LEAST_FILES
    if free < _LEAST_BYTES or full:
        raise RunnerError(
            f"there is no room for a run in {folder}",
            f"{free >> 20} MiB and {room.f_favail} files are free there: the job could not save",
            "remove what is not needed (runner gc, old checkpoints), or name another folder: export RUNNER_RUNS=FOLDER",
        )
