"""A job tells of its progress, and its stacks when it is asked."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.training

from tests.jobs.conftest import JOBS  # noqa: E402

PROGRAM = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from training import heartbeat, processes, run as run_folder
heartbeat.LOOK_SECONDS = 0.2
run = run_folder.from_environment({"RUNNER_RUN": sys.argv[2]}, "x")
run_folder.make(run)
beating = heartbeat.Heartbeat(run, processes.Processes(0, 0, 1, 1, "alone"))
def hanging_here():
    print("ready", flush=True)
    time.sleep(100)
hanging_here()
"""


def test_stacks_are_told_by_file_and_by_signal(tmp_path: Path) -> None:
    """Either way alone may be eaten on its way; the program goes on: to end it is the batch script's part."""
    argv = (sys.executable, "-c", PROGRAM, str(JOBS), str(tmp_path))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout and child.stdout.readline() == "ready\n"
            attempt = tmp_path / "attempts/1"
            assert (attempt / "heartbeat").exists()
            (attempt / "stacks/wanted").touch()
            wait_for(attempt / "stacks/rank-0.txt", 1)
            os.kill(child.pid, signal.SIGUSR1)
            wait_for(attempt / "stacks/rank-0.txt", 2)
            assert child.poll() is None
        finally:
            child.kill()


def wait_for(path: Path, times: int) -> None:
    deadline = time.monotonic() + 120
    while path.read_text().count("in hanging_here") < times:
        assert time.monotonic() < deadline
        time.sleep(0.05)
