"""The lab's SPANK plugins: compiled once per source, named in plugstack.conf."""

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.lab.processes import LabError

SOURCES = Path(__file__).parent / "spank"
LAUNCHER = Path(__file__).parent / "launcher.py"


def cache_folder() -> Path:
    """Where the lab keeps what is dear to make, outside the repository; shared by all labs of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "runner-lab"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compiled(name: str) -> Path:
    """The shared object of a plugin, built when its sources have changed."""
    sources = sorted((*SOURCES.glob("*.h"), SOURCES / f"{name}.c"))
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    target = cache_folder() / f"{name}-{digest}.so"
    if not target.exists():
        handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{name}-", suffix=".partial")
        os.close(handle)
        argv = ("gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
        built = subprocess.run(
            (*argv, "-o", partial, str(SOURCES / f"{name}.c")), capture_output=True, text=True, check=False
        )
        if built.returncode != 0:
            Path(partial).unlink()
            raise LabError(f"gcc refuses {name}.c: {built.stderr}")
        Path(partial).chmod(0o755)
        Path(partial).rename(target)
    return target


def real_pyxis() -> Path | None:
    """NVIDIA's own plugin, where this machine has one; `RUNNER_LAB_PYXIS` names one that is not installed."""
    named = os.environ.get("RUNNER_LAB_PYXIS")
    folders = ("/usr/lib/slurm", "/usr/local/lib/slurm", "/usr/lib/x86_64-linux-gnu/slurm-wlm")
    candidates = (Path(named),) if named else tuple(Path(folder, "spank_pyxis.so") for folder in folders)
    return next((path for path in candidates if path.exists()), None)


def plugstack(names: Sequence[str], folder: Path) -> str:
    """The text of plugstack.conf that loads the plugins; `folder` is where they keep a step's mounts. A name that is
    a path is a plugin that others made."""
    lines = [
        f"required {name} runtime_path={folder}/pyxis"
        if "/" in name
        else f"required {compiled(name)} launcher={LAUNCHER} folder={folder}"
        for name in names
    ]
    return "\n".join((*lines[:-1], *(line if line.endswith("/pyxis") else f"{line} last" for line in lines[-1:]), ""))
