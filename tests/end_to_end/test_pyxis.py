"""On NVIDIA's own pyxis and enroot, where a machine has them: what only the real programs can show."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import need
from tests.end_to_end.conftest import Runner, clean_environ, environment, write
from tests.lab.plugins import real_pyxis
from tests.lab.podman import Podman
from tests.lab.registry import Registry
from tests.lab.slurm import SlurmLab
from tests.waiting import until

pytestmark = [pytest.mark.pyxis, pytest.mark.enroot]


@pytest.fixture(scope="module")
def pyxis_slurm() -> Iterator[SlurmLab]:
    """One node: the virtual nodes of a lab share /run/enroot, where a step's container has the same name on each."""
    need("pyxis", "enroot", "squashfuse")
    with SlurmLab(nodes=1, plugins=(str(real_pyxis()),)) as lab:
        yield lab


@pytest.fixture
def boxed(project: Path, tmp_path: Path, pyxis_slurm: SlurmLab, busybox_sqsh: Path) -> Runner:
    """A project with an environment on the busybox image."""
    write(project, {"edf/box.toml": environment(busybox_sqsh, [f"{project}/data:/mnt"])})
    return Runner(project, clean_environ(tmp_path / "home", pyxis_slurm.environ), "generic-pyxis")


def test_each_task_knows_the_node_that_it_runs_on(boxed: Runner) -> None:
    _, log = boxed.finished("--env", "box", "--nodes", "1", "--tasks-per-node", "2", "--script", "jobs/hello.sh")
    ranks = [line for line in log.splitlines() if line.startswith("hello from rank")]
    assert sorted(ranks) == [f"hello from rank {rank} of 2 on nid001, Linux {os.uname().machine}" for rank in (0, 1)]


def test_a_step_that_was_killed_does_not_stop_the_next_attempt(boxed: Runner, pyxis_slurm: SlurmLab) -> None:
    """Its container is left behind under the name that the requeued job's step has too."""
    waits = "[ -e $RUNNER_RUN/again ] || { touch $RUNNER_RUN/up; sleep 600; }"
    run = boxed.launch("--env", "box", "--", "sh", "-c", waits)
    until((run / "up").exists, "the first attempt")
    job = boxed.status(run.name)["job_id"]
    (run / "again").touch()
    pyxis_slurm.run(("pkill", "-KILL", "-f", f"slurmstepd: \\[{job}\\.0\\]"))
    pyxis_slurm.run(("scontrol", "requeue", job))
    pyxis_slurm.wait_for(job, "COMPLETED", 90)
    log = (run / "job.log").read_text()
    assert "File already exists: " in log and "starting the step once more" in log
    left = f"^[^ ]*sh {run}/payload/"  # by the slurmstepd that was killed
    subprocess.run(("pkill", "-KILL", "-f", left), check=True)


def test_a_working_directory_that_the_image_lacks_is_named(boxed: Runner, project: Path) -> None:
    edf = (project / "edf/box.toml").read_text()
    write(project, {"edf/away.toml": 'workdir = "/srv/my work"\n' + edf})
    folder, _ = boxed.finished("--env", "away", "--", "pwd", code=1)
    told = boxed("why", folder.name).stdout
    assert "container-workdir" in told and "ls -ld '/srv/my work'" in told


def test_a_shell_opens_a_container_inside_the_allocation(boxed: Runner, project: Path) -> None:
    run = boxed.launch("--env", "box", "--", "sh", "-c", "touch $RUNNER_RUN/up; sleep 600")
    until((run / "up").exists, "the step")
    assert boxed("shell", run.name, "--", "cat", "/mnt/note.txt").stdout == "from the mount\n"
    assert boxed("shell", run.name, "--", "sh", "-c", "exit 5", code=5)
    boxed("cancel", run.name)


def test_an_attempt_in_place_uses_a_named_container_again(boxed: Runner) -> None:
    """Otherwise pyxis unpacks the image for each step. The mounts are there again."""
    fails_once = "cat /mnt/note.txt; stat -c 'unpacked %i %Z' /bin/busybox; [ -e $RUNNER_RUN/again ] || "
    fails_once += "{ touch $RUNNER_RUN/again; kill -KILL $$; }"

    def unpacked(*options: str) -> set[str]:
        command = ("--restart", "script_failure=1", *options, "--", "sh", "-c", fails_once)
        folder, log = boxed.finished("--env", "box", *command)
        assert ": the next attempt starts in this allocation, on the same nodes" in log
        assert log.count("from the mount\n") == 2 and (folder / "attempts/2").is_dir()
        return {line for line in log.splitlines() if line.startswith("unpacked ")}

    assert len(unpacked("--srun=--container-name=box")) == 1
    assert len(unpacked()) == 2


