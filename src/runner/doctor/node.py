"""This machine: processors, clock, and what the kernel lets an ordinary user do."""

from __future__ import annotations

import getpass
import os
import sys
import time
from pathlib import Path

from runner.doctor.diagnosis import Diagnosis
from runner.machine import probe, process
from runner.site import Site

_SECONDS = 1.5


def machine() -> Diagnosis:
    """Processors, system and Python."""
    system = os.uname()
    python = ".".join(map(str, sys.version_info[:3]))
    text = f"{probe.architecture()}, {probe.cpus()} cores, {system.sysname}, Python {python}"
    return Diagnosis("machine", "ok", text, version=system.release)


def architecture(site: Site) -> Diagnosis:
    """Whether images that are built here run on the site's nodes."""
    here = probe.architecture()
    if site.architecture in {None, here}:
        text = f"{here}, as the nodes of {site.name}" if site.architecture else f"{here}; of the nodes nothing is known"
        fix = "" if site.architecture else f"say it once: runner init --site {site.name}"
        return Diagnosis("architecture", "ok", text, fix)
    text = f"this machine is {here}, the nodes of {site.name} are {site.architecture}"
    return Diagnosis("architecture", "wrong", text, f"runner build --platform linux/{site.architecture}")


def clock() -> Diagnosis:
    """Whether the clock can be right: tokens, certificates and the ages of files are judged by it."""
    built = _newest_file_of_ours()
    now = time.time()
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < built - 86_400:
        text = f"{shown} is earlier than the files of runner itself"
        return Diagnosis("clock", "wrong", text, "an admin: timedatectl set-ntp true")
    kept = probe.clock_synchronized()
    if kept:
        return Diagnosis("clock", "ok", f"{shown}; the kernel's clock is kept right")
    why = "the kernel does not say whether it is kept right" if kept is None else "nothing keeps it right"
    return Diagnosis("clock", "missing", f"{shown}; {why}", "an admin: timedatectl set-ntp true")


def _newest_file_of_ours() -> float:
    try:
        return Path(__file__).stat().st_mtime
    except OSError:  # in a zip
        return 0.0


def fuse() -> Diagnosis:
    """Whether this user may open /dev/fuse."""
    if probe.fuse_usable():
        return Diagnosis("/dev/fuse", "ok", "this user may open it")
    there = Path("/dev/fuse").exists()
    text = "this user may not open it" if there else "not there"
    fix = "an admin: chmod 0666 /dev/fuse" if there else "an admin: modprobe fuse"
    return Diagnosis("/dev/fuse", "missing", f"{text}; images are unpacked instead of mounted", fix)


def namespaces() -> Diagnosis:
    """Whether this user may make user namespaces: what rootless podman and the sandbox live on."""
    if process.which("unshare") is None:
        return Diagnosis("namespaces", "missing", "unshare is not installed", "apt-get install util-linux")
    tried = process.run(("unshare", "--map-root-user", "--mount", "true"), check=False, timeout_seconds=_SECONDS)
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
