"""How real containers begin and end, for root and for an ordinary user; what is seen inside: test_equivalence.py."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from runner.expansion import expand
from tests.environments.inside import environment_of, prepared, run_inside
from tests.lab.ordinary_user import ordinary_user
from tests.waiting import until

HOST = {"ONLY_HOST": "host", "HOST_OR_IMAGE": "host", "GREETING": "host", "LC_ALL": "C", "LD_PRELOAD": ""}
ENGINES = ("sandbox", "sandbox-unpacked", "podman", "ce", "pyxis")


@pytest.fixture(params=ENGINES)
def enter(request, tmp_path, busybox_sqsh):
    """enter(EDF, *COMMAND, **more): the finished command, run inside of the busybox image."""
    engine, _, unpacked = request.param.partition("-")
    slurm = request.getfixturevalue("slurm") if engine in {"ce", "pyxis"} else None
    if engine == "podman":
        request.getfixturevalue("podman")
    own = {"RUNNER_SANDBOX_UNPACK": "1"} if unpacked else {}

    def run(edf: str, *command: str, environ=None, **more) -> subprocess.CompletedProcess[bytes]:
        environment = environment_of(tmp_path, f'image = "{busybox_sqsh}"\n{edf}')
        return run_inside(
            environment, engine, tmp_path / "run", *command, environ={**own, **(environ or {})}, slurm=slurm,
            cwd=tmp_path, **more,
        )  # fmt: skip

    (tmp_path / "run").mkdir()
    return run


pytestmark = pytest.mark.uses("squashfuse", "/dev/fuse", "bubblewrap", "unsquashfs")


def lines(done) -> list[str]:
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


def test_writable_by_default_and_what_is_written_is_lost(enter):
    assert lines(enter("", "sh", "-c", "echo x > /etc/new && cat /etc/new")) == ["x"]
    assert lines(enter("", "sh", "-c", "ls /etc/new 2>&1 || true")) == ["ls: /etc/new: No such file or directory"]
    assert lines(enter("writable = false\n", "sh", "-c", "touch /etc/new || echo refused")) == ["refused"]


def test_exit_code_arguments_stdin_and_devices(enter):
    assert enter("", "sh", "-c", "exit 75").returncode == 75
    words = ("", "two words", "it's", "$HOME", "*", "a\nb", "--", "-x")
    script = (
        'for word; do printf "%s|" "$word"; done; test -c /dev/null && test -d /dev/shm && test -d /proc/1 && echo yes'
    )
    assert enter("", "sh", "-c", script, "sh", *words).stdout.decode() == "|".join(words) + "|yes\n"


def test_a_missing_mount_source_ends_with_its_name(enter, tmp_path):
    done = enter(f'mounts = ["{tmp_path}/nowhere:/x"]\n', "true")
    assert done.returncode != 0 and b"nowhere" in done.stderr


def test_an_undefined_variable_ends_with_its_name(enter):
    done = enter('[env]\nA = "${NOWHERE_DEFINED}"\n', "true")
    assert done.returncode != 0 and b"NOWHERE_DEFINED" in done.stderr


def test_the_sandbox_mounts_a_squashfs_file_as_data(tmp_path, busybox_sqsh):
    (tmp_path / "run").mkdir()
    text = f'image = "{busybox_sqsh}"\nmounts = ["{busybox_sqsh}:/data:sqsh"]\n'
    done = run_inside(environment_of(tmp_path, text), "sandbox", tmp_path / "run", "cat", "/data/etc/passwd")
    assert done.stdout.startswith(b"root:x:0:0:")


def test_the_sandbox_records_what_a_command_reads(tmp_path, busybox_sqsh):
    """squashfuse writes a log to RUNNER_TRACE, from which `runner shell --trace` makes a trace."""
    (tmp_path / "run").mkdir()
    environment, log = environment_of(tmp_path, f'image = "{busybox_sqsh}"\n'), tmp_path / "log"
    command = ("sh", "-c", "cat /etc/passwd && env")
    done = run_inside(environment, "sandbox", tmp_path / "run", *command, environ={"RUNNER_TRACE": str(log)})
    assert done.returncode == 0 and done.stdout.startswith(b"root:x:0:0:")
    assert b"RUNNER_TRACE" not in done.stdout, "a container that the command starts is not recorded"
    assert re.search(rb"open\[\d+\] flags: \S+ /etc/passwd\n", log.read_bytes())
    assert re.search(rb"read\[\d+\] \d+ bytes from 0 ", log.read_bytes())


def test_the_sandbox_reads_ahead_what_the_image_lists(tmp_path, busybox_sqsh):
    """Pieces of at most 8 MiB, of the lines `hot OFFSET LENGTH` in the last 4 KiB; other lines are ignored."""
    image, log, programs = tmp_path / "hot.sqsh", tmp_path / "log", tmp_path / "programs"
    lines = b"hot 4096 16777217\nhot x 1\nhot 5 0\nother 1 2\nhot 7000000000 2\n"
    image.write_bytes(busybox_sqsh.read_bytes() + lines.ljust(4096, b"\0"))
    for folder in (tmp_path / "run", log, programs):
        folder.mkdir()
    # one file per call: the calls run at the same time
    (programs / "dd").write_text(f'#!/bin/sh\necho "$@" > {log}/part-$$ && mv {log}/part-$$ {log}/call-$$\n')
    (programs / "dd").chmod(0o755)
    environment = environment_of(tmp_path, f'image = "{image}"\nmounts = ["{log}:/log"]\n')
    wait = "until set -- /log/call-* && test $# = 4; do sleep 0.05; done"
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    done = run_inside(environment, "sandbox", tmp_path / "run", "sh", "-c", wait, environ=path)
    assert done.returncode == 0, done.stderr
    calls = [dict(word.split("=") for word in call.read_text().split()) for call in log.iterdir()]
    assert {call["if"] for call in calls} == {str(image)}
    assert sorted((int(call["skip"]), int(call["count"])) for call in calls) == [
        *((4096, 8 << 20), (4096 + (8 << 20), 8 << 20), (4096 + (16 << 20), 1), (7_000_000_000, 2)),
    ]
    other = {**path, "SLURM_LOCALID": "1"}  # another task of the node, with the same page cache
    assert run_inside(environment, "sandbox", tmp_path / "run", "sleep", "0.5", environ=other).returncode == 0
    assert len(list(log.iterdir())) == len(calls)


@pytest.mark.parametrize("unpack", ["", "1"])
def test_the_sandbox_works_for_an_ordinary_user(tmp_path, busybox_sqsh, unpack):
    with ordinary_user() as user:
        run_folder = user.home / "run"
        image = shutil.copy(busybox_sqsh, user.home / "image.sqsh")
        environment = environment_of(tmp_path, f'image = "{image}"\nmounts = ["${{RUNNER_RUN}}:${{RUNNER_RUN}}"]\n')
        prepared(environment, "sandbox", run_folder)
        subprocess.run(("chown", "-R", f"{user.name}", str(run_folder)), check=False)
        script = 'id -un; pwd; touch /etc/x && echo writable; echo mine > "$RUNNER_RUN/mine"; id -u'
        words = ("env", f"RUNNER_RUN={run_folder}", f"RUNNER_SANDBOX_UNPACK={unpack}")
        done = user.run(*words, "bash", f"{run_folder}/payload/sandbox.sh", "sh", "-c", script)
        assert done.returncode == 0, done.stderr
        name, folder, writable, number = done.stdout.split()
        assert (name, folder, writable) == (user.name, "/srv", "writable")
        assert int(number) == (run_folder / "mine").stat().st_uid == user.home.stat().st_uid
        left = [path for path in Path("/tmp").glob(f"runner-unpacked-{number}/*")]
        assert left == []


@pytest.mark.uses("rootless")
def test_podman_enters_a_squashfs_file_for_an_ordinary_user(tmp_path, busybox_sqsh):
    with ordinary_user() as user:
        run_folder = user.home / "run"
        image = shutil.copy(busybox_sqsh, user.home / "image.sqsh")
        environment = environment_of(tmp_path, f'image = "{image}"\nmounts = ["${{RUNNER_RUN}}:${{RUNNER_RUN}}"]\n')
        prepared(environment, "podman", run_folder)
        subprocess.run(("chown", "-R", f"{user.name}", str(run_folder)), check=False)
        script = 'pwd; echo "$GREETING"; touch /etc/x && echo writable; echo mine > "$RUNNER_RUN/mine"; exit 9'
        words = ("env", f"RUNNER_RUN={run_folder}", f"XDG_RUNTIME_DIR={run_folder}")
        done = user.run(*words, "bash", f"{run_folder}/payload/container.sh", "sh", "-c", script)
        assert (done.stdout, done.returncode) == ("/srv\nfrom the image\nwritable\n", 9), done.stderr
        assert (run_folder / "mine").stat().st_uid == user.home.stat().st_uid


def test_the_sandbox_is_entered_by_each_task_of_a_plain_slurm(tmp_path, plain_slurm, busybox_sqsh):
    text = f'image = "{busybox_sqsh}"\nmounts = ["${{RUNNER_RUN}}:/run-folder"]\n'
    attachment = prepared(environment_of(tmp_path, text), "sandbox", tmp_path / "run")
    words = [expand(word, {"RUNNER_RUN": str(tmp_path / "run")}, "a word") for word in attachment.prefix]
    script = 'echo "$PWD $GREETING $SLURM_PROCID"; echo x > /run-folder/task-$SLURM_PROCID'
    argv = ("srun", "--nodes=2", "--ntasks-per-node=2", *words, "sh", "-c", script)
    done = plain_slurm.run(argv, extra_environ={"RUNNER_RUN": str(tmp_path / "run")})
    assert sorted(done.stdout.splitlines()) == [f"/srv from the image {rank}" for rank in range(4)]
    assert sorted(path.name for path in (tmp_path / "run").glob("task-*")) == [f"task-{rank}" for rank in range(4)]


def processes_of(mark: str) -> list[str]:
    """The command lines, zombies left out, in which `mark` stands."""
    columns = ("-o", "pid=", "-o", "stat=", "-o", "args=")
    listed = subprocess.run(("ps", "-ww", "-e", *columns), capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if mark in line and not line.split()[1].startswith("Z")]


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_sandbox_leaves_no_process_and_no_mount(tmp_path, busybox_sqsh, blow):
    image = shutil.copy(busybox_sqsh, tmp_path / "killed.sqsh")
    environment = environment_of(tmp_path, f'image = "{image}"\n')
    prepared(environment, "sandbox", tmp_path / "run")
    argv = ("bash", str(tmp_path / "run/payload/sandbox.sh"), "sh", "-c", "echo started; exec sleep 4321")
    variables = {**os.environ, "RUNNER_RUN": str(tmp_path / "run")}
    child = subprocess.Popen(argv, env=variables, stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None and child.stdout.readline() == b"started\n"
    assert processes_of(str(image))
    if blow == signal.SIGKILL:
        os.kill(child.pid, blow)  # the first process alone: the others go with its namespace
    else:
        os.killpg(child.pid, blow)  # how Slurm ends a step
    child.wait(timeout=600)
    until(lambda: processes_of(str(image)) == [])
    assert str(image) not in Path("/proc/self/mountinfo").read_text()


def test_podman_enters_an_image_of_its_storage(tmp_path, podman, busybox_image):
    (tmp_path / "run").mkdir()
    environment = environment_of(tmp_path, f'image = "{busybox_image}"\n[env]\nGREETING = "edf"\nONLY_HOST = ""\n')
    script = 'echo "$GREETING $HOST_OR_IMAGE ${ONLY_HOST-unset} $PWD"'
    variables = {**podman.environ, **HOST}
    done = run_inside(environment, "podman", tmp_path / "run", "sh", "-c", script, environ=variables)
    assert done.stdout.decode() == "edf image unset /srv\n", done.stderr.decode()
