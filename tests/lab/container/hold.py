"""Make the container of a step on this node and keep it until slurmstepd has gone.

The squashfs file is mounted with squashfuse inside private namespaces, a file system in memory above it takes the
writes, the mounts are bound, and the image's own /etc/rc is run by a login shell, as enroot and pyxis do. With the
last process the namespaces and all mounts vanish: nothing is left on the node.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tests.lab.container import kernel, variables
from tests.lab.container.request import Mount, Refusal, Request

STARTED = "/run/lab-started"


def _need(program: str) -> str:
    path = shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin")
    if path is None:
        raise Refusal(f"{program} is not installed on this node")
    return path


def check_on_node(request: Request, here: str) -> None:
    """Refuse what only the node can know: the image and the sources of mounts must be there."""
    if request.image and not Path(request.image).is_file():
        raise Refusal(f"image file not found: {request.image}")
    if request.image:
        shown = subprocess.run((_need("unsquashfs"), "-s", request.image), capture_output=True, text=True, check=False)
        if shown.returncode != 0:
            raise Refusal(f"not a squashfs file: {request.image}")
    for mount in request.mounts:
        if mount.source not in ("tmpfs", "umount") and not Path(here, mount.source).exists():
            raise Refusal(f"mount source not found: {mount.source}")


def enter_private_namespaces() -> bool:
    """Leave the host's mount namespace; True when a user namespace was needed for that."""
    user, group = os.geteuid(), os.getegid()
    needs_user = user != 0
    kernel.unshare(kernel.CLONE_NEWNS | (kernel.CLONE_NEWUSER if needs_user else 0))
    if needs_user:
        kernel.map_ids(0, 0, user, group)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    return needs_user


def mount_image(image: str, scratch: Path) -> tuple[Path, int | None]:
    """Mount the file below a writable overlay in memory; its root folder and squashfuse's process id."""
    kernel.mount("tmpfs", str(scratch), "tmpfs", data="mode=755")
    lower, upper, work, root = (scratch / name for name in ("lower", "upper", "work", "root"))
    for folder in (lower, upper, work, root):
        folder.mkdir(mode=0o755)
    server = _start_squashfuse(image, lower)
    if server is None:
        lower.rmdir()
        subprocess.run((_need("unsquashfs"), "-q", "-n", "-d", str(lower), image), check=True, stdout=2)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    kernel.mount("overlay", str(root), "overlay", data=options + ("" if _is_initial_root() else ",userxattr"))
    return root, server


def _is_initial_root() -> bool:
    return Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]


