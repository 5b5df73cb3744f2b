"""What this machine and site can do: one line each, with a verdict and how to mend what is missing. Changes nothing."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from runner.detection import cluster_name, slurm_plugins
from runner.errors import RunnerError
from runner.machine import probe, process
from runner.site import Site


@dataclass(frozen=True)
class Diagnosis:
    """One line. `verdict` is `ok`, `missing` (something else can do its work) or `wrong` (it will hurt)."""

    name: str
    verdict: str
    text: str
    fix: str = ""


# program -> (words that print its version, what it is for); the ones that the whole line can do without are `missing`
PROGRAMS: dict[str, tuple[tuple[str, ...], str]] = {
    "podman": (("--version",), "builds images"),
    "docker": (("--version",), "builds images where podman is missing"),
    "mksquashfs": (("-version",), "writes squashfs files"),
    "unsquashfs": (("-version",), "checks and unpacks squashfs files"),
    "squashfuse": (("--version",), "mounts squashfs files without root"),
    "bwrap": (("--version",), "enters images in the sandbox"),
    "mmdebstrap": (("--version",), "makes a base image where no registry answers"),
    "enroot": (("version",), "enters squashfs files"),
    "apptainer": (("--version",), "enters images"),
    "git": (("--version",), "says what code a run had"),
    "sbatch": (("--version",), "submits jobs"),
}


def examine(site: Site, environ: Mapping[str, str]) -> tuple[Diagnosis, ...]:
    """Every diagnosis, in the order in which they are to be read. Takes under two seconds."""
    checks: list[Callable[[], Diagnosis]] = [
        machine,
        *(partial(program, name) for name in PROGRAMS),
        fuse,
        namespaces,
        subordinate_ids,
        lambda: slurm(site, environ),
        lambda: architecture(site),
        lambda: image_folder(site, environ),
        lambda: edf_lookup(environ),
        lambda: credentials(environ),
        lambda: hugging_face(environ),
    ]
    with ThreadPoolExecutor(max_workers=8) as pool:
        return tuple(pool.map(lambda check: check(), checks))


def machine() -> Diagnosis:
    """Processors, system and Python."""
    cores = probe.cpus()
    system = os.uname()
    python = ".".join(map(str, sys.version_info[:3]))
    text = f"{probe.architecture()}, {cores} cores, {system.sysname} {system.release}, Python {python}"
    return Diagnosis("machine", "ok", text)


def program(name: str) -> Diagnosis:
    """Whether a program is there, and its version."""
    words, purpose = PROGRAMS[name]
    if process.which(name) is None:
        package = process.PACKAGES.get(name)
        fix = f"apt-get install {package}" if package else ""
        return Diagnosis(name, "missing", f"not installed; {purpose}", fix)
    try:
        shown = process.run((name, *words), check=False, timeout_seconds=1.5)
    except RunnerError as error:
        return Diagnosis(name, "wrong", f"{error.what}: {error.why}", error.fix)
    version = re.search(r"\d+\.\d+[\w.-]*", shown.stdout + shown.stderr)
    return Diagnosis(name, "ok", f"{version[0] if version else 'version unknown'}; {purpose}")


def fuse() -> Diagnosis:
    """Whether this user may open /dev/fuse."""
    if probe.fuse_usable():
        return Diagnosis("/dev/fuse", "ok", "this user may open it")
    text = "this user may not open it" if Path("/dev/fuse").exists() else "not there"
    return Diagnosis("/dev/fuse", "missing", f"{text}; images are unpacked instead of mounted", "chmod 0666 /dev/fuse")


def namespaces() -> Diagnosis:
    """Whether this user may make user namespaces: what rootless podman and the sandbox live on."""
    if process.which("unshare") is None:
        return Diagnosis("namespaces", "missing", "unshare is not installed", "apt-get install util-linux")
    tried = process.run(("unshare", "--map-root-user", "--mount", "true"), check=False, timeout_seconds=1.5)
    if tried.exit_code == 0:
        return Diagnosis("namespaces", "ok", "this user may make them")
    words = tried.stderr.strip() or "refused"
    return Diagnosis("namespaces", "missing", words, "an admin: sysctl -w user.max_user_namespaces=15000")


def subordinate_ids() -> Diagnosis:
    """Whether this user has subordinate user and group ids, which rootless podman wants."""
    if probe.is_root():
        return Diagnosis("subuid", "ok", "root needs none")
    user, number = getpass.getuser(), str(os.geteuid())
    for name in ("subuid", "subgid"):
        try:
            lines = Path("/etc", name).read_text(encoding="utf-8").splitlines()
        except OSError:
            lines = []
        if not any(line.split(":")[0] in {user, number} for line in lines):
            text = f"no line for {user} in /etc/{name}: rootless podman cannot keep files of several owners"
            fix = f"an admin: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}"
            return Diagnosis("subuid", "missing", text, fix)
    return Diagnosis("subuid", "ok", f"{user} has subordinate ids")


def slurm(site: Site, environ: Mapping[str, str]) -> Diagnosis:
    """The cluster that Slurm's client speaks to, and the container plugins of srun."""
    if process.which("srun") is None:
        verdict = "wrong" if site.scheduler == "slurm" else "missing"
        fix = "log in to the cluster, or --site local" if verdict == "wrong" else ""
        return Diagnosis("slurm", verdict, "no srun on this machine", fix)
    plugins = ", ".join(f"--{plugin}" for plugin in sorted(slurm_plugins())) or "none"
    return Diagnosis(
        "slurm", "ok", f"cluster {cluster_name(environ) or 'unknown'}; container plugins of srun: {plugins}"
    )


