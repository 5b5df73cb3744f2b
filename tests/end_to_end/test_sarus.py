"""From the Containerfile to the job with Sarus Suite: build, store, launch, lock, gc.

podman and Slurm are real; `sarusctl` and the flag `--edf` are stand-ins that follow the documentation
(tests/lab/sarusctl.py, tests/lab/container/sarus.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import need
from tests.images.bench import TINY, Bench
from tests.lab.parts import PLUGINS, SLURM
from tests.lab.podman import Podman
from tests.lab.sarus import Sarus
from tests.lab.slurm import SlurmLab
from tests.schemas import check

EDF = 'image = "${{RUNNER_IMAGES}}/{name}.sqsh"\nentrypoint = false\n[env]\nOWN = "of the EDF, ${{GREETING}}"\n'


@pytest.fixture(scope="module")
def skybox() -> Iterator[SlurmLab]:
    """A private Slurm with the stand-in of Skybox."""
    need(*SLURM, *PLUGINS)
    with SlurmLab(nodes=1, plugins=("sarus",)) as lab:
        yield lab


@pytest.fixture
def line(tmp_path: Path, podman: Podman, skybox: SlurmLab) -> tuple[Bench, Sarus]:
    """A project on a site of the lab."""
    sarus = Sarus(tmp_path / "sarus")
    environ = {**podman.environ, **skybox.environ, **sarus.environ}
    environ |= {name: value for name, value in podman.environ.items() if name.startswith(("CONTAINERS_", "XDG_"))}
    bench = Bench(tmp_path, environ)
    sarus.write_site(Path(bench.environ["HOME"]))
    bench.environ |= {"RUNNER_SITE": "sarus-lab"}
    del bench.environ["RUNNER_IMAGES"]
    (bench.root / "edf").mkdir()
    return bench, sarus


def runner(bench: Bench, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    child = bench.start(*words)
    stdout, stderr = child.communicate(timeout=300)
    assert child.returncode == code, f"{stdout}\n{stderr}"
    return subprocess.CompletedProcess(words, code, stdout, stderr)


def test_the_whole_line_from_containerfile_to_job(line: tuple[Bench, Sarus]) -> None:
    bench, sarus = line
    bench.write("whole", TINY + "LABEL whole=1\n")
    (bench.root / "edf/whole.toml").write_text(EDF.format(name="whole"))
    words = ("launch", "--env", "whole", "--wait", "--", "sh", "-c", 'echo "it says: $OWN"')
    missing = runner(bench, *words, code=1)
    assert "runner build whole --import" in missing.stderr and not list((sarus.folder / "runs").glob("*-0001"))
    reference = runner(bench, "build", "whole", "--import").stdout.strip()
    run = sarus.folder / "runs" / runner(bench, *words).stdout.strip()
    assert "it says: of the EDF, hello there" in (run / "job.log").read_text()
    edf = tomllib.loads((run / "environment.toml").read_text())
    lock = tomllib.loads((run / "lock.toml").read_text())
    assert edf["image"] == reference == lock["image"]["reference"]
    assert len(lock["image"]["digest"]) == 64 and lock["recipe"]["name"] == "whole"
    assert "--edf=" in (run / "job.sbatch").read_text()
    assert runner(bench, "gc", reference).stdout == f"{reference}\n"
    assert sarus.calls() == [f"migrate {reference}", f"rmi {reference}"]


def test_launch_builds_what_is_missing(line: tuple[Bench, Sarus]) -> None:
    bench, sarus = line
    bench.write("made", TINY + "LABEL made=1\n")
    (bench.root / "edf/made.toml").write_text(EDF.format(name="made"))
    run = runner(bench, "launch", "--build", "--env", "made", "--wait", "--", "true").stdout.strip()
    (call,) = sarus.calls()
    edf = tomllib.loads((sarus.folder / "runs" / run / "environment.toml").read_text())
    assert call == f"migrate {edf['image']}"


def test_where_podmans_storage_dies_with_the_job_one_job_builds_and_migrates(line: tuple[Bench, Sarus]) -> None:
    bench, sarus = line
    storage = Path(f"/tmp/rsarus-{os.getpid()}")  # podman takes 50 characters
    more = f'container_storage = {{ value = "{storage}", source = "lab" }}\n'
    sarus.write_site(Path(bench.environ["HOME"]), more=more)
    bench.write("job", TINY + "LABEL job=1\n")
    try:
        built = runner(bench, "build", "job", "--import", "--json").stdout
        reference = check("build", built)["reference"]
        assert sarus.calls() == [f"migrate {reference}"] and not any(storage.iterdir())
        assert f"{reference} " in runner(bench, "images").stdout
    finally:
        shutil.rmtree(storage, ignore_errors=True)


def test_a_shell_is_a_step_in_the_container(line: tuple[Bench, Sarus]) -> None:
    bench, _ = line
    bench.write("shown", TINY + "LABEL shown=1\n")
    (bench.root / "edf/shown.toml").write_text(EDF.format(name="shown"))
    runner(bench, "build", "shown", "--import")
    assert runner(bench, "shell", "shown", "--", "sh", "-c", 'echo "$OWN"').stdout == "of the EDF, hello there\n"
