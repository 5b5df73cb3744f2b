"""The container's file system: the image, what the host lends to every container, and the mounts asked for."""

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.container import kernel
from tests.lab.container.request import Mount, Refusal, Request

FROM_HOST = ("/dev", "/proc", "/sys")
FILES_FROM_HOST = ("/etc/hosts", "/etc/resolv.conf")
SPECIAL = ("tmpfs", "umount")


@dataclass
class Scratch:
    """A folder of this step, private to its namespaces, and the squashfuse processes that serve below it."""

    path: Path
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    may_mount: bool = True
    """False: images are unpacked, as by pyxis without squashfuse"""
    reused: bool = False
    """the container is one that an earlier step unpacked"""

    def folder(self, name: str, mode: int = 0o755) -> Path:
        made = self.path / name
        made.mkdir()
        made.chmod(mode)
        return made

    def squashfs(self, image: str, target: Path) -> bool:
        """Mount a squashfs file at `target` with squashfuse; False where that is not possible."""
        program = shutil.which("squashfuse", path="/usr/bin:/bin")
        if program is None or not self.may_mount or not os.access("/dev/fuse", os.R_OK | os.W_OK):
            return False
        silent = subprocess.DEVNULL
        server = subprocess.Popen((program, "-f", image, str(target)), stdin=silent, stdout=silent)
        deadline = time.monotonic() + 60
        while not os.path.ismount(target):
            if server.poll() is not None or time.monotonic() > deadline:
                server.kill()
                server.wait()
                return False
            time.sleep(0.002)
        self.servers.append(server)
        return True

    def end(self) -> None:
        for server in self.servers:
            server.kill()
            server.wait()


def need(program: str) -> str:
    """The absolute path of a program of the node."""
    path = shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin")
    if path is None:
        raise Refusal(f"{program} is not installed on this node")
    return path


def check_on_node(request: Request, here: str) -> None:
    """Refuse what only the node can know: the image and the sources of mounts must be there."""
    if request.image and not Path(request.image).is_file():
        raise Refusal(f"image file not found: {request.image}")
    if request.image:
        argv = (need("unsquashfs"), "-s", request.image)
        if subprocess.run(argv, capture_output=True, check=False).returncode != 0:
            raise Refusal(f"not a squashfs file: {request.image}")
    for mount in request.mounts:
        if mount.source not in SPECIAL and not Path(here, mount.source).exists():
            raise Refusal(f"mount source not found: {mount.source}")


def overlay_root(image: str, scratch: Scratch, in_user_namespace: bool) -> Path:
    """The image below a layer in memory that takes all writes and is lost with the step."""
    kernel.mount("tmpfs", str(scratch.path), "tmpfs", data="mode=755")
    lower, upper, work, root = (scratch.folder(name) for name in ("lower", "upper", "work", "root"))
    if not scratch.squashfs(image, lower):
        lower.rmdir()
        unpack(image, lower)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}" + (",userxattr" if in_user_namespace else "")
    kernel.mount("overlay", str(root), "overlay", data=options)
    return root


def unpack(image: str, target: Path) -> None:
    """Unpack the image to a new folder."""
    argv = (need("unsquashfs"), "-quiet", "-no-progress", "-no-xattrs", "-dest", str(target), image)
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)


def named_root(request: Request, scratch: Scratch, containers: Path) -> Path:
    """The unpacked image of a container that outlives its step; made on first use."""
    root = containers / f"pyxis_{request.name}"
    if root.exists() and request.name_mode == "create":
        raise Refusal(f"pyxis: error: container {request.name} already exists")
    if not root.exists() and (request.name_mode == "exec" or not request.image):
        raise Refusal(f"pyxis: error: container {request.name} does not exist and no image was given")
    scratch.reused = root.exists()
    if not scratch.reused:
        partial = containers / f".{request.name}.{os.getpid()}.partial"
        unpack(request.image, partial)
        partial.rename(root)
    kernel.mount("tmpfs", str(scratch.path), "tmpfs", data="mode=755")
    target = scratch.folder("root")
    kernel.bind(str(root), str(target))
    return target


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


def mount_all(request: Request, root: Path, scratch: Scratch, here: str, environ: Mapping[str, str]) -> None:
    """Bind what every container gets from the host, then what was asked for, then the batch script's copy."""
    for name, mode in (("tmp", 0o1777), ("run", 0o755)):
        kernel.bind(str(scratch.folder(f"new-{name}", mode)), _point(root, f"/{name}", folder=True))
    for name in FROM_HOST:
        kernel.bind(name, _point(root, name, folder=True))
    for name in FILES_FROM_HOST:
        if Path(name).exists():
            kernel.bind(name, _point(root, name, folder=False), read_only=True)
    home = environ.get("HOME", "")
    for mount in (*((Mount(home, home),) if request.mount_home and home else ()), *request.mounts):
        _mount(mount, root, scratch, here)
    if script := environ.get("RUNNER_LAB_SCRIPT"):
        kernel.bind(script, _point(root, script, folder=False), read_only=True)


def _mount(mount: Mount, root: Path, scratch: Scratch, here: str) -> None:
    target = os.path.normpath(f"/{mount.target}")
    if mount.source == "umount":
        kernel.umount(_point(root, target, folder=True))
    elif mount.source == "tmpfs":
        kernel.mount("tmpfs", _point(root, target, folder=True), "tmpfs")
    elif "sqsh" in mount.flags:
        if not scratch.squashfs(str(Path(here, mount.source)), Path(_point(root, target, folder=True))):
            raise Refusal(f"cannot mount the squashfs file {mount.source}")
    else:
        source = str(Path(here, mount.source))
        kernel.bind(source, _point(root, target, folder=Path(source).is_dir()), mount.read_only)


def add_user(root: Path, user: int, group: int, environ: Mapping[str, str]) -> None:
    """Make the user known inside, as enroot's 10-shadow hook does: a getpwuid() must not fail."""
    name, home = environ.get("SLURM_JOB_USER") or environ.get("USER", "user"), environ.get("HOME", "/")
    lines = (
        ("passwd", user, f"{name}:x:{user}:{group}:{name}:{home}:/bin/sh"),
        ("group", group, f"{name}:x:{group}:"),
    )
    for file, number, line in lines:
        path = Path(_point(root, f"/etc/{file}", folder=False))
        text = path.read_text(errors="surrogateescape")
        if not any(known.split(":")[2:3] == [str(number)] for known in text.splitlines()):
            path.write_text("\n".join((*text.splitlines(), line, "")), errors="surrogateescape")
