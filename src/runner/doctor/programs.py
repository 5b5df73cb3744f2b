"""The programs that the line is made of: there or not, and in which version."""

from __future__ import annotations

import os
import re

from runner.doctor.diagnosis import Diagnosis
from runner.errors import RunnerError
from runner.machine import process

# program -> (words that print its version, what it is for)
PROGRAMS: dict[str, tuple[tuple[str, ...], str]] = {
    "podman": (("--version",), "builds images; an engine"),
    "docker": (("--version",), "builds images where podman is missing; an engine"),
    "enroot": (("version",), "an engine; enters squashfs files"),
    "apptainer": (("--version",), "an engine; enters images"),
    "bwrap": (("--version",), "an engine; enters images in the sandbox"),
    "squashfuse": (("--version",), "mounts squashfs files without root"),
    "mksquashfs": (("-version",), "writes squashfs files"),
    "unsquashfs": (("-version",), "checks and unpacks squashfs files"),
    "mmdebstrap": (("--version",), "makes a base image where no registry answers"),
    "git": (("--version",), "says what code a run had"),
}
_UPSTREAM = {
    "enroot": "https://github.com/NVIDIA/enroot: INSTALL",
    "apptainer": "https://apptainer.org/docs/admin/latest/installation.html",
}
_SECONDS = 1.5
_SOCKET = "/var/run/docker.sock"


def program(name: str) -> Diagnosis:
    """Whether a program is there, and its version."""
    words, purpose = PROGRAMS[name]
    if process.which(name) is None:
        package = process.PACKAGES.get(name)
        fix = f"apt-get install {package}" if package else _UPSTREAM.get(name, "")
        return Diagnosis(name, "missing", f"not installed; {purpose}", fix)
    try:
        shown = process.run((name, *words), check=False, timeout_seconds=_SECONDS)
    except RunnerError as error:
        return Diagnosis(name, "wrong", f"{error.what}: {error.why}", error.fix)
    version = re.search(r"\d+\.\d+[\w.-]*", shown.stdout + shown.stderr)
    if version is None and shown.exit_code != 0:
        words_shown = (shown.stderr or shown.stdout).strip().splitlines()
        text = words_shown[0][:200] if words_shown else f"exit code {shown.exit_code}"
        return Diagnosis(name, "wrong", f"does not start: {text}", f"install it again, or take {name} out of PATH")
    found = version[0] if version else "unknown"
    if name == "docker" and not os.environ.get("DOCKER_HOST") and not os.access(_SOCKET, os.R_OK | os.W_OK):
        text = f"its daemon cannot be reached at {_SOCKET}; {purpose}"
        return Diagnosis(name, "missing", text, "systemctl start docker, and be a member of the group docker", found)
    return Diagnosis(name, "ok", purpose, version=found)
