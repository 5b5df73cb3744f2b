"""What this machine is and has: asked cheaply, changing nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# what OCI, Debian and Slurm sites call the same processors
_OCI_ARCHITECTURES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


def architecture() -> str:
    """This machine's architecture in OCI's words (`amd64`, `arm64`, ...)."""
    return oci_architecture(os.uname().machine)


def oci_architecture(name: str) -> str:
    """An architecture name of any dialect (`x86_64`, `aarch64`, `amd64`) in OCI's words."""
    return _OCI_ARCHITECTURES.get(name, name)


def is_root() -> bool:
    """Whether we run as root."""
    return os.geteuid() == 0


def has_terminal() -> bool:
    """Whether stdin and stderr are a terminal, so that a question can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def fuse_usable() -> bool:
    """Whether this user may open /dev/fuse (what squashfuse needs)."""
    return os.access("/dev/fuse", os.R_OK | os.W_OK)


def cpus() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0))


def has_sha_instructions() -> bool:
    """Whether the processor computes sha256 by itself, some five times faster than a program for it."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return False
    return bool({"sha_ni", "sha2"} & set(flags.split()))
