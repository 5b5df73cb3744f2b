"""The gate: what runs a second time, what is final, and what earlier runs have left is removed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import gate
from tests.gate import Outcome
from tests.lab import leftovers, processes
from tests.lab.slurm import SlurmLab

SLURM = {"tests/test_a.py::test_slurm[x y]": True}


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (Outcome(1, failed=SLURM), ""),
        (Outcome(1, failed={**SLURM, "test_b.py::test_pure": False}), "no real part is in test_b.py::test_pure"),
        (Outcome(1, failed={f"test_{n}": True for n in range(11)}), "11 tests failed, more than 10"),
        (Outcome(1, failed=SLURM, complaints=("no test ran on podman",)), "no test ran on podman"),
        (Outcome(2, failed=SLURM), "pytest ended with exit code 2"),
        (Outcome(1), "pytest ended with exit code 1"),
    ],
)  # fmt: skip
def test_only_a_few_failures_on_real_parts_may_run_again(outcome: Outcome, why: str) -> None:
    assert gate.why_final(outcome) == why


def test_a_test_that_is_skipped_or_missing_in_the_second_pass_has_not_passed() -> None:
    assert gate.passed_again(Outcome(0, passed=1), list(SLURM))
    assert not gate.passed_again(Outcome(0, passed=0, skipped=1), list(SLURM))
    assert not gate.passed_again(Outcome(1, passed=0, failed=SLURM), list(SLURM))


FLAKY = """
import os
from pathlib import Path
import pytest
FILE = Path(__file__).with_name("seen")
@pytest.mark.uses("busybox")
def test_once():
    seen = FILE.exists()
    FILE.touch()
    assert seen or not {fails}
@pytest.mark.uses("busybox")
def test_never(): assert not {broken}
def test_pure(): assert not {pure}
@pytest.mark.timing
def test_later(): assert False
@pytest.fixture
def broken(): raise ValueError("no lab")
@pytest.mark.uses("busybox")
def test_with_a_fixture(request):
    if {error}: request.getfixturevalue("broken")
"""
SOUND = {"fails": False, "broken": False, "pure": False, "error": False}


@pytest.mark.parametrize(
    ("faults", "code", "last"),
    [
        ({}, 0, ["flaky: 0", "4 passed, 0 failed, 0 skipped in"]),
        ({"fails": True}, 0, ["flaky: 1 test_it.py::test_once", "4 passed, 0 failed, 0 skipped in"]),
        ({"fails": True, "broken": True}, 1, ["red: failed twice: test_it.py::test_never", "flaky: 0", "2 passed, 2"]),
        ({"error": True}, 1, ["red: failed twice: test_it.py::test_with_a_fixture", "flaky: 0", "3 passed, 1 failed"]),
        ({"pure": True}, 1, ["red: no real part is in test_it.py::test_pure", "flaky: 0", "3 passed, 1 failed"]),
    ],
    ids=["sound", "flaky", "broken", "error", "quick tier"],
)  # fmt: skip
def test_the_two_passes(tmp_path: Path, faults: dict[str, bool], code: int, last: list[str]) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(FLAKY.format(**{**SOUND, **faults}))
    clean = {
        name: value for name, value in os.environ.items() if "PYTEST" not in name and not name.startswith("RUNNER_")
    }
    environ = {**clean, "PYTHONPATH": str(Path(__file__).parents[1])}
    argv = (sys.executable, "-c", "import sys; from tests import gate; sys.exit(gate.gate())")
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    lines = [
        line for line in done.stdout.splitlines() if line.startswith(("red:", "flaky:"))
    ] + done.stdout.splitlines()[-1:]
    assert all(line.startswith(start) for line, start in zip(lines, last, strict=True)), lines


DEAD_LAB = """
import shutil
from pathlib import Path
from tests.lab.processes import LabError
from tests.lab.slurm import SlurmLab

class Dead:
    def answers(self):
        return shutil.which("sh") is None  # as SlurmLab, which asks with the PATH of this process

    def restart(self):
        with Path("restarts").open("a") as file:
            file.write("x")
        raise LabError("it stays dead")

SlurmLab.started.add(Dead())

def test_fails_without_a_program_on_path(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert False

def test_behind_it():
    pass
"""


def test_a_failure_looks_at_the_labs_once_the_test_has_given_back_its_path(tmp_path: Path) -> None:
    """And a lab that cannot be started anew ends no other test."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(DEAD_LAB)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    argv = (sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider")
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "restarts").read_text() == "x"


def aged(path: Path, seconds: float) -> Path:
    path.mkdir(parents=True)
    os.utime(path, (time.time() - seconds,) * 2)
    return path


def test_what_killed_runs_have_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    gone = [aged(tmp_path / name, 4 * 3600) for name in ("runner-lab-a", "torchelastic_a", "pytest-of-root/pytest-7")]
    kept = [aged(tmp_path / name, 4 * 3600) for name in ("runner-lab-b", "pytest-of-root/pytest-8", "mine", "runner-x")]
    kept += [aged(tmp_path / name, 1) for name in ("runner-lab-c", "torchelastic_b", "pytest-of-root/pytest-9")]
    (kept[1] / ".lock").write_text(str(os.getpid()))
    os.utime(kept[1], (time.time() - 4 * 3600,) * 2)
    os.utime(kept[1] / ".lock", (time.time() - 4 * 3600,) * 2)
    guard = processes.guard(kept[0])
    orphan = subprocess.Popen(
        ("sleep", "600"), env={**os.environ, processes.MARK: str(gone[0])}, start_new_session=True
    )
    try:
        assert sorted(leftovers.remove(tmp_path)) == sorted(map(str, gone))
        assert orphan.wait(60) == -9
    finally:
        orphan.kill()
        guard.kill()
        guard.communicate()
    assert all(path.exists() for path in kept) and not any(path.exists() for path in gone)


def test_a_lab_that_does_not_answer_is_started_anew(plain_slurm: SlurmLab) -> None:
    plain_slurm.stop_controller()
    assert not plain_slurm.answers()
    plain_slurm.restart()
    assert plain_slurm.answers() and plain_slurm in SlurmLab.started
    assert plain_slurm.run(("srun", "-N1", "echo", "here")).stdout == "here\n"
