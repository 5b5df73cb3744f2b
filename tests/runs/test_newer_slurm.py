"""The batch script on a Slurm and a userland that are two years younger: the same tests, on Debian 13's programs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab import debian
from tests.lab.slurm import NEWER, SlurmLab

TESTS = Path(__file__).resolve().parents[1]
FILES = (
    "runs/test_script_slurm.py",  # ranks, signals, requeue, exit codes, status, the time limit, quoting
    "runs/test_in_place.py",
    "runs/test_spare_nodes_slurm.py",
    "runs/test_restart_slurm.py",  # restarts, chains, unfit nodes, a job that another job submits
    "runs/test_why_runs.py",  # causes by Slurm's states and reasons
    "runs/test_script_sandbox.py",
    "end_to_end/test_slurm.py",
    "end_to_end/test_batch.py",  # batch scripts of users
    "end_to_end/test_sweep.py",  # arrays
    "end_to_end/test_restarts.py",
    "end_to_end/test_logs.py",
)


@pytest.mark.uses("mmdebstrap", "bubblewrap")
def test_the_newer_slurm_is_another_one() -> None:
    """So that the tests below cannot pass on this machine's own."""
    debian.root()
    with SlurmLab(nodes=1, newer=True) as lab:
        version = lab.run(("sinfo", "--version")).stdout.split()[-1]
        inside = lab.run(("srun", "sh", "-c", "sinfo --version; bash --version")).stdout
    assert tuple(map(int, version.split(".")[:2])) >= (24, 11)
    assert version in inside and "version 5.2.37" in inside


@pytest.mark.slow
@pytest.mark.uses("mmdebstrap", "bubblewrap")
@pytest.mark.parametrize("file", FILES)
def test_on_the_newer_slurm(file: str, tmp_path: Path) -> None:
    debian.root()
    argv = (sys.executable, "-m", "pytest", "-q", "-m", "not slow", f"--basetemp={tmp_path / 'inner'}")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        (*argv, "-p", "no:cacheprovider", "-n0", str(TESTS / file)),
        env={**environ, NEWER: "1"}, cwd=TESTS.parent, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