def test_pyxis_and_enroot_see_the_same_files_in_an_image_with_a_trace(
    boxed: Runner, pyxis_slurm: SlurmLab, registry: Registry, podman: Podman, busybox_image: str, tmp_path: Path
) -> None:
    podman.run("push", "--quiet", busybox_image, f"{registry.address}/hot:1")
    (tmp_path / "start.trace").write_text("/bin/busybox\n")
    images = {name: tmp_path / f"{name}.sqsh" for name in ("plain", "hot")}
    boxed("import", f"docker://{registry.address}/hot:1", "-o", str(images["plain"]))
    boxed(
        "import",
        f"docker://{registry.address}/hot:1",
        "-o",
        str(images["hot"]),
        "--trace",
        str(tmp_path / "start.trace"),
    )
    assert images["plain"].read_bytes() != images["hot"].read_bytes()
    sums = ("sh", "-c", "find / -xdev -type f -exec sha256sum {} + | sort")
    start = (shutil.which("enroot"), "start")
    for words in (lambda image: ("srun", f"--container-image={image}", *sums), lambda image: (*start, image, *sums)):
        plain, hot = (pyxis_slurm.run(tuple(map(str, words(image)))).stdout for image in images.values())
        assert plain == hot and "  /bin/busybox\n" in hot


@pytest.fixture(scope="module", params=["", "use_squashfuse=1"], ids=["unpacked", "mounted"])
def importer_slurm(request: pytest.FixtureRequest) -> Iterator[SlurmLab]:
    """One node whose pyxis gets its images from `runner-importer`."""
    need("pyxis", "enroot", "squashfuse")
    program = Path(sys.executable).parent / "runner-importer"
    with SlurmLab(nodes=1, plugins=(f"{real_pyxis()} importer={program} {request.param}",)) as lab:
        yield lab


def test_pyxis_gets_its_images_from_the_importer(
    importer_slurm: SlurmLab, registry: Registry, podman: Podman, busybox_image: str, tmp_path: Path
) -> None:
    """The second step finds the file. While a step runs from the file, its lease is there. The variables that a user
    sets for the program in the container do not reach the importer's Python."""
    podman.run("push", "--quiet", busybox_image, f"{registry.address}/box:1")
    store = tmp_path / ".cache/runner/images"
    leases = f"ls {store}/leases | wc -l"
    (tmp_path / "json.py").write_text("raise SystemExit('the module of the user')")
    python = (f"PYTHONPATH={tmp_path}", "PYTHONHOME=/opt/conda")
    srun = ("env", f"HOME={tmp_path}", *python, "srun", f"--container-image={registry.address}#box:1")
    mounted = f"--container-mounts={tmp_path}"
    shown = []
    for _ in range(2):
        shown.append(importer_slurm.run((*srun, mounted, "sh", "-c", f"echo $GREETING; {leases}")).stdout)
        until(lambda: not list((store / "leases").iterdir()), "the release")
    in_use = 1 if "squashfuse" in importer_slurm.plugins[0] else 0
    assert shown == [f"from the image\n{in_use}\n"] * 2
    assert len(list(store.glob("*.sqsh"))) == 1


def test_pyxis_shows_why_an_image_cannot_be_had(importer_slurm: SlurmLab, registry: Registry, tmp_path: Path) -> None:
    srun = ("env", f"HOME={tmp_path}", "srun", f"--container-image={registry.address}#box:none")
    failed = importer_slurm.run((*srun, "true"), check=False)
    assert failed.returncode and "box:none does not exist" in failed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("importer_slurm", ["use_squashfuse=1"], ids=["mounted"], indirect=True)
def test_a_cold_start_is_five_times_as_fast_as_with_pyxis_own_import(
    importer_slurm: SlurmLab, registry: Registry, podman: Podman, python_image: str, tmp_path: Path
) -> None:
    """From `srun` to the end of a short program, with nothing imported or downloaded before."""
    podman.run(
        "push", "--quiet", "--format", "v2s2", python_image, f"{registry.address}/python:1"
    )  # enroot reads no OCI
    image = f"--container-image={registry.address}#python:1"

    def seconds(lab: SlurmLab, home: Path) -> float:
        start = time.monotonic()
        done = lab.run(("env", f"HOME={home}", "srun", image, "python3", "-c", "print('up')"))
        assert done.stdout == "up\n"
        return time.monotonic() - start

    ours = min(seconds(importer_slurm, tmp_path / name) for name in ("a", "b"))
    (tmp_path / "bin").mkdir()
    enroot = tmp_path / "bin/enroot"
    enroot.write_text(f'#!/bin/sh\nENROOT_ALLOW_HTTP=y exec {shutil.which("enroot")} "$@"\n')
    enroot.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
        with SlurmLab(nodes=1, plugins=(str(real_pyxis()),)) as lab:
            theirs = min(seconds(lab, tmp_path / name) for name in ("c", "d"))
    print(f"cold: runner-importer {ours:.1f} s, pyxis' own import {theirs:.1f} s")
    assert theirs > 5 * ours
