"""What a user may still write to a file system that counts it: `quota`, or `lfs quota` on Lustre."""

from __future__ import annotations

import getpass
import re
from dataclasses import dataclass
from pathlib import Path

from runner.errors import RunnerError
from runner.machine import probe, process

_SECONDS = 1.5
_NEARLY = 0.95
# space used, soft limit, hard limit, grace; the same of files. `*`: over the limit; `[ ]`: not exact
_COUNT = r"\[?(\d+)\]?\*?\s+(\d+)\s+(\d+)"
_QUOTA = re.compile(rf"(?<!\S){_COUNT}\s+\S+\s+{_COUNT}(?!\S)")


@dataclass(frozen=True)
class Quota:
    """Each a count and its limit; limit 0: none."""

    point: str
    """where the file system is mounted"""
    space: tuple[int, int]
    """KiB"""
    inodes: tuple[int, int]

    @property
    def nearly_used_up(self) -> bool:
        return any(limit and count >= _NEARLY * limit for count, limit in (self.space, self.inodes))

    @property
    def text(self) -> str:
        """One line for the user."""
        limits = (("space", self.space, 1024 / 1e9, " GB"), ("inodes", self.inodes, 1, ""))
        parts = [f"{what} {count * unit:.0f} of {limit * unit:.0f}{name}"
                 for what, (count, limit), unit, name in limits if limit]  # fmt: skip
        return f"{self.point}: {', '.join(parts) or 'no limits'}"


def of_folder(folder: Path) -> Quota | None:
    """This user's quota where an existing folder lies; None where none counts. Raises RunnerError if nobody can say."""
    kind, point = probe.file_system(folder)
    program = "lfs" if kind == "lustre" else "quota"
    if process.which(program) is None:
        raise RunnerError(
            f"{program} is not installed",
            f"{kind or 'the file system'} cannot be asked",
            f"apt-get install {program}" if program == "quota" else "",
        )
    words = ("-q", "-u", getpass.getuser(), point) if program == "lfs" else ("-w", "-p", "-f", point)
    argv = ("lfs", "quota", *words) if program == "lfs" else ("quota", *words)
    counted = parse(process.run(argv, check=False, timeout_seconds=_SECONDS).stdout)
    return Quota(point, *counted) if counted else None


def parse(stdout: str) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """((KiB used, limit), (files used, limit)) of what `quota -w -p` or `lfs quota -q` prints; None where none counts.

    Limits are the soft ones where there are any, else the hard ones; 0 is none.
    Source: quota-tools 4.06, quota.c; Lustre 2.15, lfs-quota(1).
    """
    found = _QUOTA.search(stdout)
    if found is None:
        return None
    space, soft, hard, files, files_soft, files_hard = map(int, found.groups())
    return (space, soft or hard), (files, files_soft or files_hard)
