"""Files that become visible only whole: NAME.partial, fsync, rename; a lock per target."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from runner.errors import RunnerError


def explain(error: OSError, what: str) -> RunnerError:
    """The user's version of an OSError while doing `what` ("write /x/y.sqsh")."""
    fixes = {
        errno.ENOSPC: "free some space there, or choose another folder (RUNNER_IMAGES, RUNNER_RUNS)",
        errno.EDQUOT: "the quota is used up: remove files, or choose another folder (RUNNER_IMAGES, RUNNER_RUNS)",
        errno.EACCES: "choose a folder that you may write to, or mend its mode",
        errno.EROFS: "choose a folder on a writable file system",
    }
    fix = fixes.get(error.errno or 0, "see the message above; nothing was left half-written")
    return RunnerError(f"cannot {what}", os.strerror(error.errno) if error.errno else str(error), fix)


@contextlib.contextmanager
def partial(target: Path) -> Iterator[Path]:
    """Yield the path to write to; on success it is synced and renamed to `target`, else removed.

    The partial name carries the process id, so that a left-over of a killed process is never mistaken for ours.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.parent / f".{target.name}.{os.getpid()}.partial"
    try:
        yield unfinished
        sync(unfinished)
        unfinished.replace(target)
        sync(target.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Force a file's bytes, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network file systems refuse fsync on folders; the rename itself is still atomic
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def content(path: str) -> bytes:
    """A file's bytes. Raises OSError.

    For small files by the thousand: `open` and Path.read_text take three times as long.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces = []
        while piece := os.read(descriptor, 1 << 16):
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        os.close(descriptor)


def write(target: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """Write a whole file atomically. Raises RunnerError when the disk or the folder refuses."""
    data = content.encode() if isinstance(content, str) else content
    try:
        with partial(target) as unfinished:
            unfinished.write_bytes(data)
            unfinished.chmod(mode)
    except OSError as error:
        raise explain(error, f"write {target}") from error


def link(name: Path, target: str) -> None:
    """Point the symlink `name` at `target` atomically. Raises RunnerError where `name` is a file of the user's."""
    if name.exists() and not name.is_symlink():
        raise RunnerError(
            f"cannot put the link {name} there",
            "a file that is not our symlink has this name, and we never delete what we did not make",
            f"move it away: mv {name} {name}.old",
        )
    unfinished = name.parent / f".{name.name}.{os.getpid()}.partial"
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(target)
    unfinished.replace(name)


@contextlib.contextmanager
def locked(target: Path, *, timeout_seconds: float | None = None) -> Iterator[None]:
    """Hold the lock of `target` (the file `.NAME.lock` beside it); waits for another holder.

    The kernel drops the lock with its holder, so no lock is ever stale. Raises RunnerError after the timeout:
    the work is never done without the lock.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.parent / f".{target.name}.lock"
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _acquire(descriptor, lock, timeout_seconds)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, lock: Path, timeout_seconds: float | None) -> None:
    if timeout_seconds is None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise RunnerError(
                    f"another process holds {lock}",
                    f"waited {timeout_seconds:.0f} s for it",
                    "wait for it, or end it; its lock goes with it",
                ) from None
            time.sleep(0.1)
