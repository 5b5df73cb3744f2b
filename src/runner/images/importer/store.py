"""A folder of squashfs files for pyxis: whose files are used, who imports, which jobs use a file, what is removed."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from runner.errors import RunnerError
from runner.images.importer.leftovers import clear_unclaimed
from runner.images.squashfs_file import index_path, is_whole, read_squashfs, sidecar
from runner.machine import files
from runner.machine.report import Report

_BEAT_SECONDS = 1.0  # how often an importing process touches its claim
_DEAD_SECONDS = 10.0  # without a touch, by the clock of the process that waits
_RECENT_SECONDS = 3600  # a `get` outside Slurm writes no lease
_YOUNG_SECONDS = 600  # a lease counts so long even if squeue does not list its job
_LEASE_SECONDS = 7 * 86400  # the same for jobs that squeue cannot know
_FULL_SECONDS = 120  # how long a folder that was too full for an image is not tried again, if it has no more space
_MORE_BYTES = 64 << 20  # other files come and go meanwhile
_REMOVAL_SECONDS = 10.0  # a mark for a removal that is older was left by a killed process
# between two looks at another process's import
_LEAST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 1.0

# errors that another folder may not have
_OF_A_FOLDER = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EIO,
    errno.ESTALE,
}
_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class Store:
    """A folder, and the only user, besides root, whose files in it are used."""

    folder: Path
    owner: int

    def danger(self, path: Path) -> str:
        """Why other users could replace the path, or what its links lead to; empty if they cannot. Raises OSError."""
        for step in (*reversed(path.parents), path):
            status = step.lstat()
            if status.st_uid not in (0, self.owner):
                return f"{step} belongs to user {status.st_uid}"
            if stat.S_ISLNK(status.st_mode):
                if danger := self.danger(step.parent / step.readlink()):
                    return danger
            elif status.st_mode & 0o022 and not (
                status.st_mode & stat.S_ISVTX and status.st_uid == 0
            ):
                who = "its group" if not status.st_mode & 0o002 else "all users"
                by = (
                    "to change that"
                    if status.st_uid == self.owner
                    else "only an administrator can change that"
                )
                return f"{who} may write to {step} ({by}: chmod go-w {step})"
        return ""

    def is_fault(self, error: RunnerError) -> bool:
        """Whether an error is one of this folder, which another folder may not have."""
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in _OF_A_FOLDER:
            return False
        return cause.filename is None or Path(os.fsdecode(cause.filename)).is_relative_to(
            self.folder
        )

    def take(self, name: str, step: str) -> Path | None:
        """The path of a whole, trusted file, leased to the job step; None if there is none."""
        path = self.folder / name
        try:
            path.lstat()  # most often it is not there, and then nothing else is looked at
            safe = (
                not path.is_symlink() and not self.danger(path) and not self.danger(sidecar(path))
            )
        except OSError:  # not there, or removed meanwhile
            return None
        if not safe or not is_whole(path) or not read_squashfs(path):
            return None
        with suppress(OSError):  # in another user's folder, only the lease is written
            if step:
                # all users may write to the folder of the leases, so other users must not be able to guess this name
                lease = (
                    self.folder
                    / "leases"
                    / f"{step}+{os.geteuid()}-{os.urandom(8).hex()}+{path.stem}"
                )
                os.close(
                    os.open(lease, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
                )
            os.utime(sidecar(path))
        mark, began = _removal_mark(path), time.monotonic()
        while mark.exists() and path.exists():
            # looked at after the lease was written: see `collect`
            if time.monotonic() - began > _REMOVAL_SECONDS:  # its process was killed
                mark.unlink(missing_ok=True)
            time.sleep(_LEAST_PAUSE_SECONDS)
        return path if path.exists() else None

    def fetch(
        self,
        name: str,
        step: str,
        make: Callable[[], object],
        report: Report,
        elsewhere: Callable[[], Path | None],
    ) -> Path:
        """The file, leased to the job step. One process makes it, and the others wait for it.

        `elsewhere`: the file of another folder, to which the process that had the claim before may have had to go.
        Raises OSError, and RunnerError if the folder was too full for the image a short time ago.
        """
        target, claim = self.folder / name, _Claim(self.folder / f".{name}.importing", report)
        began = time.monotonic()
        while not (path := self.take(name, step)):
            if not claim.end_if_dead(target):
                waited = time.monotonic() - began
                pause = min(max(waited / 10, _LEAST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
                # random: a thousand nodes should not all look at once
                time.sleep(pause * random.uniform(0.5, 1.0))
                continue
            with claim.hold() as held:
                if not held:
                    continue
                other = elsewhere()
                if other:
                    return other
                self._make(name, make, claim)
        return path

    def _make(self, name: str, make: Callable[[], object], claim: _Claim) -> None:
        """Make the file, with the claim held."""
        target, full, known, free = self.folder / name, self.folder / f".{name}.full", False, 0
        try:
            room = os.statvfs(self.folder)
            free = room.f_bavail * room.f_frsize
            known = time.time() - (files.modified(full) or 0.0) < _FULL_SECONDS
            if known and free <= int(files.text_of(full) or 0) + _MORE_BYTES:
                error = OSError(errno.ENOSPC, "it was too full for this image a short time ago")
                raise RunnerError(
                    f"cannot write {target}", str(error.strerror), "free some space there"
                ) from error
            for part in (sidecar(target), index_path(target)):
                # one that is damaged would end each import
                part.unlink(missing_ok=True)
            make()
            if not self.take(name, ""):
                if target.exists():
                    why = self.danger(target) or self.danger(sidecar(target)) or "it is incomplete"
                    raise RunnerError(f"cannot use {target}", why, f"rm {target}")
                why = "another process has removed it"
                raise RunnerError(f"cannot use {target}", why, "run the same command again")
        except RunnerError as error:
            if not claim.is_ours():
                return  # another process took over, because this one was too slow: use the other one's file
            if (
                self.is_fault(error)
                and getattr(error.__cause__, "errno", None) in _FULL
                and not known
            ):
                with suppress(OSError):
                    full.write_text(str(free))  # what was not enough
            raise

    def collect(self, limit_bytes: int, keep: set[str]) -> Iterator[Path]:
        """Remove the files that were not used for the longest time until the others fit into the limit.

        Files whose names are in `keep`, files that jobs use, and those that the importer did not make stay. A file gets
        a mark before the leases are read again: a process that takes it and does not see the mark wrote a lease before.
        """
        with suppress(FileNotFoundError):  # another process removes files too
            found = map(read_squashfs, self.folder.glob("*.sqsh"))
            made = [each for each in found if each and each.importer]
            total = sum(each.size_bytes for each in made)
            jobs = _running_jobs() if total > limit_bytes else None
            for path in sorted(
                (each.path for each in made), key=lambda path: sidecar(path).stat().st_mtime
            ):
                if total <= limit_bytes:
                    break
                if path.name in keep or self._is_used(path, jobs):
                    continue
                mark = _removal_mark(path)
                mark.touch()
                try:
                    if self._is_used(path, jobs) or not mark.exists():
                        continue
                    total -= path.stat().st_size
                    for part in (path, index_path(path), sidecar(path)):
                        part.unlink(missing_ok=True)
                finally:
                    mark.unlink(missing_ok=True)
                yield path
            self._clear()

    def _clear(self) -> None:
        """Remove what killed processes left behind, and old notes."""
        claimed = [path.name.removesuffix("importing") for path in self.folder.glob(".*.importing")]
        clear_unclaimed(self.folder, claimed, _RECENT_SECONDS)
        for pattern in (".*.removing", ".*.importing", ".*.full", "digests/*+*"):
            for left in self.folder.glob(pattern):
                if time.time() - left.lstat().st_ctime > _RECENT_SECONDS:
                    left.unlink(missing_ok=True)

    def _is_used(self, path: Path, jobs: _Jobs | None) -> bool:
        """Whether a job uses the file, or somebody has used it within the last hour."""
        return time.time() - sidecar(path).stat().st_mtime <= _RECENT_SECONDS or self._is_leased(
            path, jobs
        )

    def _is_leased(self, path: Path, jobs: _Jobs | None) -> bool:
        """Whether a job uses the file. `jobs`: those of this cluster; None if squeue does not answer."""
        for lease in self.folder.glob(f"leases/*+*+*+*+*+{path.stem}"):
            try:
                status = lease.lstat()
            except OSError:
                continue
            cluster, job = lease.name.split("+")[:2]
            here = jobs is not None and cluster == os.environ.get("SLURM_CLUSTER_NAME")
            known = (
                here and jobs is not None and (jobs.of_all_users or status.st_uid == os.geteuid())
            )
            age = time.time() - status.st_mtime
            if (jobs is not None and job in jobs.numbers) or age < (
                _YOUNG_SECONDS if known else _LEASE_SECONDS
            ):
                return True
            with suppress(OSError):
                lease.unlink()
        return False


def _removal_mark(path: Path) -> Path:
    """The mark that a process is about to remove the file, unless it is used."""
    return path.with_name(f".{path.name}.removing")


@dataclass(frozen=True)
class _Jobs:
    """The jobs that Slurm has now."""

    numbers: frozenset[str]
    of_all_users: bool
    """false: Slurm shows this user only their own jobs (PrivateData)"""


def _running_jobs() -> _Jobs | None:
    """The jobs of this cluster; None if Slurm does not answer.

    --all: also those in hidden partitions. The user's SQUEUE_* variables would leave jobs out.
    """
    from runner.machine import process  # not needed by most starts

    unset = process.without("SQUEUE_", "SLURM_CLUSTERS")
    squeue = (*unset, "squeue", "--all", "--noheader", "--format=%A")
    try:
        numbers = frozenset(process.run(squeue, timeout_seconds=30).stdout.split())
        shown = process.run(("scontrol", "show", "config"), check=False, timeout_seconds=30).stdout
    except RunnerError:
        return None
    private = next((line for line in shown.splitlines() if line.startswith("PrivateData")), "")
    return _Jobs(
        numbers, os.geteuid() == 0 or not {"jobs", "all"} & set(private.replace(",", " ").split())
    )


class _Claim:
    """The file that names the process which imports an image, and which touches it every second."""

    def __init__(self, path: Path, report: Report) -> None:
        self._path, self._report, job = path, report, os.environ.get("SLURM_JOB_ID", "none")
        self._text = f"{os.uname().nodename}, process {os.getpid()}, job {job}, since {time.strftime('%F %T')}"
        # text and last touch by another process, and since when unchanged
        self._seen, self._since = ("", 0), 0.0

    @contextmanager
    def hold(self) -> Iterator[bool]:
        """Hold the claim; yields False if another process holds it."""
        try:
            file = self._path.open("x")
        except FileExistsError:
            yield False
            return
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(_BEAT_SECONDS):
                with suppress(OSError):
                    os.utime(file.fileno())

        beating = threading.Thread(target=beat, daemon=True)
        with file:
            try:
                with suppress(OSError):  # without locks, only the touches count
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                beating.start()
                file.write(self._text)
                file.flush()
                yield True
            finally:
                ended.set()
                beating.join()
                if files.text_of(self._path) in (self._text, ""):  # empty: the disk is full
                    self._path.unlink(missing_ok=True)

    def is_ours(self) -> bool:
        """Whether no other process has taken over."""
        return files.text_of(self._path) == self._text

    def end_if_dead(self, target: Path) -> bool:
        """Remove the claim if its process has ended or no longer touches it. Returns whether no process holds it."""
        with suppress(OSError, RunnerError), self._path.open() as file:
            seen = (file.read(), os.fstat(file.fileno()).st_mtime_ns)
            if seen[0] and seen[0] != self._seen[0]:
                self._report.say(f"waiting for the import of this image by {seen[0]}")
            if seen != self._seen:
                self._seen, self._since = seen, time.monotonic()
            dead = time.monotonic() - self._since > _DEAD_SECONDS
            if seen[0].partition(",")[0] == os.uname().nodename:
                with suppress(OSError):  # the process lives, or there are no locks here
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    dead = True
            if dead:
                with files.locked(target.parent / "store", timeout_seconds=5):
                    if files.text_of(self._path) == seen[0]:  # else another process has taken over
                        target.with_name(f".{target.name}.lock").unlink(missing_ok=True)
                        self._path.unlink(missing_ok=True)
            return dead
        return not self._path.exists()
