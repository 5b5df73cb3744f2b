"""`runner connect HOST --install`: this version of runner in a folder of its own on HOST, whole or not at all."""

from __future__ import annotations

import importlib.metadata
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import runner
from runner import __version__
from tests.remote.sshd import Sshd

pytestmark = pytest.mark.skipif(
    not shutil.which("/usr/sbin/sshd") or os.geteuid() != 0, reason="needs openssh-server and root"
)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables that make pip use wheels that are downloaded once, and no index."""
    if kept := os.environ.get("RUNNER_TEST_WHEELS"):  # noxfile.py keeps them
        return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": f"{kept}/runner"}
    folder = tmp_path_factory.mktemp("wheels")
    required = [each for each in importlib.metadata.requires("runner-hpc") or () if "extra ==" not in each]
    argv = (sys.executable, "-m", "pip", "download", "-q", "-d", str(folder), "--only-binary=:all:", *required)
    subprocess.run(argv, check=True)
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}


@pytest.fixture
def host() -> Iterator[Sshd]:
    with Sshd(os.environ) as started:
        yield started


def versions(host: Sshd) -> list[str]:
    return sorted(path.name for path in (host.home / ".local/share/runner/on/versions").glob("*"))


def works(host: Sshd) -> None:
    done = host("--on", "lab", "launch", "--dry-run", "--site", "local", "--env", "cpu", "--script", "sft")
    assert done.stdout.startswith("#!/bin/bash")


def test_the_first_use_names_the_command_and_the_command_installs(host: Sshd, wheels: dict[str, str]) -> None:
    done = host("--on", "lab", "status", code=1)
    assert "runner is not installed on lab" in done.stderr and "try:     runner connect lab --install\n" in done.stderr
    host("connect", "lab", "--install", extra_environ=wheels)
    works(host)
    assert versions(host) == [__version__]
    program = host.home / f".local/share/runner/on/versions/{__version__}/bin/runner"
    (host.home / "runner").mkdir()
    (host.home / "runner/__init__.py").write_text("raise SystemExit('a folder of the user')\n")
    works(host)
    said = subprocess.run((program, "--version"), env={"HOME": str(host.home)}, capture_output=True, text=True)
    assert said.stdout == f"runner {__version__}\n"


def test_another_version_of_the_user_stays_and_is_not_used(host: Sshd, wheels: dict[str, str]) -> None:
    host.install(version="0.0.9")
    done = host("--on", "lab", "status", code=1)
    assert "lab has runner 0.0.9" in done.stderr and "try:     runner connect lab --install\n" in done.stderr
    host("connect", "lab", "--install", extra_environ=wheels)
    works(host)
    assert "0.0.9" in (host.home / "bin/runner").read_text()


def test_two_first_uses_at_the_same_time(host: Sshd, wheels: dict[str, str]) -> None:
    argv, env = host.argv("connect", "lab", "--install"), {**host.here(), **wheels}
    host("connect", "lab")
    started = [subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    endings = [(child.communicate(timeout=180)[1], child.returncode) for child in started]
    works(host)
    assert any(code == 0 for _, code in endings), endings
    assert [name for name in versions(host) if "partial" not in name] == [__version__]


def test_a_host_without_a_suitable_python_is_told_what_to_do(host: Sshd) -> None:
    for name in ("python3", *(f"python3.{minor}" for minor in range(11, 15))):
        (host.home / "bin" / name).write_text("#!/bin/sh\nexit 1\n")
        (host.home / "bin" / name).chmod(0o755)
    done = host("connect", "lab", "--install", code=1)
    assert "lab has no suitable Python" in done.stderr and "uv python install" in done.stderr
    assert versions(host) == []


def test_a_full_disk_leaves_nothing_installed(host: Sshd, wheels: dict[str, str]) -> None:
    folder = host.home / ".local/share/runner/on"
    folder.mkdir(parents=True)
    subprocess.run(("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder), check=True)
    try:
        done = host("connect", "lab", "--install", code=None, extra_environ=wheels)
        assert done.returncode and "No space left on device" in done.stderr
        assert versions(host) == []
    finally:
        subprocess.run(("umount", folder), check=True)
    host("connect", "lab", "--install", extra_environ=wheels)
    works(host)


@pytest.mark.parametrize("script", ["install.sh", "receive.sh"])
def test_a_message_to_a_connection_that_is_gone_does_not_skip_the_clean_up(tmp_path: Path, script: str) -> None:
    """/bin/sh of Debian ends by SIGPIPE without its EXIT trap."""
    text = (Path(runner.__file__).parent / "remote" / script).read_text()
    values = {"d": tmp_path, "c": tmp_path, "mark": "m", "version": "1", "python": "/p/python3", "tag": "3.11"}
    values |= {"sum": "0", "key": "k", "old": "", "new": "1"}
    listen, broken = os.pipe()
    argv = ("sh", "-c", "".join(f"{name}='{value}'\n" for name, value in values.items()) + text.replace("echo", ":", 2))
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=broken, stderr=broken)
    os.close(listen)
    os.close(broken)
    assert child.stdin
    child.stdin.close()
    assert child.wait(timeout=180) == 1
    assert not [path for path in tmp_path.rglob("*") if "part" in path.name]


@pytest.mark.slow
def test_twenty_cuts_leave_a_whole_installation_or_none(host: Sshd, wheels: dict[str, str]) -> None:
    argv, env = host.argv("connect", "lab", "--install"), {**host.here(), **wheels}
    begun = time.monotonic()
    host(*argv[3:], extra_environ=wheels)
    length, chance, cuts = time.monotonic() - begun, random.Random(11), 0
    for _ in range(20):
        shutil.rmtree(host.home / ".local", ignore_errors=True)
        child = subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True)
        time.sleep(chance.uniform(0.3, length))
        if chance.random() < 0.5:
            child.send_signal(signal.SIGINT)
        else:
            host.drop()
        child.communicate(timeout=180)
        cuts += child.returncode != 0
        deadline = time.monotonic() + 60
        while any("partial" in name for name in versions(host)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert versions(host) in ([], [__version__])
        if versions(host):
            works(host)
    assert cuts >= 5, "the cuts came too late"
    host(*argv[3:], extra_environ=wheels)
    works(host)
