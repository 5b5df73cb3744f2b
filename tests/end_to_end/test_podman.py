"""Without a scheduler, in podman: the run ends with its container, however it ends."""

import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Runner, clean_environ, environment, write
from tests.lab.podman import Podman
from tests.waiting import until


@pytest.fixture
def boxed(project: Path, tmp_path: Path, podman: Podman, busybox_sqsh: Path) -> Runner:
    """`runner --site local` that reaches the lab's podman, and an environment on the busybox squashfs."""
    write(project, {"edf/box.toml": environment(busybox_sqsh, [f"{project}/data:/mnt"], {"FROM_EDF": "e 'd' f"})})
    return Runner(project, {**clean_environ(tmp_path / "home", podman.environ), "SLURM_CONF": "/nonexistent"}, "local")


def containers(podman: Podman, boxed: Runner) -> str:
    """The containers that mount a folder of this test's project, with their states."""
    form = "{{.ID}} {{.State}} {{range .Mounts}}{{.}} {{end}}"
    lines = podman.run("ps", "--all", "--no-trunc", f"--format={form}").stdout.splitlines()
    return "".join(line for line in lines if str(boxed.project) in line)


@pytest.mark.uses("podman")
def test_output_mounts_variables_and_exit_code(boxed: Runner, podman: Podman) -> None:
    command = ("sh", "-c", "echo $GREETING, $FROM_EDF, $PWD; cat /mnt/note.txt; exit 8")
    folder, log = boxed.finished("--engine", "podman", "--env", "box", "--", *command, code=8)
    assert f"from the image, e 'd' f, {folder}/code\nfrom the mount\n" in log
    assert containers(podman, boxed) == ""
    done = boxed("shell", "box", "--engine", "podman", "--", "sh", "-c", "echo $GREETING; exit 2", code=2)
    assert done.stdout == "from the image\n"


@pytest.mark.uses("podman")
def test_cancel_ends_the_container(boxed: Runner, podman: Podman) -> None:
    folder = boxed.launch("--engine", "podman", "--env", "box", "--", "sh", "-c", "touch $RUNNER_RUN/up; sleep 1000")
    until((folder / "up").exists, "the container")
    boxed("cancel", "last")
    assert boxed.status("last")["state"] == "CANCELLED"
    assert boxed.status("last")["exit_code"] not in (0, None)
    until(lambda: containers(podman, boxed) == "", "the container to be gone")


@pytest.mark.uses("podman")
def test_a_job_that_saves_when_it_is_told_to_end_has_the_time_and_its_code_counts(
    boxed: Runner, podman: Podman
) -> None:
    """The files of the image stay until the program has ended, and its own exit code is the run's."""
    save = 'trap "sleep 1; cat /etc/environment > $RUNNER_RUN/saved; exit 41" TERM; touch $RUNNER_RUN/up; '
    wait = "while :; do sleep 0.1; done"
    folder = boxed.launch("--engine", "podman", "--env", "box", "--", "sh", "-c", save + wait)
    until((folder / "up").exists, "the program")
    # before podman has noted that the container runs, it does not pass signals on
    until(lambda: " Up " in containers(podman, boxed), "podman to pass signals on")
    boxed("cancel", "last")
    assert (boxed.status("last")["state"], boxed.status("last")["exit_code"]) == ("CANCELLED", 41)
    assert "GREETING" in (folder / "saved").read_text()
    until(lambda: subprocess.run(("pgrep", "-f", str(folder)), capture_output=True).stdout == b"", "no process is left")
