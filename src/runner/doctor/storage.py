"""Checks of this user's storage: folders of images and runs, quota, credentials, and Hugging Face's cache."""

import getpass
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runner.doctor.machine import Diagnosis
from runner.errors import RunnerError
from runner.expansion import expand
from runner.images.sources.registry.credentials import auth_files, enroot_file
from runner.machine import files, probe, process, secrets
from runner.project import find_project
from runner.site import Site

_SECONDS = 1.5
_IMAGE_BYTES = 20e9


def image_folder(site: Site, environ: Mapping[str, str]) -> Diagnosis:
    """Whether squashfs files can be written to the site's image folder: permissions, free space, free inodes."""
    try:
        folder = site.images(environ)
    except RunnerError as error:
        return Diagnosis(
            "image folder", "wrong", f"{error.what}: {error.why}", error.fix or "set RUNNER_IMAGES"
        )
    advice = "free some space: an NGC image takes about 20 GB"
    return _room("image folder", folder, _IMAGE_BYTES, "RUNNER_IMAGES", advice)


def run_folder(site: Site, environ: Mapping[str, str]) -> Diagnosis:
    """Whether runs can be written to the site's run folder, or to the project's if the site sets none."""
    try:
        text = environ.get("RUNNER_RUNS")
        if not text and site.run_folder is None:
            return Diagnosis("run folder", "ok", "runs/ of the project")
        folder = Path(
            text or expand(site.run_folder or "", environ, f"the run folder of {site.name}")
        )
    except RunnerError as error:
        return Diagnosis(
            "run folder", "wrong", f"{error.what}: {error.why}", error.fix or "set RUNNER_RUNS"
        )
    return _room(
        "run folder",
        folder,
        1e9,
        "RUNNER_RUNS",
        "free some space for checkpoints, or set RUNNER_RUNS",
    )


def _nearest(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if files.exists(path))


def _room(name: str, folder: Path, enough_bytes: float, variable: str, advice: str) -> Diagnosis:
    nearest = _nearest(folder)
    if not nearest.is_dir():
        return Diagnosis(name, "wrong", f"{folder}: {nearest} is not a folder", f"set {variable}")
    if not os.access(nearest, os.W_OK | os.X_OK):
        return Diagnosis(
            name, "wrong", f"{folder}: this user may not write to {nearest}", f"set {variable}"
        )
    free = shutil.disk_usage(nearest).free
    statistics = os.statvfs(nearest)
    # zero: the file system does not count inodes
    inodes = f", {statistics.f_favail} inodes" if statistics.f_files else ""
    kind = probe.file_system(nearest)[0]
    text = f"{folder}: {free / 1e9:.0f} GB{inodes} free" + (f" ({kind})" if kind else "")
    text += "" if files.exists(folder) else "; created when needed"
    if free < enough_bytes or (statistics.f_files and statistics.f_favail < 1000):
        return Diagnosis(name, "wrong", text, advice)
    return Diagnosis(name, "ok", text)


def quota(site: Site, environ: Mapping[str, str]) -> Diagnosis:
    """This user's quota in the image folder, if the file system has quotas."""
    try:
        nearest = _nearest(site.images(environ))
        found = quota_of_folder(nearest)
    except RunnerError as error:
        return Diagnosis("quota", "missing", f"{error.what}: {error.why}", error.fix)
    if found is None:
        return Diagnosis("quota", "ok", f"no quota found at {nearest}")
    if found.nearly_used_up:
        return Diagnosis(
            "quota", "wrong", found.text, f"free some space on {found.point}: runner gc"
        )
    return Diagnosis("quota", "ok", found.text)


def striping(site: Site, environ: Mapping[str, str]) -> Diagnosis:
    """On Lustre: whether large files in the image folder are striped over several storage servers."""
    try:
        folder = site.images(environ)
    except RunnerError as error:
        return Diagnosis("striping", "missing", f"{error.what}: {error.why}", error.fix)
    nearest = _nearest(folder)
    if probe.file_system(nearest)[0] != "lustre":
        return Diagnosis("striping", "ok", f"not needed: {nearest} is not on Lustre")
    fix = f"before the first import: mkdir -p {folder} && lfs setstripe {site.image_striping or '-c -1 -S 4M'} {folder}"
    if process.which("lfs") is None:
        return Diagnosis(
            "striping",
            "missing",
            "lfs is not installed here",
            "check on a login node: lfs getstripe -d",
        )
    try:
        shown = process.run(
            ("lfs", "getstripe", "-d", str(nearest)), check=False, timeout_seconds=_SECONDS
        )
    except RunnerError as error:
        return Diagnosis("striping", "missing", f"{error.what}: {error.why}", error.fix)
    if not files.exists(folder):
        text = f"{folder} does not exist yet; it would inherit the striping of {nearest}"
        return Diagnosis("striping", "missing", text, fix)
    # a count for each part of a file; source: lfs-getstripe(1), Lustre 2.15
    counts = re.findall(r"stripe_count:\s*(-?\d+)", shown.stdout)
    if any(int(count) not in {0, 1} for count in counts):
        return Diagnosis("striping", "ok", f"{folder}: large files are striped")
    text = f"{folder}: each image is stored on a single storage server, from which all nodes read"
    return Diagnosis("striping", "wrong", text, fix)


