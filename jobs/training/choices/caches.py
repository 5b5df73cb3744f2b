"""Where compiled code is kept: on the node's own disk, since a shared file system makes it slow and locks it wrongly.

torch builds extensions under a lock file, Triton and Inductor write thousands of small files; on NFS or Lustre that
takes minutes, and ranks of other nodes wait for locks that are not seen or never go away.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterable, MutableMapping
from pathlib import Path

SHARED = frozenset(
    ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "afs", "panfs", "pvfs2", "wekafs", "9p", "dvs")
)
VARIABLES = {
    "TORCH_EXTENSIONS_DIR": "extensions",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}


def point(environment: MutableMapping[str, str]) -> tuple[str, ...]:
    """Point the caches that the user has not set to a folder of the node; return a warning for each that is shared.

    The folder is the user's own, and one for each Python and torch: an extension of another would not load.
    """
    warnings = []
    base = local_folder(environment)
    for variable, name in VARIABLES.items():
        given = environment.get(variable)
        if given is None and base is not None:
            environment[variable] = str(base / name)
        elif given is not None and file_system(Path(given)) in SHARED:
            kind = file_system(Path(given))
            warnings.append(f"{variable}={given} is on {kind}: compiled code belongs on a disk of the node; unset it")
    return tuple(warnings)


def local_folder(environment: MutableMapping[str, str]) -> Path | None:
    """Return a folder of ours in the first place of the node that takes one; None where there is none."""
    named = (environment.get("SLURM_TMPDIR"), environment.get("TMPDIR"), "/tmp", "/dev/shm")
    for folder in (Path(name) for name in named if name):
        if not folder.is_dir() or file_system(folder) in SHARED:
            continue
        own = folder / f"runner-{os.getuid()}"
        try:
            own.mkdir(mode=0o700, exist_ok=True)
            # Code is loaded from here, so a folder that somebody else has put in our way is left alone.
            if own.is_symlink() or own.stat().st_uid != os.getuid():
                continue
            (own / build_key()).mkdir(exist_ok=True)
        except OSError:
            continue
        return own / build_key()
    return None


def build_key() -> str:
    """Return e.g. `py311-torch2.13.0-cpu`; torch is asked for its version without importing it."""
    try:
        torch = importlib.metadata.version("torch").replace("+", "-")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    return f"py{sys.version_info.major}{sys.version_info.minor}-torch{torch}"


def file_system(path: Path) -> str:
    """Return the type of the file system that a path lies, or would lie, on; empty where that cannot be known."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return kind_at(path.absolute(), lines)


def kind_at(path: Path, mountinfo: Iterable[str]) -> str:
    """Return the type of the innermost mount above `path`; of two at one place the later one counts."""
    best, kind = -1, ""
    for line in mountinfo:
        left, _, right = line.partition(" - ")
        place = Path(left.split()[4].replace("\\040", " "))
        if (path == place or place in path.parents) and len(place.parts) >= best:
            best, kind = len(place.parts), right.split()[0]
    return kind
