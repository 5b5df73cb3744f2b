"""What the faults leave on the machine is removed; what belongs to others stays, ports included."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import account
from tests.faults.by_hand import forget_clocks
from tests.faults.case import TRAINER

NO_PROCESS = 2**22 + 1  # above the highest process id


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_clocks_of_other_users_stay(tmp_path: Path) -> None:
    ours, theirs = tmp_path / f"faketime_shm_{NO_PROCESS}", tmp_path / f"sem.faketime_sem_{NO_PROCESS + 1}"
    for path in (ours, theirs):
        path.touch()
    os.chown(theirs, 65534, 65534)
    forget_clocks(tmp_path)
    assert [path.exists() for path in (ours, theirs)] == [False, True]


def test_clocks_of_running_processes_stay(tmp_path: Path) -> None:
    clock = tmp_path / f"faketime_shm_{os.getpid()}"
    clock.touch()
    forget_clocks(tmp_path)
    assert clock.exists()


def test_the_ranks_meet_although_another_cluster_has_taken_their_port(tmp_path: Path) -> None:
    attempt, told = tmp_path / "run/attempts/1", tmp_path / "account"
    attempt.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(other.getsockname()[1])}
        run = {"RUNNER_RUN": str(tmp_path / "run"), "RUNNER_ATTEMPT": str(attempt), "FAULTS_ACCOUNT": str(told)}
        ranks = [
            subprocess.Popen(
                (sys.executable, TRAINER, "2", "2", "0"),
                env={**os.environ, **place, **run, "RANK": rank, "WORLD_SIZE": "2"},
            )
            for rank in "01"
        ]
        try:
            assert [rank.wait(60) for rank in ranks] == [0, 0]
        finally:
            for each in ranks:
                each.kill()
                each.wait()
    assert account.finished(account.read(told), 2)