_SLOW = 0.7  # of what the site promises


def network(site: Site, environ: Mapping[str, str]) -> Diagnosis:
    """The newest result of the job `network` on this site: the run, its time, the speed and the slowest pair."""
    again = "runner launch network --nodes 2"
    try:
        paths = site.runs(environ, find_project()).glob("network-*/network.json")
    except RunnerError as error:
        return Diagnosis("network", "missing", f"{error.what}: {error.why}", error.fix)
    for path in sorted(paths, key=lambda path: files.modified(path) or 0.0, reverse=True):
        try:
            if json.loads(files.text_of(path.with_name("run.json")))["site"] != site.name:
                continue
            found = json.loads(files.text_of(path))
            speed = max(row["node"] for row in found["results"] if row["operation"] == "all-reduce")
            pair, count, when = found["pair"], len(found["nodes"]), str(found["time"])[:16]
            slowest = (
                f"slowest pair {' - '.join(pair['nodes'])}: {pair['node']:.3g} GB/s, {pair['why']}"
            )
            slow = bool(pair["slow"])
        except (ValueError, KeyError, TypeError):  # damaged, not ours, or of a single node
            continue
        share = speed * 8 / site.network_gbps if site.network_gbps else None
        promised = "" if share is None else f" ({share:.0%} of what the site promises)"
        text = f"{path.parent.name}, {when} UTC, {count} nodes: {speed:.3g} GB/s per node{promised}; {slowest}"
        slow = slow or (share is not None and share < _SLOW)
        return Diagnosis(
            "network", "wrong" if slow else "ok", text, f"tell an admin, or measure: {again}" * slow
        )
    return Diagnosis("network", "missing", f"not measured on {site.name} yet", again)


_NEARLY = 0.95
# space used, soft limit, hard limit, grace; then the same for files. `*`: over the limit; `[ ]`: not exact
_COUNT = r"\[?(\d+)\]?\*?\s+(\d+)\s+(\d+)"
_QUOTA = re.compile(rf"(?<!\S){_COUNT}\s+\S+\s+{_COUNT}(?!\S)")


@dataclass(frozen=True)
class Quota:
    """A user's quota. Each value is (used, limit); limit 0 means none."""

    point: str
    """the mount point of the file system"""
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
        parts = [
            f"{what} {count * unit:.0f} of {limit * unit:.0f}{name}"
            for what, (count, limit), unit, name in limits
            if limit
        ]
        return f"{self.point}: {', '.join(parts) or 'no limits'}"


def quota_of_folder(folder: Path) -> Quota | None:
    """This user's quota on the file system of a folder; None if there is none. Raises RunnerError if unknown."""
    kind, point = probe.file_system(folder)
    program = "lfs" if kind == "lustre" else "quota"
    if process.which(program) is None:
        raise RunnerError(
            f"{program} is not installed",
            f"runner needs it to read your quota on this file system{f' ({kind})' if kind else ''}",
            "ask an administrator to install it; without it, runner cannot warn about a full quota",
        )
    words = (
        ("-q", "-u", getpass.getuser(), point) if program == "lfs" else ("-w", "-p", "-f", point)
    )
    argv = ("lfs", "quota", *words) if program == "lfs" else ("quota", *words)
    counted = parse_quota(process.run(argv, check=False, timeout_seconds=_SECONDS).stdout)
    return Quota(point, *counted) if counted else None