def architecture(site: Site) -> Diagnosis:
    """Whether images that are built here run on the site's nodes."""
    here = probe.architecture()
    if site.architecture in {None, here}:
        return Diagnosis("architecture", "ok", f"{here}, as the nodes of {site.name}" if site.architecture else here)
    text = f"this machine is {here}, the nodes of {site.name} are {site.architecture}"
    return Diagnosis("architecture", "wrong", text, f"runner build --platform linux/{site.architecture}")


def image_folder(site: Site, environ: Mapping[str, str]) -> Diagnosis:
    """Whether squashfs files can be kept where the site wants them."""
    try:
        folder = site.images(environ)
    except RunnerError as error:
        return Diagnosis("image folder", "wrong", f"{error.what}: {error.why}", error.fix)
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        return Diagnosis(
            "image folder", "wrong", f"{folder}: this user may not write to {nearest}", "set RUNNER_IMAGES"
        )
    free = shutil.disk_usage(nearest).free
    statistics = os.statvfs(nearest)
    # zero: the file system does not count inodes
    inodes = f", {statistics.f_favail} inodes" if statistics.f_files else ""
    text = f"{folder}: {free / 1e9:.0f} GB{inodes} free" + ("" if folder.exists() else "; made by the first import")
    verdict = "ok" if free > 20e9 else "wrong"
    return Diagnosis("image folder", verdict, text, "" if verdict == "ok" else "an NGC image takes about 20 GB")


def edf_lookup(environ: Mapping[str, str]) -> Diagnosis:
    """Where the Container Engine looks for an environment that is given by name."""
    if not environ.get("EDF_PATH"):
        return Diagnosis("EDF lookup", "ok", "~/.edf (EDF_PATH is not set)")
    gone = [folder for folder in environ["EDF_PATH"].split(":") if folder and not Path(folder).is_dir()]
    text = f"EDF_PATH={environ['EDF_PATH']}"
    if gone:
        return Diagnosis("EDF lookup", "wrong", f"{text}; not there: {', '.join(gone)}", "correct EDF_PATH")
    return Diagnosis("EDF lookup", "ok", text)


def credentials(environ: Mapping[str, str]) -> Diagnosis:
    """enroot's credentials: present, private, and with both machines that nvcr.io asks for."""
    config = environ.get("ENROOT_CONFIG_PATH") or (
        (environ.get("XDG_CONFIG_HOME") or environ.get("HOME", "") + "/.config") + "/enroot"
    )
    path = Path(config) / ".credentials"
    try:
        mode, text = stat.S_IMODE(path.stat().st_mode), path.read_text(encoding="utf-8")
    except OSError:
        return Diagnosis("credentials", "missing", f"no {path}: public images only", "see docs/import.md")
    if mode & 0o077:
        return Diagnosis("credentials", "wrong", f"{path} can be read by others (mode {mode:04o})", f"chmod 600 {path}")
    machines = set(re.findall(r"^\s*machine\s+(\S+)", text, re.MULTILINE))
    if "nvcr.io" in machines and "authn.nvidia.com" not in machines:
        text = f"{path} has nvcr.io but not authn.nvidia.com, which hands out the token"
        return Diagnosis("credentials", "wrong", text, "add the same line for authn.nvidia.com")
    return Diagnosis("credentials", "ok", f"{path}: {', '.join(sorted(machines)) or 'empty'}")


def hugging_face(environ: Mapping[str, str]) -> Diagnosis:
    """Where models are cached, and whether they may be downloaded."""
    cache = environ.get("HF_HOME") or environ.get("HOME", "~") + "/.cache/huggingface"
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if environ.get(name, "0") not in {"", "0"}]
    return Diagnosis(
        "Hugging Face", "ok", f"cache {cache}; {'offline: ' + ', '.join(offline) if offline else 'online'}"
    )
