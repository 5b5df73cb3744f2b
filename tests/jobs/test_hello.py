"""The first job that a user tries tells ranks and hosts, and that they reach each other."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.conftest import JOBS, Launcher, free_port


def test_alone_it_needs_python_only_and_repeats_its_words(tmp_path: Path) -> None:
    environment = {**Launcher(tmp_path).environment(tmp_path), "PATH": "/usr/bin:/bin"}
    command = (sys.executable, "-S", str(JOBS / "hello.py"), "a  b", "$HOME", "--exit", "7")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 7
    assert done.stdout.startswith("hello from rank 0 of 1 on ")
    assert "['a  b', '$HOME', '--exit', '7']" in done.stdout


def test_the_shell_one_prints_each_word_on_its_own_line(tmp_path: Path) -> None:
    environment = {**Launcher(tmp_path).environment(tmp_path), "RANK": "1", "WORLD_SIZE": "2"}
    command = ("sh", str(JOBS / "hello.sh"), "a  b", "$(id)")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("hello from rank 1 of 2 on ")
    assert f"run {tmp_path}, attempt {tmp_path}/attempts/1" in done.stdout
    assert done.stdout.endswith("word a  b\nword $(id)\n")


@pytest.mark.training
def test_two_processes_add_up_their_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}")
    environment = {**Launcher(tmp_path).environment(tmp_path), "SLURMD_NODENAME": "nid001"}
    done = subprocess.run(
        (*torchrun, str(JOBS / "hello.py")), env=environment, capture_output=True, text=True, check=True, timeout=600
    )
    assert sorted(line[:22] for line in done.stdout.splitlines() if line.startswith("hello")) == [
        "hello from rank 0 of 2",
        "hello from rank 1 of 2",
    ]
    shown = "  rank 0 is on nid001\n  rank 1 is on nid001\nall-reduce over 2 processes: 1, expected 1\n"
    assert shown in done.stdout, "rank 0 lists all of them: its output is what launch --wait shows"
