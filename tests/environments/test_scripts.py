"""The shell scripts that engines put into a run folder are clean."""

import subprocess
from pathlib import Path

import pytest

import runner.environments.engines

SCRIPTS = sorted(Path(runner.environments.engines.__file__).parent.glob("*.sh"))


@pytest.mark.uses("shellcheck")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    done = subprocess.run(("shellcheck", str(script)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_all_scripts_were_found():
    assert [path.name for path in SCRIPTS] == ["container.sh", "environment.sh", "sandbox.sh"]
