"""Run the program `look` inside of an environment, and read what it saw."""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab.images import busybox_root, enroot_files

SOURCE = Path(__file__).with_name("look.c")
EXIT_CODE = 7
ENTRYPOINT = '#!/bin/sh\nexport ENTRYPOINT_RAN=yes\nexec "$@"\n'
# what Debian's own file does, which is how images lose their PATH when an engine starts a login shell
PROFILE_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games"
PROFILE = f'PATH="{PROFILE_PATH}"\nexport PATH\n'


@dataclass(frozen=True)
class Image:
    """An image that holds `look`, as a squashfs file with enroot's metadata and, where podman is, in its storage."""

    env: Mapping[str, str]
    workdir: str
    squashfs: str = ""
    name: str = ""


IMAGE = Image(
    env={
        "PATH": "/image/bin:/bin:/usr/bin",
        "GREETING": "from the image",
        "HOST_OR_IMAGE": "image",
        "HERE": "/srv/here",
        "ENTRYPOINT_RAN": "no",
    },
    workdir="/srv",
)


@dataclass(frozen=True)
class Seen:
    """What one process saw."""

    exit_code: int
    environ: Mapping[str, str]
    argv: tuple[str, ...]
    cwd: str
    hostname: str
    uid: int
    gpus: tuple[str, ...]
    mounts: Mapping[str, bool]
    """mount point -> whether it is read-only"""
    stdin: str
    places: Mapping[str, Mapping[str, Any] | None]
    """path -> folder, writable, uid and the text of its file `mark`; None: nothing is there"""


def compile_to(target: Path) -> Path:
    """Build `look`; its path."""
    argv = ("gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-static", "-o", str(target), str(SOURCE))
    subprocess.run(argv, check=True)
    return target


def make_root(root: Path) -> None:
    """The files of the image: busybox, `look`, an entrypoint that leaves a trace, and Debian's way with PATH."""
    busybox_root(root)
    compile_to(root / "bin/look")
    (root / "bin/entrypoint").write_text(ENTRYPOINT)
    (root / "etc/profile").write_text(PROFILE)
    for name in ("srv/here", "image/bin", "data", "kept"):
        (root / name).mkdir(parents=True)
    (root / "kept/mark").write_text("the image's\n")


def make_squashfs(target: Path) -> None:
    """The image as a squashfs file with enroot's metadata."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        root = Path(folder, "root")
        make_root(root)
        for name, text in enroot_files(IMAGE.env, IMAGE.workdir, "/bin/entrypoint").items():
            (root / name).write_text(text)
        argv = ("mksquashfs", str(root), str(target), "-all-root", "-noappend", "-no-progress", "-quiet")
        subprocess.run((*argv, "-comp", "gzip"), check=True, stdout=subprocess.DEVNULL)


def build_image(engine: str, environ: Mapping[str, str], name: str = "localhost/lab/look:1") -> str:
    """The image in the storage of podman or docker; its name."""
    words = " ".join(f'{key}="{value}"' for key, value in IMAGE.env.items())
    text = f"FROM scratch\nCOPY root /\nENV {words}\nWORKDIR {IMAGE.workdir}\n"
    with tempfile.TemporaryDirectory() as context:
        make_root(Path(context, "root"))
        Path(context, "Dockerfile").write_text(f'{text}ENTRYPOINT ["/bin/entrypoint"]\nCMD ["/bin/sh"]\n')
        argv = (engine, "build", "--quiet", "--tag", name, context)
        subprocess.run(argv, env=environ, check=True, stdout=subprocess.DEVNULL)
    return name


def words(places: tuple[str, ...], arguments: tuple[str, ...], program: str = "/bin/look") -> tuple[str, ...]:
    """The command that looks at `places` and is handed `arguments`."""
    return (program, str(len(places)), *places, *arguments)


def read(done: subprocess.CompletedProcess[bytes]) -> Seen | None:
    """What the finished command saw; None where it never ran."""
    start = done.stdout.find(b'{"environ"')
    if start < 0:
        return None
    data = _whole(json.loads(done.stdout[start:]))
    pairs = (entry.split("=", 1) for entry in data["environ"] if "=" in entry)
    return Seen(
        exit_code=done.returncode,
        environ=dict(pairs),
        argv=tuple(data["argv"]),
        cwd=data["cwd"],
        hostname=data["hostname"],
        uid=data["uid"],
        gpus=tuple(sorted(data["gpus"])),
        mounts=dict(_mounts(data["mountinfo"])),
        stdin=data["stdin"],
        places=data["places"],
    )


def _whole(value: Any) -> Any:
    """The value with each text's bytes, written as one character each, read as UTF-8."""
    if isinstance(value, str):
        return os.fsdecode(value.encode("latin-1"))
    if isinstance(value, list):
        return [_whole(entry) for entry in value]
    if isinstance(value, dict):
        return {_whole(key): _whole(entry) for key, entry in value.items()}
    return value


def _mounts(table: str) -> list[tuple[str, bool]]:
    rows = [line.split(" ") for line in table.splitlines()]
    return [
        (re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), row[4]), "ro" in row[5].split(",")) for row in rows
    ]
