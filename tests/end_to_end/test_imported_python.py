"""A real Python image that the tool imported computes: in bubblewrap, in podman, and through Slurm's plugin."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Runner, clean_environ, write
from tests.lab.podman import Podman
from tests.lab.slurm import SlurmLab

PROGRAM = "import ctypes, hashlib, json; print(json.dumps([6 * 7, hashlib.sha256(b'x').hexdigest()[:4]]))"


@pytest.fixture
def line(project: Path, tmp_path: Path, slurm: SlurmLab, podman: Podman, python_image: str) -> Runner:
    """A project with an environment on the file that `runner import podman://…` made of the image."""
    own = {
        name: value for name, value in podman.environ.items() if name.startswith(("CONTAINERS_", "REGISTRY_", "XDG_R"))
    }
    more = {**own, "XDG_CACHE_HOME": str(tmp_path / "cache"), "RUNNER_IMAGES": str(tmp_path / "images")}
    runner = Runner(project, {**clean_environ(tmp_path / "home", slurm.environ), **more}, "local")
    made = runner("import", f"podman://{python_image}").stdout.strip()
    write(project, {"edf/python.toml": f'image = "{made}"\n'})
    return runner


@pytest.mark.uses("podman", "squashfuse", "bubblewrap", "/dev/fuse")
def test_python_computes_inside(line: Runner, slurm: SlurmLab) -> None:
    expected = '[42, "2d71"]\n'
    for engine in ("sandbox", "podman"):
        done = line("shell", "python", "--engine", engine, "--", "python3", "-c", PROGRAM)
        assert done.stdout == expected, engine
    argv = ("srun", "--nodes=1", f"--environment={line.project}/edf/python.toml", "python3", "-c", PROGRAM)
    done = subprocess.run(argv, env=slurm.environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout == expected, done.stderr
