"""What killed runs of the tests have left on this machine: found by its marks, and removed before a run."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from tests.lab import processes
from tests.lab.plugins import cache_folder

LABS = "runner-lab-*"
OTHERS = ("torchelastic_*", "runner-gate-*", "runner-fault-*", "runner-importer-*", "runner-shared-*", "runner words-*")
HOME = "runner-lab-home-"
LEAST_FREE_GB = 5
_LAB_SECONDS = 60  # a lab has its guard within a second
_OLD_SECONDS = 3 * 3600  # folders that do not name their owner: those of runs that cannot run any more
_USER = re.compile(r"lab[a-z0-9_]{8}")


def remove(top: Path) -> list[str]:
    """End labs whose test run is gone, and remove their mounts, folders and users; returns and prints each."""
    done: list[str] = []
    for folder in _ours(top, LABS):
        if not folder.name.startswith(HOME) and _is_old(folder, _LAB_SECONDS) and not _is_in_use(folder):
            processes.end_all(folder)
            done.append(str(folder))
            try:
                processes.remove(folder)
            except processes.LabError as error:
                print(f"left as it is: {error}")
    if os.geteuid() == 0:
        done += _remove_users(top)
    for folder in (folder for pattern in (*OTHERS, f"{HOME}*") for folder in _ours(top, pattern)):
        if _is_old(folder, _OLD_SECONDS):
            shutil.rmtree(folder, ignore_errors=True)
            done.append(str(folder))
    for run in _ours(top, "pytest-of-*/pytest-*"):
        if not run.is_symlink() and _is_old(run, _OLD_SECONDS) and not _is_locked(run):
            shutil.rmtree(run, ignore_errors=True)
            done.append(str(run))
    for path in _ours(Path("/dev/shm"), "*faketime*"):
        if _is_old(path, _OLD_SECONDS):
            path.unlink(missing_ok=True)
            done.append(str(path))
    for name in done:
        print(f"removed what an earlier run has left: {name}", flush=True)
    return done


def _ours(top: Path, pattern: str) -> list[Path]:
    """What this user may remove."""
    found = []
    for path in top.glob(pattern):
        try:
            if os.geteuid() in (0, path.lstat().st_uid):
                found.append(path)
        except OSError:
            continue
    return found


def _is_in_use(folder: Path) -> bool:
    """Whether the lab's guard still runs, or a user has it up by `python -m tests.lab up`."""
    note = cache_folder() / "up"
    if note.is_file() and note.read_text() == str(folder):
        return True
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(folder).encode() in words and any(word.endswith(b"guard.py") for word in words):
                return True
    return False


def _is_old(path: Path, seconds: float) -> bool:
    """Whether nothing at the top of the folder has changed for so long."""
    try:
        newest = max(entry.lstat().st_mtime for entry in (path, *(path.iterdir() if path.is_dir() else ())))
    except OSError:
        return False  # it is being removed
    return time.time() - newest > seconds


def _is_locked(run: Path) -> bool:
    """Whether pytest's lock file names a process that still runs: pytest writes its process id."""
    try:
        return processes.is_alive(int((run / ".lock").read_text()))
    except (OSError, ValueError):
        return False


def _remove_users(top: Path) -> list[str]:
    done = []
    for user in pwd.getpwall():
        home = Path(user.pw_dir)
        ours = _USER.fullmatch(user.pw_name) and home.parent == top and home.name.startswith(HOME)
        if ours and not _has_processes(user.pw_uid) and (not home.exists() or _is_old(home, _OLD_SECONDS)):
            subprocess.run(("userdel", "--force", "--remove", user.pw_name), capture_output=True, check=False)
            done.append(f"user {user.pw_name}")
    return done


def _has_processes(uid: int) -> bool:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                return True
        except OSError:
            continue
    return False


def _free_gb() -> float:
    return min(shutil.disk_usage(path).free for path in (tempfile.gettempdir(), Path.cwd())) / 1e9


def too_little_room() -> str:
    """Return why the tests cannot run here; "" if there is enough room."""
    free = _free_gb()
    return "" if free >= LEAST_FREE_GB else f"{free:.1f} GB of disk space are free; the tests need {LEAST_FREE_GB}"


def machine() -> str:
    """Return free disk space, load, and how much of the processors other machines of the host have taken."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    steal = 100 * fields[7] / max(1, sum(fields[:8]))
    return f"{_free_gb():.0f} GB free, load {os.getloadavg()[0]:.1f}, {steal:.1f} % stolen since boot"
