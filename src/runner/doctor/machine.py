"""Checks of this machine: processors, clock, kernel permissions, programs, and Slurm."""

import getpass
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runner.detection import cluster_name, slurm_configuration, srun_options
from runner.environments.engines import plugin_engines, why_no_sandbox
from runner.errors import RunnerError
from runner.machine import files, probe, process
from runner.site import Site

_SECONDS = 1.5


@dataclass(frozen=True)
class Diagnosis:
    """One line of `runner doctor`."""

    name: str
    verdict: str
    """`ok`, `missing` (limits what works), `not needed` (missing, and nothing here uses it) or `wrong` (will fail)"""
    text: str
    fix: str = ""
    """how to fix it; empty if nothing is wrong, or nothing can be done"""
    version: str = ""

    @property
    def counts(self) -> bool:
        """Whether the fix is worth a user's time."""
        return self.verdict != "not needed"


def machine() -> Diagnosis:
    """Processors, system and Python."""
    system = os.uname()
    python = ".".join(map(str, sys.version_info[:3]))
    text = f"{probe.architecture()}, {probe.cpus()} cores, {system.sysname}, Python {python}"
    return Diagnosis("machine", "ok", text, version=system.release)


def architecture(site: Site) -> Diagnosis:
    """Whether images that are built here run on the site's nodes."""
    here = probe.architecture()
    if site.architecture is None:
        fix = f"set `architecture` in the site file (if you have none: runner init --site {site.name})"
        return Diagnosis(
            "architecture", "ok", f"{here}; the architecture of the nodes is not known", fix
        )
    if site.architecture == here:
        return Diagnosis("architecture", "ok", f"{here}, like the nodes of {site.name}")
    text = f"this machine is {here}, but the nodes of {site.name} are {site.architecture}"
    return Diagnosis(
        "architecture",
        "wrong",
        text,
        f"runner build RECIPE --platform linux/{site.architecture}, or build there",
    )


def clock() -> Diagnosis:
    """Whether the clock is plausible. Tokens, certificates and file times depend on it."""
    built = files.modified(__file__) or 0.0  # none if runner runs from a zip file
    now = time.time()
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < built - 86_400:
        text = f"{shown} is earlier than the dates of runner's own files"
        return Diagnosis("clock", "wrong", text, "ask an admin to run: timedatectl set-ntp true")
    kept = probe.clock_synchronized()
    if kept:
        return Diagnosis("clock", "ok", f"{shown}, synchronized")
    why = "not synchronized"
    if kept is None:
        why = "the kernel does not report whether it is synchronized"
    return Diagnosis(
        "clock", "missing", f"{shown}; {why}", "ask an admin to run: timedatectl set-ntp true"
    )


def fuse() -> Diagnosis:
    """Whether this user may open /dev/fuse."""
    if probe.fuse_usable():
        return Diagnosis("/dev/fuse", "ok", "this user may open it")
    there = Path("/dev/fuse").exists()
    text = "this user may not open it" if there else "does not exist"
    fix = f"ask an admin to run: {'chmod 0666 /dev/fuse' if there else 'modprobe fuse'}"
    return Diagnosis(
        "/dev/fuse", "missing", f"{text}, so images are unpacked instead of mounted", fix
    )


def namespaces() -> Diagnosis:
    """Whether this user may create user namespaces, which rootless podman and the sandbox need."""
    if process.which("unshare") is None:
        return Diagnosis(
            "namespaces", "missing", "unshare is not installed", "apt-get install util-linux"
        )
    try:
        tried = process.run(
            ("unshare", "--map-root-user", "--mount", "true"), check=False, timeout_seconds=_SECONDS
        )
    except RunnerError as error:
        return Diagnosis("namespaces", "missing", f"{error.what}: {error.why}", error.fix)
    if tried.exit_code == 0:
        return Diagnosis("namespaces", "ok", "this user may create them")
    words = tried.stderr.strip() or "refused"
    return Diagnosis(
        "namespaces",
        "missing",
        words,
        "ask an admin to allow them: user.max_user_namespaces, kernel.unprivileged_userns_clone,"
        " kernel.apparmor_restrict_unprivileged_userns",
    )


def subordinate_ids() -> Diagnosis:
    """Whether this user has subordinate user and group ids, which rootless podman needs."""
    if probe.is_root():
        return Diagnosis("subuid", "ok", "not needed by root")
    user, number = getpass.getuser(), str(os.geteuid())
    for name in ("subuid", "subgid"):
        lines = files.text_of(f"/etc/{name}").splitlines()
        if not any(line.split(":")[0] in {user, number} for line in lines):
            text = f"no line for {user} in /etc/{name}: rootless podman cannot store files of several owners"
            fix = f"ask an admin to run: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}"
            return Diagnosis("subuid", "missing", text, fix)
    return Diagnosis("subuid", "ok", f"{user} has subordinate ids")


