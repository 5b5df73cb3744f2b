"""Images made without the product: OCI images in podman, and squashfs files as enroot would have written them."""

import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.lab.plugins import cache_folder
from tests.lab.podman import Podman
from tests.lab.processes import LabError

# The behaviour that enroot documents for /etc/rc: enter the working directory, source rc.local, run the command.
RC = """\
mkdir -p "{workdir}" 2> /dev/null
cd "{workdir}" && unset OLDPWD || exit 1
if [ -s /etc/rc.local ]; then
    . /etc/rc.local
fi
if [ $# -gt 0 ]; then
    exec {entrypoint} "$@"
else
    exec {entrypoint} {command}
fi
"""
BUSYBOX = "/bin/busybox"
BUSYBOX_ENV = {"PATH": "/bin:/usr/bin", "GREETING": "from the image", "HOST_OR_IMAGE": "image"}
BUSYBOX_ENTRYPOINT = '#!/bin/sh\nexport ENTRYPOINT_RAN=yes\nexec "$@"\n'
CONTAINERFILE = """\
FROM scratch
COPY root /
ENV {env}
WORKDIR /srv
{entrypoint}
CMD ["/bin/sh"]
"""

PYTHON_SUITE = "bookworm"
PYTHON_PACKAGES = ("python3",)
PYTHON_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
PYTHON_IMAGE = "localhost/lab/python:bookworm"
MMDEBSTRAP = (
    "mmdebstrap", "--variant=minbase", f"--include={','.join(PYTHON_PACKAGES)}",
    '--dpkgopt=path-exclude=/usr/share/doc/*', '--dpkgopt=path-exclude=/usr/share/man/*',
    '--dpkgopt=path-exclude=/usr/share/locale/*', PYTHON_SUITE,
)  # fmt: skip


def enroot_files(
    env: Mapping[str, str], workdir: str = "/", entrypoint: str = "", command: str = "/bin/sh"
) -> dict[str, str]:
    """The metadata that enroot adds to an image, by path."""
    return {
        "etc/environment": "".join(f"{name}={value}\n" for name, value in env.items()),
        "etc/rc": RC.format(workdir=workdir, entrypoint=entrypoint, command=command),
        "etc/rc.local": "# to be rewritten by pyxis\n",
        "etc/fstab": "",
    }


def busybox_root(root: Path) -> None:
    """Unpack the smallest useful image: every busybox command, and an entrypoint that leaves a mark."""
    for name in ("bin", "dev", "etc", "proc", "root", "run", "srv", "sys", "tmp"):
        (root / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(BUSYBOX, root / "bin/busybox")
    listed = subprocess.run((BUSYBOX, "--list"), capture_output=True, text=True, check=True).stdout.split()
    for command in listed:
        if command != "busybox":
            (root / "bin" / command).symlink_to("busybox")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "bin/entrypoint").write_text(BUSYBOX_ENTRYPOINT)
    (root / "bin/entrypoint").chmod(0o755)


def make_busybox_squashfs(target: Path) -> Path:
    """Write the busybox image as a squashfs file with enroot's metadata; whole or not at all."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        root, partial = Path(folder, "root"), Path(folder, "image.sqsh")
        busybox_root(root)
        for name, text in enroot_files(BUSYBOX_ENV, workdir="/srv", entrypoint="/bin/entrypoint").items():
            (root / name).write_text(text)
        argv = ("mksquashfs", root, partial, "-all-root", "-noappend", "-no-progress", "-quiet", "-comp", "gzip")
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        partial.replace(target)
    return target


def build_busybox(podman: Podman, name: str = "localhost/lab/busybox:1", entrypoint: bool = False) -> str:
    """Build the same image with podman, FROM scratch; its name."""
    words = " ".join(f'{key}="{value}"' for key, value in BUSYBOX_ENV.items())
    entry = 'ENTRYPOINT ["/bin/entrypoint"]' if entrypoint else ""
    with tempfile.TemporaryDirectory(dir=podman.folder / "tmp") as context:
        busybox_root(Path(context, "root"))
        Path(context, "Containerfile").write_text(CONTAINERFILE.format(env=words, entrypoint=entry))
        podman.run("build", "--quiet", "--tag", name, context)
    return name


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The file or folder `name` of the cache; `make` makes it when it is not there: once, and only whole."""
    target = cache_folder() / name
    with (target.parent / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial = target.with_name(f".{name}.partial")
            if partial.is_dir():
                shutil.rmtree(partial)
            partial.unlink(missing_ok=True)
            make(partial)
            partial.replace(target)
    return target


def python_tar() -> Path:
    """The root file system of a small Debian with Python as a tar file; two minutes the first time."""
    key = hashlib.sha256(repr(MMDEBSTRAP).encode()).hexdigest()[:12]

    def make(partial: Path) -> None:
        argv = ("nice", *MMDEBSTRAP, "--format=tar", str(partial))
        made = subprocess.run(argv, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise LabError(f"mmdebstrap ended with {made.returncode}: {made.stderr[-2000:]}")

    return cached(f"python-{key}.tar", make)


def import_python(podman: Podman, name: str = PYTHON_IMAGE) -> str:
    """Put the Python image into podman's storage; its name."""
    changes = [f"--change=ENV {key}={value}" for key, value in PYTHON_ENV.items()]
    podman.run("import", "--quiet", *changes, '--change=CMD ["python3"]', str(python_tar()), name)
    return name


def python_squashfs() -> Path:
    """The Python image as squashfs file with enroot's metadata, written by tar2sqfs."""
    source = python_tar()
    files = enroot_files(PYTHON_ENV, command="python3")
    key = hashlib.sha256(repr((source.name, files)).encode()).hexdigest()[:12]
    return cached(f"python-{key}.sqsh", lambda partial: _tar_to_squashfs(source, files, partial))


def _tar_to_squashfs(source: Path, files: Mapping[str, str], target: Path) -> None:
    argv = ("tar2sqfs", "--compressor", "zstd", "--comp-extra", "level=1", "--quiet", "--force", str(target))
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        assert writer.stdin is not None and writer.stderr is not None
        with tarfile.open(source) as old, tarfile.open(fileobj=writer.stdin, mode="w|") as new:
            for member in old:
                name = os.path.normpath(member.name)
                if name not in files and not name.startswith("dev/"):
                    new.addfile(member, old.extractfile(member) if member.isreg() else None)
            for name, text in files.items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(text.encode()), 0o644
                new.addfile(entry, io.BytesIO(text.encode()))
        writer.stdin.close()
        said = writer.stderr.read().decode()
    if writer.returncode != 0:
        raise LabError(f"tar2sqfs ended with {writer.returncode}: {said}")
