"""The folders of images and runs: can they be written to, is there room, are they striped."""

from __future__ import annotations

import getpass
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runner.doctor.diagnosis import Diagnosis
from runner.errors import RunnerError
from runner.expansion import expand
from runner.machine import probe, process
from runner.site import Site

_SECONDS = 1.5
_IMAGE_BYTES = 20e9


def image_folder(site: Site, environ: Mapping[str, str]) -> Diagnosis:
    """Whether squashfs files can be kept where the site wants them: rights, room, inodes."""
    try:
        folder = site.images(environ)
    except RunnerError as error:
        return Diagnosis("image folder", "wrong", f"{error.what}: {error.why}", error.fix or "set RUNNER_IMAGES")
    return _room("image folder", folder, _IMAGE_BYTES, "RUNNER_IMAGES", "an NGC image takes about 20 GB: make room")


def run_folder(site: Site, environ: Mapping[str, str]) -> Diagnosis:
    """Whether runs can write where the site wants them; a project's own folder where the site names none."""
    try:
        text = environ.get("RUNNER_RUNS")
        if not text and site.run_folder is None:
            return Diagnosis("run folder", "ok", "runs/ of the project")
        folder = Path(text or expand(site.run_folder or "", environ, f"the run folder of {site.name}"))
    except RunnerError as error:
        return Diagnosis("run folder", "wrong", f"{error.what}: {error.why}", error.fix or "set RUNNER_RUNS")
    return _room("run folder", folder, 1e9, "RUNNER_RUNS", "checkpoints need room: make some, or set RUNNER_RUNS")


def _nearest(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _room(name: str, folder: Path, enough_bytes: float, variable: str, advice: str) -> Diagnosis:
    nearest = _nearest(folder)
    if not nearest.is_dir():
        return Diagnosis(name, "wrong", f"{folder}: {nearest} is no folder", f"set {variable}")
    if not os.access(nearest, os.W_OK | os.X_OK):
        return Diagnosis(name, "wrong", f"{folder}: this user may not write to {nearest}", f"set {variable}")
    free = shutil.disk_usage(nearest).free
    statistics = os.statvfs(nearest)
    # zero: the file system does not count inodes
    inodes = f", {statistics.f_favail} inodes" if statistics.f_files else ""
    kind = probe.file_system(nearest)[0]
    text = f"{folder}: {free / 1e9:.0f} GB{inodes} free" + (f" ({kind})" if kind else "")
    text += "" if folder.exists() else "; made when it is needed"
    if free < enough_bytes or (statistics.f_files and statistics.f_favail < 1000):
        return Diagnosis(name, "wrong", text, advice)
    return Diagnosis(name, "ok", text)


def quota(site: Site, environ: Mapping[str, str]) -> Diagnosis:
    """What this user may still write in the image folder, where the file system counts it."""
    try:
        nearest = _nearest(site.images(environ))
        found = quota_of_folder(nearest)
    except RunnerError as error:
        return Diagnosis("quota", "missing", f"{error.what}: {error.why}", error.fix)
    if found is None:
        return Diagnosis("quota", "ok", f"none for you at {nearest}")
    if found.nearly_used_up:
        return Diagnosis("quota", "wrong", found.text, f"make room on {found.point}: runner gc")
    return Diagnosis("quota", "ok", found.text)


def striping(site: Site, environ: Mapping[str, str]) -> Diagnosis:
    """Whether large files of the image folder lie on many storage servers, where it is on Lustre."""
    try:
        folder = site.images(environ)
    except RunnerError as error:
        return Diagnosis("striping", "missing", f"{error.what}: {error.why}", error.fix)
    nearest = _nearest(folder)
    if probe.file_system(nearest)[0] != "lustre":
        return Diagnosis("striping", "ok", f"{nearest} is not on Lustre, so it needs none")
    fix = f"before the first import: mkdir -p {folder} && lfs setstripe {site.image_striping or '-c -1 -S 4M'} {folder}"
    if process.which("lfs") is None:
        return Diagnosis("striping", "missing", "lfs is not installed here", "look on a login node: lfs getstripe -d")
    try:
        shown = process.run(("lfs", "getstripe", "-d", str(nearest)), check=False, timeout_seconds=_SECONDS)
    except RunnerError as error:
        return Diagnosis("striping", "missing", f"{error.what}: {error.why}", error.fix)
    if not folder.exists():
        return Diagnosis("striping", "missing", f"{folder} is not there yet, and would be as {nearest} is", fix)
    if is_striped(shown.stdout):
        return Diagnosis("striping", "ok", f"{folder}: large files lie on many storage servers")
    return Diagnosis(
        "striping", "wrong", f"{folder}: a whole image lies on one storage server, all nodes wait for it", fix
    )


def is_striped(stdout: str) -> bool:
    """Whether `lfs getstripe -d` speaks of more than one stripe, for some part of a file at least.

    Source: lfs-getstripe(1), Lustre 2.15.
    """
    return any(int(count) not in {0, 1} for count in re.findall(r"stripe_count:\s*(-?\d+)", stdout))


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


def quota_of_folder(folder: Path) -> Quota | None:
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
    counted = parse_quota(process.run(argv, check=False, timeout_seconds=_SECONDS).stdout)
    return Quota(point, *counted) if counted else None


def parse_quota(stdout: str) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """((KiB used, limit), (files used, limit)) of what `quota -w -p` or `lfs quota -q` prints; None where none counts.

    Limits are the soft ones where there are any, else the hard ones; 0 is none.
    Source: quota-tools 4.06, quota.c; Lustre 2.15, lfs-quota(1).
    """
    found = _QUOTA.search(stdout)
    if found is None:
        return None
    space, soft, hard, files, files_soft, files_hard = map(int, found.groups())
    return (space, soft or hard), (files, files_soft or files_hard)
