"""The lab works entirely as an ordinary user."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab.ordinary_user import User, ordinary_user


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    """A throw-away user where root runs the tests, else the user who runs them."""
    with ordinary_user() as made:
        yield made


def report(user: User, part: str) -> dict[str, Any]:
    """What `ordinary_user.py PART` found, run by the user with the system's Python."""
    ran = user.run("/usr/bin/python3", f"{user.home}/tests/lab/ordinary_user.py", part)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.uses("slurmctld, slurmd", "srun, sbatch", "munge", "gcc, spank.h", "squashfuse", "/dev/fuse")
def test_slurm_containers_and_gpus_work_for_a_user(user: User) -> None:
    number = subprocess.run(("id", "-u", user.name), capture_output=True, text=True, check=True).stdout.strip()
    found = report(user, "slurm")
    assert found["nodes"] == ["nid001 idle", "nid002 idle", "nid003 idle"]
    assert found["gpus"] == "0,1,2,3"
    assert found["entered"] == [
        number,
        "/srv",
        "from the image 0",
        "touch: /data/x: Read-only file system",
        7,
    ]
    assert found["made"] is True
    assert found["shared"] == ["/0", "/1"] * 2
    assert found["remapped"] == ["0", "touch: /x: Read-only file system"]
    assert found["saved"] == "1\n"
    assert found["left"] is False


@pytest.mark.uses("rootless", "podman", "docker-registry")
def test_podman_and_registry_work_rootless(user: User) -> None:
    found = report(user, "podman")
    assert found["ran"] == ["from the image", "0", 7], found["said"]
    assert found["pulled"] == ["busybox:1"]
    assert found["left"] is False


def test_nothing_of_the_user_is_left() -> None:
    with ordinary_user() as made:
        assert made.run("id", "-un").stdout == f"{made.name}\n"
    known = subprocess.run(("id", made.name), capture_output=True, check=False).returncode == 0
    assert known == made.is_me
    assert not made.home.exists()
