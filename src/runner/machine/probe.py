"""Facts about this machine, read cheaply and without changes."""

from __future__ import annotations

import os
import re
from pathlib import Path

# names of the same architectures at OCI, Debian and Slurm sites
_OCI_ARCHITECTURES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


def architecture() -> str:
    """This machine's architecture as OCI names it (`amd64`, `arm64`, ...)."""
    return oci_architecture(os.uname().machine)


def oci_architecture(name: str) -> str:
    """Convert an architecture name (`x86_64`, `aarch64`, `amd64`) to OCI's name."""
    return _OCI_ARCHITECTURES.get(name, name)


def is_root() -> bool:
    return os.geteuid() == 0


def fuse_usable() -> bool:
    """Whether this user may open /dev/fuse (what squashfuse needs)."""
    return os.access("/dev/fuse", os.R_OK | os.W_OK)


def cpus() -> int:
    """The number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def clock_synchronized() -> bool | None:
    """Whether the kernel's clock is synchronized; None if the call is not allowed.

    Source: adjtimex(2): modes 0 reads; 5 (TIME_ERROR): the clock is not synchronized.
    """
    import ctypes

    try:
        libc = ctypes.CDLL(None, use_errno=True)
        answer = libc.adjtimex(ctypes.create_string_buffer(512))  # struct timex has 208 bytes
    except (OSError, AttributeError):
        return None
    return None if answer < 0 else answer != 5


def file_system(path: Path) -> tuple[str, str]:
    """(type, mount point) of the file system that contains a path, from the kernel's mount list; empty if not found."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "", ""
    best = ("", "")
    text = os.path.realpath(path)
    for line in lines:
        words = line.split()
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), words[1])
        if (text == point or text.startswith(point.rstrip("/") + "/")) and len(point) >= len(
            best[1]
        ):
            best = (words[2], point)
    return best
