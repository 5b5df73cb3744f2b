"""Two faults of DeepSpeed's ZeRO-3 in loading a universal checkpoint exist, and are corrected."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.training

from tests.jobs.conftest import free_port  # noqa: E402


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A training of two parameter groups, loaded from a universal checkpoint by DeepSpeed alone and corrected."""
    script = Path(__file__).with_name("zero3_two_groups.py")
    command = (sys.executable, str(script), str(tmp_path_factory.mktemp("zero3")), str(free_port()))
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not result["supported"]:
        pytest.skip(f"DeepSpeed {result['version']} cannot load it at all, and the scripts refuse it")
    return result


def test_the_faults_are_there(found: dict[str, Any]) -> None:
    """If this fails, DeepSpeed is fixed: zero3_faults.py can go once no image has an older one."""
    assert found["stock"]["states"] == 2
    assert found["stock"]["steps"] == 1, "one step tensor for both groups"
    assert found["stock"]["decays"] == [0.1, 0.1], "the biases are decayed from now on"
    assert found["stock"]["difference"] > 1e-3


def test_both_are_corrected(found: dict[str, Any]) -> None:
    assert found["corrected"]["steps"] == found["corrected"]["states"] == 2
    assert found["corrected"]["decays"] == [0.1, 0.0]
    assert found["corrected"]["difference"] < 1e-6