def sandbox() -> Diagnosis:
    """Whether this user can run images without an admin's help, and with which GPU driver."""
    reason = why_no_sandbox()
    if reason is not None:
        text, fix = f"images cannot run without another engine: {reason}", ""
        if not reason.startswith("this user"):
            fix = "apt-get install bubblewrap squashfuse squashfs-tools util-linux"
        return Diagnosis("sandbox", "missing", text, fix)
    text = "--engine sandbox runs images on this machine"
    if not Path("/dev/nvidiactl").exists():
        return Diagnosis("sandbox", "ok", f"{text}, which has no NVIDIA GPU")
    source = _driver_source()
    if source:
        return Diagnosis("sandbox", "ok", f"{text}, with NVIDIA's driver from {source}")
    text += ", but not with its GPUs: no CDI file fits, there is no nvidia-ctk, and ldconfig lists no libcuda.so.1"
    fix = "ask an admin to run: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
    return Diagnosis("sandbox", "missing", text, fix)


def _driver_source() -> str:
    """Where gpus.sh finds NVIDIA's driver; empty if nowhere."""
    for folder in ("/var/run/cdi", "/etc/cdi"):
        for path in sorted((*Path(folder).glob("*.json"), *Path(folder).glob("*.yaml"))):
            if "nvidia.com/gpu" in files.text_of(path):
                return str(path)
    if process.which("nvidia-ctk"):
        return "nvidia-ctk cdi generate"
    if process.which("ldconfig") is None:
        return ""
    listed = process.run(("ldconfig", "-p"), check=False, timeout_seconds=_SECONDS).stdout
    return "ldconfig -p" if "libcuda.so.1 " in listed else ""


# program -> (arguments that print its version, purpose)
PROGRAMS: dict[str, tuple[tuple[str, ...], str]] = {
    "podman": (("--version",), "builds and runs images"),
    "docker": (("--version",), "builds images where podman is missing, and runs them"),
    "enroot": (("version",), "container engine that runs squashfs files"),
    "apptainer": (("--version",), "container engine that runs images"),
    "bwrap": (("--version",), "runs squashfs files, for the engine sandbox"),
    "squashfuse": (("--version",), "mounts squashfs files without root"),
    "mksquashfs": (("-version",), "writes squashfs files"),
    "unsquashfs": (("-version",), "checks and unpacks squashfs files"),
    "mmdebstrap": (("--version",), "makes a base image when no registry can be reached"),
    "git": (("--version",), "records the commit of a run's code"),
}
_UPSTREAM = {
    "enroot": "https://github.com/NVIDIA/enroot: INSTALL",
    "apptainer": "https://apptainer.org/docs/admin/latest/installation.html",
}
_SOCKET = "/var/run/docker.sock"


def program(name: str) -> Diagnosis:
    """Whether a program is installed, and its version."""
    words, purpose = PROGRAMS[name]
    if process.which(name) is None:
        package = process.PACKAGES.get(name)
        fix = f"apt-get install {package}" if package else _UPSTREAM.get(name, "")
        return Diagnosis(name, "missing", f"not installed ({purpose})", fix)
    try:
        shown = process.run((name, *words), check=False, timeout_seconds=_SECONDS)
    except RunnerError as error:
        return Diagnosis(name, "wrong", f"{error.what}: {error.why}", error.fix)
    version = re.search(r"\d+\.\d+[\w.-]*", shown.stdout + shown.stderr)
    if version is None and shown.exit_code != 0:
        words_shown = (shown.stderr or shown.stdout).strip().splitlines()
        text = words_shown[0][:200] if words_shown else f"exit code {shown.exit_code}"
        return Diagnosis(
            name, "wrong", f"does not start: {text}", f"reinstall {name}, or remove it from PATH"
        )
    found = version[0] if version else "unknown"
    if (
        name == "docker"
        and not os.environ.get("DOCKER_HOST")
        and not os.access(_SOCKET, os.R_OK | os.W_OK)
    ):
        text = f"its daemon cannot be reached at {_SOCKET}; {purpose}"
        return Diagnosis(
            name, "missing", text, "as root: systemctl start docker; usermod -aG docker USER", found
        )
    return Diagnosis(name, "ok", purpose, version=found)


def slurm(site: Site, environ: Mapping[str, str]) -> Diagnosis:
    """Whether Slurm's client programs are installed, and which cluster answers."""
    wanted = not site.is_local
    missing = [
        name for name in ("sbatch", "srun", "squeue", "scancel") if process.which(name) is None
    ]
    if missing:
        text = f"not installed: {', '.join(missing)}"
        if wanted:
            fix = "log in to the cluster, or use --site local"
            return Diagnosis("slurm", "wrong", text, fix)
        text = f"{text}; jobs run on this machine"
        return Diagnosis("slurm", "missing", text, "apt-get install slurm-client")
    try:
        shown = process.run(("sbatch", "--version"), check=False, timeout_seconds=_SECONDS).stdout
        ping = process.run(("scontrol", "ping"), check=False, timeout_seconds=_SECONDS)
    except RunnerError as error:
        # the controller may be busy, which does not mean that it is broken
        return Diagnosis("slurm", "missing", f"{error.what}: {error.why}", error.fix)
    version = re.search(r"\d+\.\d+[\w.-]*", shown)
    found = version[0] if version else ""
    if ping.exit_code != 0:
        words = (ping.stdout + ping.stderr).strip().splitlines() or ["no answer"]
        text = f"the controller does not answer: {words[0][:160]}"
        if wanted:
            fix = "ask an admin, or use --site local"
            return Diagnosis("slurm", "wrong", text, fix, found)
        fix = "set up a cluster, or run jobs without Slurm"
        return Diagnosis("slurm", "missing", text, fix, found)
    return Diagnosis(
        "slurm", "ok", f"cluster {cluster_name(environ) or 'unknown'} answers", version=found
    )


