"""Become a task's command inside the container that the holder keeps."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.lab.container import kernel, variables


def enter(argv: list[str]) -> None:
    """Replace this process by the command; like slurmstepd, exit with the errno when it cannot be run."""
    state = json.loads(Path(os.environ[variables.PREFIX + "ENTER"]).read_text())
    program = os.environ[variables.PREFIX + "PROGRAM"]
    environ = variables.task_environment(os.environ, state["container"], state["edf"], state["remap_torch"])
    names = ("user", "mnt") if state["user_namespace"] else ("mnt",)
    for name in names:
        kernel.setns(f"/proc/{state['pid']}/ns/{name}")
    if state["user_namespace"]:
        user, group = state["ids"]
        kernel.become(user, group)
    os.chdir(state["workdir"])
    environ["PWD"] = state["workdir"]
    try:
        os.execve(_find(program, environ), [program, *argv], environ)
    except OSError as error:
        print(f"slurmstepd: error: execve(): {program}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(error.errno or 1)


def _find(program: str, environ: dict[str, str]) -> str:
    if "/" in program:
        return program
    for folder in environ.get("PATH", variables.DEFAULT_PATH).split(":"):
        path = f"{folder}/{program}"
        if os.access(path, os.X_OK) and not Path(path).is_dir():
            return path
    return program


def save(state_file: str, target: str) -> int:
    """Write the container's own file system, without its mounts, to a squashfs file; mksquashfs' exit code."""
    holder = Path(f"/proc/{json.loads(Path(state_file).read_text())['pid']}")
    mounted = (line.split()[4].removeprefix("/") for line in (holder / "mountinfo").read_text().splitlines())
    partial = f"{target}.{os.getpid()}.partial"
    argv = (
        "mksquashfs",
        ".",
        partial,
        "-all-root",
        "-noappend",
        "-quiet",
        "-no-progress",
        "-e",
        *filter(None, mounted),
    )
    code = subprocess.run(argv, cwd=holder / "root", stdout=subprocess.DEVNULL, check=False).returncode
    if code == 0:
        Path(partial).replace(target)
    else:
        Path(partial).unlink(missing_ok=True)
    return code
