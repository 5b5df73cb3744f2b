"""The folders of images and runs: can they be written to, is there room, are they striped."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from runner.doctor.diagnosis import Diagnosis
from runner.errors import RunnerError
from runner.expansion import expand
from runner.machine import probe, process
from runner.machine import quota as quotas
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
        found = quotas.of_folder(nearest)
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
