"""Programs of a newer Debian: its /usr in the cache, laid over this machine's by bubblewrap.

Everything else (folders, users, processes, network) is the machine's own, so a program of that Debian works beside the
others. It needs no root; the packages come from the mirror that apt uses.
"""

import hashlib
import shlex
import subprocess
from pathlib import Path

from tests.lab.images import cached
from tests.lab.processes import LabError

SUITE = "trixie"
PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge"),
    *("python3-minimal", "libpython3-stdlib", "gawk", "procps", "bubblewrap", "squashfuse", "fuse3"),
)
MMDEBSTRAP = (
    "mmdebstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}",
    "--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*",
    "--dpkgopt=path-exclude=/usr/share/locale/*", "--format=tar", SUITE,
)  # fmt: skip
COMMANDS = ("sbatch", "srun", "salloc", "squeue", "scontrol", "scancel", "sinfo", "sacct")
INSIDE = "/usr/lib/runner-lab-inside"  # exists where the newer /usr lies over this machine's
LAID_OVER = ("usr", "etc/alternatives", "etc/ld.so.cache")  # what must be the newer Debian's for its programs to work


def root() -> Path:
    """The folder that holds `LAID_OVER`; a minute and 60 MB of packages the first time."""
    key = hashlib.sha256(repr((MMDEBSTRAP, LAID_OVER, INSIDE)).encode()).hexdigest()[:12]

    def make(partial: Path) -> None:
        partial.mkdir()
        unpack = ("tar", "-x", "--no-same-owner", "-C", str(partial), *(f"./{name}" for name in LAID_OVER))
        with subprocess.Popen(MMDEBSTRAP, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as maker:
            unpacked = subprocess.run(unpack, stdin=maker.stdout, capture_output=True, text=True, check=False)
            _, said = maker.communicate()
        if maker.returncode or unpacked.returncode:
            raise LabError(f"no root of Debian {SUITE}: {said.decode()[-1500:]}{unpacked.stderr[-500:]}")
        (partial / INSIDE[1:]).touch()

    return cached(f"{SUITE}-{key}", make)


def prefix(folder: Path) -> tuple[str, ...]:
    """The words in front of a command that run it with the programs of the root in `folder`."""
    binds = [word for name in LAID_OVER for word in ("--ro-bind", str(folder / name), f"/{name}")]
    return ("bwrap", "--bind", "/", "/", "--dev-bind", "/dev", "/dev", *binds, "--")


def write_wrappers(folder: Path, target: Path) -> None:
    """Write scripts into `target` that run Slurm's commands of the root, for callers that know nothing of it."""
    target.mkdir(exist_ok=True)
    for name in COMMANDS:
        script = target / name
        enter = f"[ -e {INSIDE} ] || exec {shlex.join(prefix(folder))} /usr/bin/{name}"
        script.write_text(f'#!/bin/sh\n{enter} "$@"\nexec /usr/bin/{name} "$@"\n')
        script.chmod(0o755)
