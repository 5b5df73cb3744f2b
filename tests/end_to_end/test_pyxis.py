"""On NVIDIA's own pyxis and enroot, where a machine has them: what only the real programs can show."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import need
from tests.end_to_end.conftest import Runner, clean_environ, environment, write
from tests.lab.plugins import real_pyxis
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