def _start_squashfuse(image: str, lower: Path) -> int | None:
    program = shutil.which("squashfuse", path="/usr/bin:/bin")
    if program is None or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return None
    server = subprocess.Popen((program, "-f", image, str(lower)), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not os.path.ismount(lower):
        if server.poll() is not None or time.monotonic() > deadline:
            server.kill()
            server.wait()
            return None
        time.sleep(0.002)
    return server.pid


def _point(root: Path, target: str, folder: bool) -> str:
    """A place inside the container to mount on, made where it is missing; links stay inside the container."""
    path = root
    for part in Path(target).parts[1:]:
        path = path / part
        for _ in range(40):
            if not path.is_symlink():
                break
            link = path.readlink()
            path = Path(os.path.normpath(f"{root}{link}" if link.is_absolute() else path.parent / link))
            if not path.is_relative_to(root):
                path = root
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.mkdir() if folder else path.touch()
    return str(path)


def mount_all(request: Request, root: Path, scratch: Path, here: str, script: str) -> None:
    """Bind what every container gets from the host, then what was asked for."""
    for name, mode in (("tmp", 0o1777), ("run", 0o755)):
        (scratch / f"new-{name}").mkdir()
        (scratch / f"new-{name}").chmod(mode)
        kernel.bind(str(scratch / f"new-{name}"), _point(root, f"/{name}", folder=True))
    for name in ("/dev", "/proc", "/sys"):
        kernel.bind(name, _point(root, name, folder=True))
    for name in ("/etc/hosts", "/etc/resolv.conf"):
        if Path(name).exists():
            kernel.bind(name, _point(root, name, folder=False), read_only=True)
    mounts = list(request.mounts)
    if request.mount_home and (home := os.environ.get("HOME")):
        mounts.insert(0, Mount(home, home))
    for mount in mounts:
        _mount(mount, root, here)
    if script:
        kernel.bind(script, _point(root, script, folder=False), read_only=True)


def _mount(mount: Mount, root: Path, here: str) -> None:
    if mount.source == "umount":
        kernel.umount(_point(root, mount.target, folder=True))
        return
    target = os.path.normpath(f"/{mount.target}")
    if mount.source == "tmpfs":
        kernel.mount("tmpfs", _point(root, target, folder=True), "tmpfs")
        return
    source = str(Path(here, mount.source))
    kernel.bind(source, _point(root, target, folder=Path(source).is_dir()), mount.read_only)


def add_user(root: Path) -> None:
    """Make the user known inside, as enroot's 10-shadow hook does: a getpwuid() must not fail."""
    user, group = os.environ.get("SLURM_JOB_USER") or os.environ.get("USER", "user"), os.environ.get("HOME", "/")
    ids = (int(os.environ[variables.PREFIX + "UID"]), int(os.environ[variables.PREFIX + "GID"]))
    lines = (("passwd", f"{user}:x:{ids[0]}:{ids[1]}:{user}:{group}:/bin/sh"), ("group", f"{user}:x:{ids[1]}:"))
    for (name, line), number in zip(lines, ids, strict=True):
        path = Path(_point(root, f"/etc/{name}", folder=False))
        text = path.read_text(errors="surrogateescape")
        if not any(known.split(":")[2:3] == [str(number)] for known in text.splitlines()):
            path.write_text(f"{text.rstrip()}\n{line}\n".lstrip(), errors="surrogateescape")


def run_start(environ: Mapping[str, str], entrypoint: bool) -> tuple[dict[str, str], str]:
    """Run /etc/rc in a login shell; the environment and the folder in which it leaves the command.

    Without the entrypoint pyxis writes `exec "$@"` into /etc/rc.local, so that /etc/rc goes no further.
    """
    if not entrypoint and Path("/etc/rc").exists():
        Path("/etc/rc.local").write_text('exec "$@"\n')
    last = ("/bin/sh", "-c", f"echo > {STARTED}; read -r line")
    argv = (
        ("/bin/sh", "-l", "/etc/rc", *last)
        if Path("/etc/rc").exists()
        else ("/bin/sh", "-lc", 'exec "$@"', "sh", *last)
    )
    try:
        shell = subprocess.Popen(
            argv, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        raise Refusal(f"the image has no usable /bin/sh: {error.strerror}") from error
    while not Path(STARTED).exists():
        if shell.poll() is not None:
            said = shell.stdout.read().decode(errors="replace") if shell.stdout else ""
            raise Refusal(f"the container did not start (exit {shell.returncode}): {said.strip()}")
        time.sleep(0.002)
    raw = Path(f"/proc/{shell.pid}/environ").read_bytes()
    where = str(Path(f"/proc/{shell.pid}/cwd").readlink())
    shell.communicate(b"\n")
    Path(STARTED).unlink()
    pairs = (entry.split(b"=", 1) for entry in raw.split(b"\0") if b"=" in entry)
    found = {os.fsdecode(name): os.fsdecode(value) for name, value in pairs}
    return {name: value for name, value in found.items() if name not in ("OLDPWD", "PWD", "SHLVL", "_")}, where


def hold(request: Request, here: str, folder: Path, alive: int, ready: int) -> None:
    """Build the container, answer on `ready` with the state file's path, stay until `alive` ends."""
    check_on_node(request, here)
    environ = dict(os.environ)
    name = ".".join(environ.get(key, "x") for key in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURMD_NODENAME"))
    os.environ[variables.PREFIX + "UID"], os.environ[variables.PREFIX + "GID"] = str(os.geteuid()), str(os.getegid())
    steps = folder / "steps"
    scratch = steps / f"{name}.{os.getpid()}"
    scratch.mkdir()
    steps_handle = os.open(steps, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    state_name = f"{scratch.name}.json"
    state_handle = os.open(steps / state_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    server = None
    try:
        in_user_namespace = enter_private_namespaces()
        root, server = mount_image(request.image, scratch)
        image_file = root / "etc/environment"
        image = variables.image_variables(image_file.read_text() if image_file.is_file() else "", environ)
        add_user(root)
        mount_all(request, root, scratch, here, environ.get(variables.PREFIX + "SCRIPT", ""))
        kernel.pivot_root(str(root))
        started, where = run_start(
            variables.start_environment(environ, image, request.keep_env), bool(request.entrypoint)
        )
        if not request.writable:
            kernel.make_read_only("/")
        workdir = request.workdir or where
        if not Path(workdir).is_dir():
            raise Refusal(f"couldn't chdir to container workdir {workdir}: No such file or directory")
        state = {
            "pid": os.getpid(),
            "user_namespace": in_user_namespace,
            "remap_root": bool(request.remap_root),
            "container": started,
            "edf": dict(request.env),
            "workdir": workdir,
            "remap_torch": not request.is_edf,
        }
        with os.fdopen(state_handle, "w") as file:
            json.dump(state, file)
        os.write(ready, f"+{steps / state_name}".encode())
        os.close(ready)
        while os.read(alive, 1):
            pass
    finally:
        if server is not None:
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)
        os.unlink(state_name, dir_fd=steps_handle)
        with suppress(OSError):  # the lab removes its folder in the end
            os.rmdir(scratch.name, dir_fd=steps_handle)
