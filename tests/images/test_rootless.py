"""build and import as an ordinary user, with nothing but Debian's packages and an empty home."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import isal
import lz4
import pytest
import tomlkit
import urllib3
import zstandard

import runner
from tests.images.bench import TINY, end_processes_of
from tests.lab.ordinary_user import User, ordinary_user

pytestmark = pytest.mark.uses("rootless", "podman", "tar2sqfs", "busybox", "skopeo")
RUNNER = ("/usr/bin/python3", "-m", "runner")


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    """A throw-away user with a project and a copy of runner; needs root."""
    if os.geteuid() != 0:
        pytest.skip("these tests run as an ordinary user already")
    with ordinary_user() as made:
        # Debian's Python has the version of the one that runs the tests, so their compiled modules fit it
        for package in (runner, tomlkit, isal, lz4, zstandard, urllib3):
            source = Path(str(package.__file__)).parent
            shutil.copytree(source, made.home / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        (made.home / "project/containers").mkdir(parents=True)
        (made.home / "project/runner.toml").write_text("")
        (made.home / "project/Containerfile.tiny").write_text(TINY)
        recipe = 'containerfile = "Containerfile.tiny"\ncontext = ["containers/busybox"]\n'
        (made.home / "project/containers/tiny.toml").write_text(recipe)
        shutil.copy("/bin/busybox", made.home / "project/containers/busybox")
        subprocess.run(("chown", "-R", f"{made.name}:", str(made.home)), check=True)
        try:
            yield made
        finally:
            made.run("env", "STORAGE_DRIVER=overlay", "podman", "system", "reset", "--force")
            made.run("podman", "unshare", "rm", "-rf", f"{made.home}/.local")


def call(user: User, *words: str) -> subprocess.CompletedProcess[str]:
    return user.run(*RUNNER, "--site", "local", *words, cwd=user.home / "project")


def test_build_and_import_work_for_a_user(user: User) -> None:
    built = call(user, "build", "tiny")
    assert built.returncode == 0, built.stderr
    assert built.stdout.startswith("localhost/runner/tiny:")
    made = call(user, "import", "tiny")
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith(str(user.home))
    path = Path(made.stdout.strip())
    assert subprocess.run(("unsquashfs", "-s", str(path)), capture_output=True, check=False).returncode == 0
    assert path.stat().st_uid == user.home.stat().st_uid
    again = call(user, "import", "tiny")
    assert again.stdout == made.stdout and "already imported" in again.stderr


def test_a_users_storage_is_no_full_copy_per_layer(user: User) -> None:
    """podman 4 takes vfs for a user without a storage.conf; the tool takes overlay where the kernel lets it."""
    call(user, "build", "tiny")
    kind = user.run("env", "STORAGE_DRIVER=overlay", "podman", "info", "--format={{.Store.GraphDriverName}}")
    assert kind.stdout.strip() == "overlay"


def test_an_archive_is_loaded_inside_the_users_own_namespace(user: User) -> None:
    call(user, "build", "tiny")
    save = ("podman", "save", "-q", "--format=oci-archive", "-o", "tiny.tar", "localhost/runner/tiny:latest")
    assert user.run("env", "STORAGE_DRIVER=overlay", *save).returncode == 0
    made = call(user, "import", f"oci-archive:{user.home}/tiny.tar")
    assert made.returncode == 0, made.stderr
    assert made.stdout.strip().endswith(".sqsh")


INTERRUPTED = """
import signal, subprocess, sys, time
words = sys.argv[1]
def running():
    listed = subprocess.run(("ps", "-ww", "-e", "-o", "args="), capture_output=True, text=True).stdout
    return any(line.strip() == words for line in listed.splitlines())
build = subprocess.Popen((sys.executable, "-m", "runner", "build", "asleep"), stderr=subprocess.PIPE, text=True)
while not running():
    assert build.poll() is None, build.stderr.read()
    time.sleep(0.05)
build.send_signal(signal.SIGINT)
print(build.wait(), flush=True)
while running():
    time.sleep(0.05)
print("ended")
"""


def test_ctrl_c_ends_a_step_of_another_subordinate_id(user: User) -> None:
    step = f"sleep {10_000_000 + os.getpid()}"
    (user.home / "project/Containerfile.asleep").write_text(TINY.replace("WORKDIR", f"USER 1000\nRUN {step}\nWORKDIR"))
    recipe = (user.home / "project/containers/tiny.toml").read_text().replace("tiny", "asleep")
    (user.home / "project/containers/asleep.toml").write_text(recipe)
    try:
        ended = user.run("/usr/bin/python3", "-c", INTERRUPTED, step, cwd=user.home / "project", timeout=120)
    finally:
        end_processes_of(step)
    assert ended.stdout == "130\nended\n", ended.stderr