def plugins(site: Site) -> Diagnosis:
    """Which container plugins srun has, and whether they include the site's engine."""
    if process.which("srun") is None:
        return Diagnosis("srun plugins", "missing", "srun is not installed")
    engines = plugin_engines()
    try:
        there = sorted(srun_options() & engines.keys())
    except RunnerError as error:
        return Diagnosis("srun plugins", "missing", f"{error.what}: {error.why}", error.fix)
    text = ", ".join(f"--{flag} ({engines[flag]})" for flag in there) or "none"
    flag = next((flag for flag, engine in engines.items() if engine == site.engine), None)
    if flag is not None and flag not in there:
        text = f"srun has no --{flag}, which the engine {site.engine} of {site.name} needs; it has: {text}"
        fix = "log in to the cluster, or choose another --site or --engine"
        return Diagnosis("srun plugins", "wrong", text, fix)
    folder = (slurm_configuration(os.environ) or Path("/etc/slurm/slurm.conf")).parent
    tracking = ""
    if "container-image" in there:
        try:
            tracking = _tracking_that_ends_mounts(plugin_lines(folder / "plugstack.conf"))
        except RunnerError as error:  # a busy controller
            text += f"; it is not known how Slurm tracks processes: {error.what}"
            return Diagnosis("srun plugins", "missing", text, error.fix)
    if tracking:
        text += f"; with {tracking}, a signal for a step also ends squashfuse, and the program loses its files"
        fix = "ask an admin to set ProctrackType=proctrack/cgroup, or to remove use_squashfuse=1 from plugstack.conf"
        return Diagnosis("srun plugins", "wrong", text, fix)
    return Diagnosis("srun plugins", "ok" if there else "missing", text)


def plugin_lines(path: Path) -> str:
    """The text of plugstack.conf and of the files that it includes; empty if they cannot be read."""
    text = files.text_of(path)
    patterns = [
        path.parent / name for name in re.findall(r"^\s*include\s+(\S+)", text, re.MULTILINE)
    ]
    found = (
        each for pattern in patterns for each in sorted(Path("/").glob(str(pattern).lstrip("/")))
    )
    return "\n".join((text, *map(files.text_of, found)))


def _tracking_that_ends_mounts(plugstack: str) -> str:
    """The ProctrackType of the cluster if it breaks `use_squashfuse=1` of pyxis; else empty.

    squashfuse is a process of the step. Only proctrack/cgroup sends signals to the tasks alone (Slurm 22.05).
    """
    if not re.search(r"^[^#\n]*spank_pyxis\.so\b.*\buse_squashfuse=1\b", plugstack, re.MULTILINE):
        return ""
    shown = process.run(
        ("scontrol", "show", "config"), check=False, timeout_seconds=_SECONDS
    ).stdout
    found = re.search(r"^ProctrackType\s*=\s*(\S+)", shown, re.MULTILINE)
    if found is None or found[1] == "proctrack/cgroup":
        return ""
    return f"{found[1]} and use_squashfuse=1"


def edf_lookup(environ: Mapping[str, str]) -> Diagnosis:
    """The folders in which the Container Engine looks up environments, and how many it finds."""
    text = "~/.edf (EDF_PATH is not set)"
    if environ.get("EDF_PATH"):
        text = f"EDF_PATH={environ['EDF_PATH']}"
    listed = environ.get("EDF_PATH") or f"{environ.get('HOME', '~')}/.edf"
    folders = [Path(folder) for folder in listed.split(":") if folder]
    there = [folder for folder in folders if files.exists(folder) and folder.is_dir()]
    gone = [str(folder) for folder in folders if folder not in there]
    relative = [str(folder) for folder in folders if not folder.is_absolute()]
    if environ.get("EDF_PATH") and (gone or relative):
        why = f"not absolute: {', '.join(relative)}"
        if gone:
            why = f"missing or closed folders: {', '.join(gone)}"
        return Diagnosis(
            "EDF lookup",
            "wrong",
            f"{text}; {why}",
            "set EDF_PATH to absolute folders, separated by `:`",
        )
    paths = [path for folder in there for path in sorted(folder.glob("*.toml"))]
    twice = [path for path in paths if path.name.endswith(".toml.toml")]
    if twice:
        fix = f"mv {shlex.quote(str(twice[0]))} {shlex.quote(str(twice[0].with_suffix('')))}"
        text = f"{text}; {twice[0].name} cannot be found by name"
        return Diagnosis("EDF lookup", "wrong", text, fix)
    return Diagnosis("EDF lookup", "ok", f"{text}: {len(paths)} environments")
