"""Everything that needs no cluster works for an ordinary user, who may mount nothing: launch, shell, status, cancel."""

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.conftest import SOURCE, environment, write
from tests.lab.ordinary_user import User, ordinary_user


@pytest.fixture(scope="module")
def user(busybox_sqsh: Path) -> Iterator[User]:
    """A throw-away user with runner's own sources, its template engine, a project and an image in the home."""
    with ordinary_user() as made:
        shutil.copytree(SOURCE / "runner", made.home / "runner")
        for name in ("jinja2", "markupsafe"):
            found = importlib.util.find_spec(name)
            assert found is not None and found.origin is not None
            shutil.copytree(Path(found.origin).parent, made.home / name)
        shutil.copy(busybox_sqsh, made.home / "busybox.sqsh")
        write(
            made.home / "project",
            {
                "runner.toml": 'environment = "box"\n',
                "edf/box.toml": environment(made.home / "busybox.sqsh", ["${HOME}/project/data:/mnt"], {"A": "b c"}),
                "data/note.txt": "from the mount\n",
                "jobs/seen.sh": 'echo "$GREETING, $A, $(id -u), $PWD"; cat /mnt/note.txt; echo up >"$RUNNER_RUN/up"\n',
            },
        )
        subprocess.run(("chown", "-R", f"{made.name}:", str(made.home)), check=not made.is_me, capture_output=True)
        yield made


def runner(user: User, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    argv = ("/usr/bin/python3", "-m", "runner", words[0], "--site", "local", *words[1:])
    done = user.run(*argv, cwd=user.home / "project")
    assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.uses("bubblewrap", "squashfuse")
def test_a_job_runs_in_the_container(user: User) -> None:
    number = user.run("id", "-u").stdout.strip()
    name = runner(user, "launch", "--wait", "--script", "seen").stdout.strip()
    folder = user.home / "project/runs" / name
    log = (folder / "job.log").read_text()
    assert f"from the image, b c, {number}, {folder}/code\nfrom the mount\n" in log
    assert (folder / "up").read_text() == "up\n"
    assert (folder / "up").owner() == user.name
    runner(user, "launch", "--wait", "--", "sh", "-c", "exit 6", code=6)


def test_a_folder_that_the_user_may_not_enter_is_named(user: User) -> None:
    closed = user.home / "closed"
    closed.mkdir(mode=0)
    write(user.home / "project", {"edf/closed.toml": f'mounts = ["{closed}/data:/data"]\n'})
    here = ("--engine", "host", "--dry-run")
    for words in (
        ("logs", f"{closed}/sft-0001"),
        ("shell", *here, f"{closed}/box.toml"),
        ("launch", *here, "--env", "closed", "--", "true"),
    ):
        said = runner(user, *words, code=1).stderr
        assert f"runner: cannot use {closed}/" in said and "because: Permission denied" in said, said
    closed.rmdir()
    (user.home / "project/edf/closed.toml").unlink()


@pytest.mark.uses("bubblewrap", "squashfuse")
def test_shell_and_cancel(user: User) -> None:
    done = runner(user, "shell", "--", "sh", "-c", "echo $GREETING $A; exit 3", code=3)
    assert done.stdout == "from the image b c\n"
    runner(user, "launch", "--", "sleep", "97531")  # other tests sleep too
    assert runner(user, "cancel", "last").stdout == "sleep-0001\n"
    assert json.loads(runner(user, "status", "--json", "last").stdout)[0]["state"] == "CANCELLED"
    left = user.run("ps", "-u", user.name, "-o", "args=").stdout.splitlines()
    # other tests of this user may run containers at the same moment: only those of this home count
    assert [line for line in left if "sleep 97531" in line or ("squashfuse" in line and str(user.home) in line)] == []


BATCH = "#!/bin/bash\n#SBATCH -t 5\necho\n"
TRAINERS = "project/jobs/trainers/mine.toml"


@pytest.mark.parametrize(
    ("files", "words", "what"),
    [
        ({"project/a.sbatch": BATCH}, (), "cannot read ./a.sbatch"),
        ({"project/a.sbatch": "echo\n"}, (), "sbatch would reject ./a.sbatch"),
        ({"project/a.sbatch": BATCH + "\0\x01"}, (), "sbatch would reject ./a.sbatch"),
        ({"project/a.sbatch": BATCH.replace("\n", "\r\n")}, (), "sbatch would reject ./a.sbatch"),
        ({"project/a.sbatch": BATCH}, ("--trainer", "mine"), "there is no trainer 'mine'"),
        ({"project/a.sbatch": BATCH, TRAINERS: "detect = 'a('\n"}, (), "mine.toml:1: detect is not a pattern: 'a('"),
        ({"project/a.sbatch": BATCH, TRAINERS: "detect = 'a'\n"}, (), "jobs/trainers/mine.toml"),
    ],
    ids=("unreadable", "no #SBATCH", "binary", "CRLF", "unknown trainer", "pattern", "unreadable trainer"),
)
def test_bad_input_is_refused_before_anything_is_written(
    user: User, files: dict[str, str], words: tuple[str, ...], what: str, request: pytest.FixtureRequest
) -> None:
    """Root reads everything: only an ordinary user cannot read a file without permissions."""
    for name, text in files.items():
        (user.home / name).parent.mkdir(parents=True, exist_ok=True)
        (user.home / name).write_text(text, newline="")
    if "unreadable" in request.node.name:
        (user.home / list(files)[-1]).chmod(0)
    argv = ("/usr/bin/python3", "-m", "runner", "launch", "--site", "generic-slurm", "--dry-run", *words, "./a.sbatch")
    done = user.run(*argv, cwd=user.home / "project")
    for name in files:
        (user.home / name).unlink()
    assert (done.returncode, done.stdout) == (1, "") and what in done.stderr, done.stderr
    assert "because: " in done.stderr and "try: " in done.stderr
    assert "unreadable" not in request.node.name or "Permission denied" in done.stderr
