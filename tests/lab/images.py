"""Squashfs files made without the product: what enroot would have written, from Debian's tools alone."""

import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

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


def write_enroot_files(
    root: Path, env: Mapping[str, str], workdir: str = "/", entrypoint: str = "", command: str = "/bin/sh"
) -> None:
    """Add /etc/environment, /etc/rc, /etc/rc.local and /etc/fstab to an unpacked image."""
    etc = root / "etc"
    etc.mkdir(exist_ok=True)
    (etc / "environment").write_text("".join(f"{name}={value}\n" for name, value in env.items()))
    (etc / "rc").write_text(RC.format(workdir=workdir, entrypoint=entrypoint, command=command))
    (etc / "rc.local").write_text("# to be rewritten by pyxis\n")
    (etc / "fstab").write_text("")


def busybox_root(root: Path) -> None:
    """Unpack the smallest useful image: every busybox command, an entrypoint that marks what it was given."""
    for name in ("bin", "etc", "tmp", "work"):
        (root / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(BUSYBOX, root / "bin/busybox")
    for command in subprocess.run((BUSYBOX, "--list"), capture_output=True, text=True, check=True).stdout.split():
        if command != "busybox":
            (root / "bin" / command).symlink_to("busybox")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    entrypoint = root / "bin/entrypoint"
    entrypoint.write_text('#!/bin/sh\nexport ENTRYPOINT_RAN=yes\nexec "$@"\n')
    entrypoint.chmod(0o755)


def make_busybox_squashfs(target: Path) -> Path:
    """Write the busybox image as a squashfs file with enroot's metadata; whole or not at all."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        root = Path(folder, "root")
        busybox_root(root)
        write_enroot_files(
            root,
            {"PATH": "/bin:/usr/bin", "GREETING": "from the image", "HOST_OR_IMAGE": "image"},
            workdir="/work",
            entrypoint="/bin/entrypoint",
        )
        partial = Path(folder, "image.sqsh")
        argv = ("mksquashfs", root, partial, "-all-root", "-noappend", "-no-progress", "-quiet", "-comp", "gzip")
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        partial.replace(target)
    return target
