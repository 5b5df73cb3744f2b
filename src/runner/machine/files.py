"""Atomic file writes (NAME.partial, fsync, rename), and one lock per target file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from runner.errors import RunnerError


def explain(error: OSError, what: str) -> RunnerError:
    """The RunnerError for an OSError that occurred during `what` (for example "write /x/y.sqsh")."""
    fixes = {
        errno.ENOSPC: "free some space there, or choose another folder (images: RUNNER_IMAGES, runs: RUNNER_RUNS)",
        errno.EDQUOT: "remove files, or choose another folder (images: RUNNER_IMAGES, runs: RUNNER_RUNS)",
        errno.EACCES: "ask its owner for access (ls -ld), or use a folder of your own (RUNNER_IMAGES, RUNNER_RUNS)",
        errno.EPERM: "choose a folder of your own: the system refuses this here",
        errno.EROFS: "choose a folder on a writable file system",
    }
    fix = fixes.get(error.errno or 0, "check the path and its file system: df -hT FOLDER")
    return RunnerError(
        f"cannot {what}", os.strerror(error.errno) if error.errno else str(error), fix
    )


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise the RunnerError of `explain` for an OSError in the block."""
    try:
        yield
    except OSError as error:
        raise explain(error, what) from error


@contextlib.contextmanager
def partial(target: Path) -> Iterator[Path]:
    """Yield a path to write to. On success, sync it and rename it to `target`; otherwise, remove it.

    The path contains the process id, so that it is not confused with a file that a killed process left behind.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.parent / f".{target.name}.{os.getpid()}.partial"
    try:
        yield unfinished
        publish(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def publish(unfinished: Path, target: Path, *, mask: int = 0o777) -> None:
    """Sync a finished file and rename it to `target`, on the same file system; its mode is limited to `mask`."""
    mode = stat.S_IMODE(unfinished.stat().st_mode)
    if mode & ~mask:
        unfinished.chmod(mode & mask)
    sync(unfinished)
    unfinished.replace(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to the disk."""
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

    For reading thousands of small files: `open` and Path.read_text take three times as long.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces = []
        while piece := os.read(descriptor, 1 << 16):
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        os.close(descriptor)


def text_of(path: str | Path) -> str:
    """The text of a file, without the white space around it; empty if the file cannot be read."""
    try:
        return content(str(path)).decode(errors="replace").strip()
    except OSError:
        return ""


def exists(path: str | Path) -> bool:
    """Whether a path exists, as far as this user can see.

    Path.exists raises PermissionError below a folder that the user may not enter.
    """
    return os.path.exists(path)  # noqa: PTH110


def is_file(path: str | Path) -> bool:
    """Whether a path is a file, as far as this user can see; Path.is_file raises errors as Path.exists does."""
    return os.path.isfile(path)  # noqa: PTH113


def why_denied(path: str | Path) -> str:
    """Why this user cannot read a path, which may exist; empty if they can, or if it does not exist."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def modified(path: str | Path) -> float | None:
    """The modification time of a file, in Unix seconds; None if it cannot be read."""
    try:
        return os.stat(path).st_mtime  # noqa: PTH116 (history reads 10,000 of these)
    except OSError:
        return None


def write(
    target: Path, content: str | bytes, *, mode: int = 0o666, keep_mode: bool = False
) -> None:
    """Write a whole file atomically. Raises RunnerError if it cannot be written.

    The umask limits `mode`, as for open(2). With `keep_mode`, an existing file keeps its mode.
    """
    data = content.encode() if isinstance(content, str) else content
    with explained(f"write {target}"), partial(target) as unfinished:
        # left behind by a killed process with the same process id
        unfinished.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(unfinished, flags, mode), "wb") as file:
            file.write(data)
        if keep_mode:
            unfinished.chmod(stat.S_IMODE(target.stat().st_mode))


def append(target: Path, data: bytes, offset: int) -> None:
    """Write the bytes to an existing file at the offset, and cut off what was after it. Raises OSError."""
    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with os.fdopen(os.open(target, flags), "wb") as file:
        file.truncate(offset)
        file.seek(offset)
        file.write(data)


def content_of_owners(path: Path, owners: Collection[int], limit_bytes: int) -> bytes:
    """The bytes of a regular file that belongs to one of these users (uid). Raises OSError for any other file."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with os.fdopen(os.open(path, flags), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in owners:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        if found.st_size > limit_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return file.read()


def write_new(prefix: str, suffix: str, text: str) -> Path:
    """Write a file under a new name in TMPDIR, readable by this user alone, and return its path."""
    import tempfile  # slow to load, and rarely needed

    with tempfile.NamedTemporaryFile(
        "w", prefix=prefix, suffix=suffix, delete=False, errors="backslashreplace"
    ) as file:
        file.write(text)
    return Path(file.name)


def refuse_to_replace(link: Path) -> None:
    """Raise RunnerError if `link` exists and is not a symlink."""
    if link.exists() and not link.is_symlink():
        raise RunnerError(
            f"cannot create the link {link}",
            "another file has that name, and runner deletes only files that it created",
            f"move that file away: mv {link} {link}.old",
        )


def owner(path: Path) -> str:
    """The name of the user that the file belongs to; empty for this user. Raises OSError."""
    uid = path.stat().st_uid
    if uid == os.geteuid():
        return ""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def link(name: Path, target: str) -> None:
    """Point the symlink `name` at `target` atomically. Raises RunnerError if `name` is a regular file."""
    refuse_to_replace(name)
    unfinished = name.parent / f".{name.name}.{os.getpid()}.partial"
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(target)
    unfinished.replace(name)


# Errors of flock on a file system without locks: Lustre without the mount option flock, NFS without lockd. EBADF: on
# NFS, if another user owns the lock file, so that we cannot open it for writing. Source: flock(2), "NFS details"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF)
_LOCK_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


@contextlib.contextmanager
def locked(target: Path, *, timeout_seconds: float | None = None) -> Iterator[bool]:
    """Hold the lock of `target` (the file `.NAME.lock` beside it). Waits while another process holds it.

    Yields True, or False if the file system does not support locks. The kernel releases a lock when its holder ends, so
    a lock is never stale. Raises RunnerError after the timeout.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock_path(target)
    descriptor = _open_lock(lock)
    try:
        try:
            _acquire(descriptor, lock, timeout_seconds)
            held = True
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            held = False
        yield held
    finally:
        os.close(descriptor)


def is_locked(target: Path) -> bool:
    """Whether a process holds the lock of `target`, or this cannot be determined. Does not create a lock file."""
    try:
        descriptor = os.open(_lock_path(target), os.O_RDONLY | _LOCK_FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def _lock_path(target: Path) -> Path:
    return target.parent / f".{target.name}.lock"


def _open_lock(lock: Path) -> int:
    try:
        return os.open(lock, os.O_RDWR | os.O_CREAT | _LOCK_FLAGS, 0o666)
    except PermissionError:
        # another user's lock file can be locked through a read-only descriptor
        with contextlib.suppress(FileNotFoundError):
            return os.open(lock, os.O_RDONLY | _LOCK_FLAGS)
        raise


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
                    f"another process has locked {lock}",
                    f"runner waited {timeout_seconds:.0f} s for the lock",
                    f"wait until that process exits, or stop it (to find it on this machine: fuser -v {lock})",
                ) from None
            time.sleep(0.1)
