"""What the faults leave on the machine is removed; what belongs to others stays."""

import os
from pathlib import Path

import pytest

from tests.faults.by_hand import forget_clocks

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
