"""What a command sees inside of a real container is what the environment promises, on every engine that is here."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.environments.environment import Environment, emit_edf
from runner.expansion import expand, literal
from tests.environments.corpus import CORPUS, texts
from tests.environments.inside import environment_of, prepared, run_inside, variables_inside
from tests.lab.ordinary_user import ordinary_user

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


def test_variables_edf_over_image_over_host(enter):
    edf = '[env]\nHOST_OR_IMAGE = "edf"\nADDED = "x ${GREETING} ${ONLY_HOST}"\nPATH = "/extra:${PATH}"\n'
    edf += 'LANG = "C.UTF-8"\n'
    seen = variables_inside(enter(edf, "env", "-0", environ=HOST).stdout)
    assert seen["HOST_OR_IMAGE"] == "edf"
    assert seen["GREETING"] == "from the image"
    assert seen["ONLY_HOST"] == "host"
    assert seen["ADDED"] == "x from the image host"
    assert seen["PATH"] == "/extra:/bin:/usr/bin"
    assert seen["LANG"] == "C.UTF-8" and "LC_ALL" not in seen


def test_an_empty_value_unsets(enter):
    seen = variables_inside(enter('[env]\nGREETING = ""\nONLY_HOST = ""\n', "env", "-0", environ=HOST).stdout)
    assert not {"GREETING", "ONLY_HOST"} & seen.keys()


def test_the_working_directory_is_the_images_own_or_the_edfs(enter):
    assert lines(enter("", "pwd")) == ["/srv"]
    assert lines(enter('workdir = "/tmp"\n', "pwd")) == ["/tmp"]


def test_mounts_appear_and_read_only_is_read_only(enter, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(f"{name}\n")
    edf = f'mounts = ["{tmp_path}/one:/deep/er/one", "${{WHERE}}/two:/mnt/two:ro"]\n'
    script = (
        "cat /deep/er/one/file /mnt/two/file; echo new > /deep/er/one/new; echo no 2>&- > /mnt/two/new || echo refused"
    )
    assert lines(enter(edf, "sh", "-c", script, environ={"WHERE": str(tmp_path)})) == ["one", "two", "refused"]
    assert (tmp_path / "one/new").read_text() == "new\n" and not (tmp_path / "two/new").exists()


def test_writable_by_default_and_what_is_written_is_lost(enter):
    assert lines(enter("", "sh", "-c", "echo x > /etc/new && cat /etc/new")) == ["x"]
    assert lines(enter("", "sh", "-c", "ls /etc/new 2>&1 || true")) == ["ls: /etc/new: No such file or directory"]
    assert lines(enter("writable = false\n", "sh", "-c", "touch /etc/new || echo refused")) == ["refused"]


def test_the_entrypoint_runs_only_when_asked(enter):
    script = 'echo "${ENTRYPOINT_RAN-no} $PWD"'
    assert lines(enter("", "sh", "-c", script)) == ["no /srv"]
    assert lines(enter("entrypoint = true\n", "sh", "-c", script)) == ["yes /srv"]
    assert lines(enter('entrypoint = true\nworkdir = "/tmp"\n', "sh", "-c", script)) == ["yes /tmp"]


def test_exit_code_arguments_stdin_and_devices(enter):
    assert enter("", "sh", "-c", "exit 75").returncode == 75
    words = ("", "two words", "it's", "$HOME", "*", "a\nb", "--", "-x")
    script = (
        'for word; do printf "%s|" "$word"; done; test -c /dev/null && test -d /dev/shm && test -d /proc/1 && echo yes'
    )
    assert enter("", "sh", "-c", script, "sh", *words).stdout.decode() == "|".join(words) + "|yes\n"


def test_the_home_folder_of_the_host_is_not_there(enter, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/secret").write_text("x")
    script = 'test -e "$HOME/secret" && echo leaked || echo clean'
    assert lines(enter("", "sh", "-c", script, environ={"HOME": str(tmp_path / "home")})) == ["clean"]


def test_a_missing_mount_source_ends_with_its_name(enter, tmp_path):
    done = enter(f'mounts = ["{tmp_path}/nowhere:/x"]\n', "true")
    assert done.returncode != 0 and b"nowhere" in done.stderr


def test_an_undefined_variable_ends_with_its_name(enter):
    done = enter('[env]\nA = "${NOWHERE_DEFINED}"\n', "true")
    assert done.returncode != 0 and b"NOWHERE_DEFINED" in done.stderr


def test_the_corpus_reaches_the_inside_unchanged(enter):
    # an empty value unsets; a "${" that is never closed is refused by the Container Engine: see test_engines.py
    values = [text for text in CORPUS if text not in {"", "${"}]
    env = {f"V{index}": literal(text) for index, text in enumerate(values)}
    edf = emit_edf(Environment("", None, "", env=env))
    seen = variables_inside(enter(edf.partition("writable = true\n")[2], "env", "-0").stdout)
    assert [seen.get(name) for name in env] == values


many = settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@many
@given(values=st.lists(texts.filter(lambda text: text and "${" not in text), min_size=30, max_size=40))
def test_any_value_reaches_the_inside_unchanged(enter, values):
    env = {f"V{index}": literal(text) for index, text in enumerate(values)}
    edf = emit_edf(Environment("", None, "", env=env)).partition("writable = true\n")[2]
    seen = variables_inside(enter(edf, "env", "-0").stdout)
    assert [seen.get(name) for name in env] == values


def test_the_sandbox_mounts_a_squashfs_file_as_data(tmp_path, busybox_sqsh):
    (tmp_path / "run").mkdir()
    text = f'image = "{busybox_sqsh}"\nmounts = ["{busybox_sqsh}:/data:sqsh"]\n'
    done = run_inside(environment_of(tmp_path, text), "sandbox", tmp_path / "run", "cat", "/data/etc/passwd")
    assert done.stdout.startswith(b"root:x:0:0:")


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
    child.wait(timeout=20)
    deadline = time.monotonic() + 10
    while processes_of(str(image)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(str(image)) == []
    assert str(image) not in Path("/proc/self/mountinfo").read_text()


def test_podman_enters_an_image_of_its_storage(tmp_path, podman, busybox_image):
    (tmp_path / "run").mkdir()
    environment = environment_of(tmp_path, f'image = "{busybox_image}"\n[env]\nGREETING = "edf"\nONLY_HOST = ""\n')
    script = 'echo "$GREETING $HOST_OR_IMAGE ${ONLY_HOST-unset} $PWD"'
    variables = {**podman.environ, **HOST}
    done = run_inside(environment, "podman", tmp_path / "run", "sh", "-c", script, environ=variables)
    assert done.stdout.decode() == "edf image unset /srv\n", done.stderr.decode()
