"""Make the container of a step on this node and keep it until slurmstepd has gone.

The squashfs file is mounted with squashfuse inside private namespaces, a file system in memory above it takes the
writes, the mounts are bound, and the image's own /etc/rc is run by a login shell, as enroot and pyxis do. With the
last process the namespaces and all mounts vanish: nothing is left on the node.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.lab.container import filesystem, kernel, variables
from tests.lab.container.filesystem import Scratch
from tests.lab.container.request import Refusal, Request
from tests.lab.container.start import run_start

NO_SQUASHFUSE = "no-squashfuse"  # a file in the lab's folder, made by a test


def enter_private_namespaces() -> bool:
    """Leave the host's mount namespace; True when a user namespace was needed for that."""
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWNS | (kernel.CLONE_NEWUSER if user else 0))
    if user:
        kernel.map_ids(0, 0, user, group)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    return user != 0


def node_name(environ: Mapping[str, str]) -> str:
    """The name of the virtual node: all share one host name, and SLURMD_NODENAME is not set yet."""
    listed = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
    argv = (filesystem.need("scontrol"), "show", "hostnames", listed)
    shown = subprocess.run(argv, capture_output=True, text=True, check=True)
    return shown.stdout.split()[int(environ[variables.PREFIX + "NODEID"])]


def build(request: Request, here: str, folder: Path, scratch: Scratch) -> dict[str, Any]:
    """Make the container and enter it; what tasks must know about it."""
    environ = dict(os.environ)
    user, group = os.geteuid(), os.getegid()
    if request.name:
        containers = folder / "containers" / f"{user}" / node_name(environ)
        containers.mkdir(parents=True, exist_ok=True)
    in_user_namespace = enter_private_namespaces()
    if request.name:
        root = filesystem.named_root(request, scratch, containers)
    else:
        root = filesystem.overlay_root(request.image, scratch, in_user_namespace)
    image_file = root / "etc/environment"
    image = variables.image_variables(image_file.read_text() if image_file.is_file() else "", environ)
    ids = (0, 0) if request.remap_root else (user, group)
    filesystem.add_user(root, *ids, environ)
    filesystem.mount_all(request, root, scratch, here, environ)
    kernel.pivot_root(str(root))
    # podman's container does not see the job's variables, and starts without a login shell
    handed = environ if request.host_env else {"ENROOT_LOGIN_SHELL": "n"}
    started, where = run_start(
        variables.start_environment(handed, image, request.keep_env),
        bool(request.entrypoint),
        lambda: kernel.become(*ids) if in_user_namespace else None,
    )
    if not request.writable:
        kernel.make_read_only("/")
    workdir = request.workdir or where
    if not Path(workdir).is_dir():
        raise Refusal(f"couldn't chdir to container workdir {workdir}: No such file or directory")
    return {
        "pid": os.getpid(),
        "user_namespace": in_user_namespace,
        "ids": ids,
        "container": started,
        "edf": dict(request.env),
        "workdir": workdir,
        "remap_torch": request.remap_torch,
    }


def hold(request: Request, here: str, folder: Path, alive: int, ready: int) -> None:
    """Build the container, answer on `ready` with the state file's path, stay until `alive` ends."""
    filesystem.check_on_node(request, here)
    name = ".".join(os.environ.get(key, "x") for key in ("SLURM_JOB_ID", "SLURM_STEP_ID", "RUNNER_LAB_NODEID"))
    steps = folder / "steps"
    scratch = Scratch(steps / f"{name}.{os.getpid()}", may_mount=not (folder / NO_SQUASHFUSE).exists())
    scratch.path.mkdir()
    state = f"{scratch.path.name}.json"
    # Opened now: the host's files are out of reach once inside the container.
    steps_handle = os.open(steps, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    state_handle = os.open(steps / state, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with (folder / "containers.log").open("a") as log:
            built = build(request, here, folder, scratch)
            log.write("squashfuse\n" if scratch.servers else "reused\n" if scratch.reused else "unsquashfs\n")
        with os.fdopen(state_handle, "w") as file:
            json.dump(built, file)
        os.write(ready, f"+{steps / state}".encode())
        os.close(ready)
        while os.read(alive, 1):
            pass
    finally:
        scratch.end()
        os.unlink(state, dir_fd=steps_handle)
        with suppress(OSError):  # the lab removes its folder in the end
            os.rmdir(scratch.path.name, dir_fd=steps_handle)
