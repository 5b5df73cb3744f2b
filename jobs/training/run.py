"""The folder of a run: what a job writes there, the caches it uses, and the lock that keeps a second writer out."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from training import files, processes, records
from training.errors import JobError
from training.processes import Processes

PROBE = "RUNNER_PROBE"  # set in a process that only tries micro batches: which ones, as JSON (probe.py)


@dataclass(frozen=True)
class RunFolder:
    """The folder of one launch, as seen inside the container."""

    path: Path
    attempt: Path  # attempts/N of this start
    save_and_exit: Path  # if this file exists, save and leave
    cache: Path  # shared between runs; the batch script sets RUNNER_CACHE
    by_hand: bool  # started without a batch script: nothing is resumed unless asked for

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def picture(self) -> Path:
        return self.path / "loss.png"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def lock(self) -> Path:
        return self.path / "training.lock"

    @property
    def attempt_number(self) -> int:
        """N of attempts/N; 1 if the folder's name is not a number."""
        return int(self.attempt.name) if self.attempt.name.isdigit() else 1


def from_environment(environment: Mapping[str, str], script: str) -> RunFolder:
    """Return the run folder of RUNNER_RUN, RUNNER_ATTEMPT, RUNNER_SAVE_AND_EXIT and RUNNER_CACHE.

    By hand, without RUNNER_RUN, it is `runs/by-hand-SCRIPT` in the working directory.
    """
    named = environment.get("RUNNER_RUN")
    path = Path(named or Path("runs") / f"by-hand-{script}").absolute()
    attempt = Path(environment.get("RUNNER_ATTEMPT") or path / "attempts" / "1").absolute()
    flag = Path(environment.get("RUNNER_SAVE_AND_EXIT") or attempt / "save-and-exit").absolute()
    cache = Path(environment.get("RUNNER_CACHE") or path / "cache").absolute()
    return RunFolder(path, attempt, flag, cache, by_hand=not named)


def probing() -> bool:
    """Return whether this process was started to try micro batches only."""
    return PROBE in os.environ


def make(run: RunFolder) -> None:
    """Make the folders that the job writes to."""
    for folder in (run.path, run.attempt, run.cache):
        folder.mkdir(parents=True, exist_ok=True)


def note_time(run: RunFolder, peers: Processes, event: str) -> None:
    """Add `UNIX_TIME EVENT` to the attempt's `times-rank-0` in rank 0. A full disk is not an error here.

    The batch script has a file of its own, perhaps on another node: two clients of NFS lose lines that both append.
    """
    if peers.first:
        with contextlib.suppress(OSError):
            records.append_line(run.attempt / "times-rank-0", f"{time.time():.3f} {event}")


def alone(script: str) -> bool:
    """Set caches and threads for a script that is one process; return False in every rank but the first."""
    run = from_environment(os.environ, script)
    point_caches(run, os.environ)
    if int(os.environ.get("RANK", "0")) > 0:
        return False
    processes.set_threads(os.environ, processes.ALONE)
    return True


def point_caches(run: RunFolder, environment: MutableMapping[str, str]) -> None:
    """Point the caches of Hugging Face, matplotlib and compilers to folders that work in a container.

    Variables that are set stay. A home folder that already has a cache is used; in a container it is often missing,
    read-only, or gone with the container. Compiled code goes to a disk of the node, since compilers lock and write
    thousands of small files: on a shared file system that takes minutes.
    """
    home = Path(environment.get("HOME") or "/")
    fetched = run.cache / "huggingface" / "prefetched"  # written by `runner prefetch`
    if environment.get("HF_HUB_OFFLINE") == "1" and fetched.is_dir():
        environment.setdefault("HF_HOME", str(fetched.parent))
    if not (Path(environment.get("XDG_CACHE_HOME") or home / ".cache") / "huggingface").is_dir():
        environment.setdefault("HF_HOME", str(run.cache / "huggingface"))
    if not (Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "matplotlib").is_dir():
        environment.setdefault("MPLCONFIGDIR", str(run.cache / "matplotlib"))
    local = local_folder(environment)
    if local is not None:
        for variable, name in COMPILED.items():
            environment.setdefault(variable, str(local / name))


COMPILED = {
    "TORCH_EXTENSIONS_DIR": "extensions",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}


def local_folder(environment: Mapping[str, str]) -> Path | None:
    """Return this user's folder for compiled code in SLURM_TMPDIR, TMPDIR or /tmp, one per Python and torch version."""
    import importlib.metadata
    import sys

    try:
        torch = importlib.metadata.version("torch").replace("+", "-")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    for place in (environment.get("SLURM_TMPDIR"), environment.get("TMPDIR"), "/tmp"):
        if not place:
            continue
        own = Path(place) / f"runner-{os.getuid()}"
        folder = own / f"py{sys.version_info.major}{sys.version_info.minor}-torch{torch}"
        try:
            own.mkdir(mode=0o700, exist_ok=True)
            # Code is loaded from here: a folder that another user has put there is not used.
            if own.is_symlink() or own.stat().st_uid != os.getuid():
                continue
            folder.mkdir(exist_ok=True)
        except OSError:
            continue
        return folder
    return None


def take_lock(run: RunFolder) -> None:
    """Note in `training.lock` that this process, rank 0, trains in the run folder.

    Raises JobError if a process on this host still does: killing torchrun alone leaves its workers running, and a
    second start would write beside them. A process on another host cannot be seen from here, so it only gets a note.
    """
    host = socket.gethostname()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        other = json.loads(run.lock.read_text(encoding="utf-8"))
        pid = int(other["pid"])
        if other["host"] != host:
            print(
                f"note: process {pid} on {other['host']} has left its lock: if it still trains in this folder, stop it",
                flush=True,
            )
        elif pid != os.getpid() and other["started"] == _start_time(pid):
            raise JobError(
                f"process {pid} on {host} is training in {run.path}",
                f"two processes would overwrite each other's checkpoints and metrics (lock: {run.lock})",
                f"wait until process {pid} has ended, or end all ranks of that training: kill {pid}",
            )
    files.write_json(run.lock, {"host": host, "pid": os.getpid(), "started": _start_time(os.getpid())})


def release_lock(run: RunFolder) -> None:
    run.lock.unlink(missing_ok=True)


def _start_time(pid: int) -> str:
    """Return when a running process was started, in clock ticks since boot; empty if there is none. Source: proc(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
