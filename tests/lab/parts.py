"""The account of real parts: which programs this machine has, and how many tests ran on each.

A test runs on a part when it uses a fixture that is made of it, when it starts the part's program itself, or when it
says so: `@pytest.mark.uses("bubblewrap")` for programs that only start further down.
"""

import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab.plugins import real_pyxis

REQUIRE = "RUNNER_REQUIRE_PARTS"  # set by .ci/run: a missing or unused part of Debian is a failure there
ALL = "RUNNER_TEST_ALL"  # set by `nox -s tests-all`: every tier runs, with new random examples


def every_tier() -> bool:
    """Whether all tiers run, and may take their time."""
    return ALL in os.environ


def which(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


@dataclass(frozen=True)
class Part:
    """A real program that tests run on."""

    name: str
    programs: tuple[str, ...]
    debian: str = ""  # the Debian package; empty: not to be had there, or optional
    version: tuple[str, ...] = ("--version",)  # what makes the first program tell its version; empty: it cannot
    present: Callable[[], bool] | None = None  # where a program on PATH does not tell
    everywhere: bool = True  # False: only `nox -s tests-all` has a test on it
    for_root: bool = False  # an ordinary user's suite has no test on it

    def is_present(self) -> bool:
        return self.present() if self.present else all(map(which, self.programs))

    def version_text(self) -> str:
        """The version number in the first line that the program prints; "" where it has none."""
        if not self.version or not (path := which(self.programs[0])):
            return ""
        said = subprocess.run((path, *self.version), capture_output=True, text=True, check=False, timeout=60)
        found = re.search(r"\d+(\.\d+)+", said.stdout + said.stderr)
        return found.group() if found else ""


def _rootless() -> bool:
    if not which("newuidmap"):
        return False
    if os.geteuid() == 0:
        return which("useradd") is not None  # tests make a user of their own, with subordinate ids
    return pwd.getpwuid(os.geteuid()).pw_name in Path("/etc/subuid").read_text()


def _gpu() -> bool:
    said = which("nvidia-smi")
    return bool(said) and subprocess.run((str(said), "-L"), capture_output=True, check=False).returncode == 0


def _dockerd() -> bool:
    said = which("docker")
    return bool(said) and subprocess.run((str(said), "info"), capture_output=True, check=False).returncode == 0


PARTS = (
    Part("slurmctld, slurmd", ("slurmctld", "slurmd"), "slurm-wlm", ("-V",)),
    Part("srun, sbatch", ("srun", "sbatch"), "slurm-client", ()),  # they tell their version only with a slurm.conf
    Part("munge", ("munged",), "munge"),
    Part("gcc, spank.h", ("gcc",), "libslurm-dev", present=lambda: bool(which("gcc")) and _header().exists()),
    Part("podman", ("podman",), "podman"),
    Part("rootless", ("newuidmap", "newgidmap"), "uidmap", (), present=_rootless),
    Part("docker-registry", ("docker-registry",), "docker-registry"),
    Part("skopeo", ("skopeo",), "skopeo"),
    Part("umoci", ("umoci",), "umoci", for_root=True),
    Part("mksquashfs", ("mksquashfs",), "squashfs-tools", ("-version",)),
    Part("unsquashfs", ("unsquashfs",), "squashfs-tools", ("-version",)),
    Part("tar2sqfs", ("tar2sqfs",), "squashfs-tools-ng"),
    Part("squashfuse", ("squashfuse",), "squashfuse", ("--help",)),
    Part("/dev/fuse", (), "fuse3", (), present=lambda: os.access("/dev/fuse", os.R_OK | os.W_OK)),
    Part("bubblewrap", ("bwrap",), "bubblewrap"),
    Part("busybox", ("busybox",), "busybox-static", ()),
    Part("mmdebstrap", ("mmdebstrap",), "mmdebstrap"),
    Part("shellcheck", ("shellcheck",), "shellcheck"),
    Part("faketime", ("faketime",), "faketime", ("--version",), everywhere=False),
    Part("chromium", ("chromium",)),
    Part("dockerd", ("docker",), present=_dockerd),
    Part("enroot", ("enroot",), version=("version",)),
    Part("pyxis", (), version=(), present=lambda: real_pyxis() is not None),
    Part("apptainer", ("apptainer",)),
    Part("sarus", ("sarusctl",)),
    Part("GPU", ("nvidia-smi",), present=_gpu),
)
BY_NAME = {part.name: part for part in PARTS}
# a program named sarusctl is the lab's stand-in, unless the machine has Sarus Suite
BY_PROGRAM = {program: part.name for part in PARTS for program in part.programs if program != "sarusctl"}
BY_MARKER = {
    "gpu": "GPU",
    "pyxis": "pyxis",
    "enroot": "enroot",
    "docker": "dockerd",
    "apptainer": "apptainer",
    "sarus": "sarus",
}
MAY_BE_SKIPPED = frozenset((*BY_MARKER, "network", "training", "slow"))

SLURM = ("slurmctld, slurmd", "srun, sbatch", "munge")
PLUGINS = ("gcc, spank.h", "unsquashfs")
BY_FIXTURE: Mapping[str, tuple[str, ...]] = {
    "slurm": SLURM,
    "plain_slurm": SLURM,
    "skybox": SLURM,
    "sarus_slurm": SLURM,
    "registry": ("docker-registry",),
    "podman": ("podman",),
    "docker_socket": ("podman",),
    "busybox_sqsh": ("mksquashfs", "busybox"),
    "busybox_image": ("podman", "busybox"),
    "python_sqsh": ("mmdebstrap", "tar2sqfs"),
    "python_image": ("mmdebstrap", "podman"),
    "ordinary_user": (),
}


def behind_slurm(lines: Iterable[str]) -> frozenset[str]:
    """The parts that made the containers which a lab's `containers.log` lists."""
    used: set[str] = set()
    for line in lines:
        used.update(PLUGINS)
        if line == "squashfuse":
            used.update(("squashfuse", "/dev/fuse"))
    return frozenset(used)


def _header() -> Path:
    return Path("/usr/include/slurm/spank.h")


def missing(names: Iterable[str]) -> list[str]:
    """The parts among `names` that this machine lacks, each with the package that brings it."""
    absent = [BY_NAME[name] for name in names if not BY_NAME[name].is_present()]
    return [f"{part.name} (apt-get install {part.debian})" if part.debian else part.name for part in absent]


_started: set[str] = set()


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.posix_spawn", "os.exec") and arguments[0] is not None:
        _started.add(os.path.basename(os.fsdecode(arguments[0])))  # noqa: PTH119 - bytes and text alike
        if event == "subprocess.Popen" and arguments[1] and not isinstance(arguments[1], str | bytes):
            _started.add(os.path.basename(os.fsdecode(arguments[1][0])))  # noqa: PTH119


def listen() -> None:
    """Note every program that this process starts from now on."""
    sys.addaudithook(_hear)


def started() -> frozenset[str]:
    """The parts whose programs were started since the last call."""
    names = frozenset(BY_PROGRAM[program] for program in _started if program in BY_PROGRAM)
    _started.clear()
    return names


def table(counts: Mapping[str, int]) -> list[str]:
    """The account as lines of text: part, version, present?, number of tests."""
    rows = [("part", "version", "present", "tests")]
    for part in PARTS:
        present = part.is_present()
        rows.append(
            (
                part.name,
                part.version_text() if present else "",
                "yes" if present else "no",
                str(counts.get(part.name, 0)),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]


# why a test is left out where an ordinary user runs the suite; where root runs it, nothing says so
_NEEDS_ROOT = re.compile(r"\broot\b|run as an ordinary user already|belong to subordinate ids")


def may_skip(reason: str) -> bool:
    """Whether a skip is one of those that an ordinary user must expect."""
    return os.geteuid() != 0 and _NEEDS_ROOT.search(reason) is not None


def complaints(counts: Mapping[str, int]) -> list[str]:
    """What is wrong where every part of Debian that this tier uses must be there and in use."""
    asked = [part for part in PARTS if part.debian and (part.everywhere or every_tier())]
    found = [f"missing part: {name}" for name in missing(part.name for part in asked)]
    user = os.geteuid() != 0
    unused = (
        part for part in asked if part.is_present() and not counts.get(part.name) and not (user and part.for_root)
    )
    return [*found, *(f"no test ran on {part.name}" for part in unused)]