def parse_quota(stdout: str) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Parse the output of `quota -w -p` or `lfs quota -q`: ((KiB used, limit), (files used, limit)); None without a
    quota.

    The limits are the soft limits if there are any, else the hard ones; 0 means none.
    Source: quota-tools 4.06, quota.c; Lustre 2.15, lfs-quota(1).
    """
    found = _QUOTA.search(stdout)
    if found is None:
        return None
    space, soft, hard, files, files_soft, files_hard = map(int, found.groups())
    return (space, soft or hard), (files, files_soft or files_hard)


_LINES = "machine nvcr.io and machine authn.nvidia.com, each with: login $oauthtoken password KEY"


def credentials(environ: Mapping[str, str]) -> Diagnosis:
    """Whether enroot's credentials exist, are private, and contain both hosts that nvcr.io needs."""
    path = enroot_file(environ)
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        fix = f"create {path} with mode 0600 and the lines for {_LINES}"
        return Diagnosis(
            "credentials",
            "missing",
            f"{path} does not exist, so only public images can be pulled",
            fix,
        )
    if mode & 0o077:
        return Diagnosis(
            "credentials",
            "wrong",
            f"{path} can be read by others (mode {mode:04o})",
            f"chmod 600 {path}",
        )
    machines = set(re.findall(r"^\s*machine\s+(\S+)", text, re.MULTILINE))
    registry = ("nvcr.io", "which is the registry")
    issuer = ("authn.nvidia.com", "which issues the token")
    for (one, _), (other, role) in ((registry, issuer), (issuer, registry)):
        if one in machines and other not in machines:
            text = f"{path} has {one} but not {other}, {role}"
            return Diagnosis(
                "credentials", "wrong", text, f"copy the line of {one} as `machine {other}`"
            )
    return Diagnosis(
        "credentials", "ok", f"{path} (mode {mode:04o}): {', '.join(sorted(machines)) or 'empty'}"
    )


def registry_logins(environ: Mapping[str, str]) -> Diagnosis:
    """The registry logins of podman and docker, and whether other users can read them. Shows no secrets."""
    found: list[str] = []
    for path in auth_files(environ):
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            text = path.read_text(encoding="utf-8", errors="replace")
            known = sorted(json.loads(text).get("auths") or {})
        except OSError:
            continue
        except (ValueError, AttributeError):
            return Diagnosis(
                "logins",
                "wrong",
                f"{path} is not the JSON that podman writes",
                "podman login REGISTRY",
            )
        if known and mode & 0o077:
            return Diagnosis(
                "logins",
                "wrong",
                f"{path} can be read by others (mode {mode:04o})",
                f"chmod 600 {path}",
            )
        found += [f"{name} ({path})" for name in known]
    if not found:
        return Diagnosis(
            "logins",
            "missing",
            "podman and docker have no logins, so only public images can be read",
            "podman login nvcr.io",
        )
    return Diagnosis("logins", "ok", ", ".join(found))


def hugging_face(environ: Mapping[str, str]) -> Diagnosis:
    """Where models are cached, whether they can be downloaded, and whether there is a token for gated models."""
    cache = environ.get("HF_HOME") or (
        (environ.get("XDG_CACHE_HOME") or environ.get("HOME", "~") + "/.cache") + "/huggingface"
    )
    offline = [
        name
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
        if environ.get(name, "0").lower() not in {"", "0", "false", "no", "off"}
    ]
    folder = Path(cache)
    token = Path(environ.get("HF_TOKEN_PATH") or folder / "token")
    text = f"cache {cache}{'' if folder.is_dir() else ' (does not exist yet)'}; "
    text += f"offline: {', '.join(offline)}" if offline else "online"
    if offline and not folder.is_dir():
        return Diagnosis(
            "Hugging Face",
            "wrong",
            text,
            f"run `runner prefetch` where there is network, or unset {offline[0]}",
        )
    nearest = _nearest(folder)
    if not os.access(nearest, os.W_OK) and not offline:
        return Diagnosis(
            "Hugging Face", "wrong", f"{text}; this user may not write to {nearest}", "set HF_HOME"
        )
    if token.is_file() and stat.S_IMODE(token.stat().st_mode) & 0o077:
        return Diagnosis(
            "Hugging Face", "wrong", f"{token} can be read by others", f"chmod 600 {token}"
        )
    try:
        own = secrets.check(environ)
    except RunnerError as error:
        return Diagnosis("Hugging Face", "wrong", f"{error.what}: {error.why}", error.fix)
    if environ.get("HF_TOKEN"):
        known = "HF_TOKEN is set"
    elif "HF_TOKEN" in own:
        known = f"HF_TOKEN is in {secrets.path(environ)}"
    elif token.is_file() and "HF_TOKEN" not in environ:
        known = f"token in {token}"
    else:
        known = "no token"
    return Diagnosis("Hugging Face", "ok", f"{text}; {known}")
