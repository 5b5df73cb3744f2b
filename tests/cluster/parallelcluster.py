"""AWS ParallelCluster's own program, in a virtual environment of its own: it needs older packages than runner's tests.

Without the CDK, which only makes CloudFormation templates, it is installed in less than a minute.
"""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".nox" / "pcluster"
VERSION = "3.16.1"
NEEDS = (  # of aws-parallelcluster's requirements, those of its command line, its schema and its validators
    *("boto3", "tabulate>=0.8.8,<=0.8.10", "PyYAML", "jinja2~=3.0", "marshmallow~=3.10", "werkzeug~=2.0"),
    *("connexion~=2.13.0", "flask>=2.2.5,<2.3", "jmespath", "packaging", "setuptools<81", "moto[ec2]==5.2.5"),
)


def python() -> Path:
    """The Python of the virtual environment, which is made once. Skips where it cannot be installed."""
    mark = VENV / f"has-{VERSION}"
    VENV.parent.mkdir(exist_ok=True)
    with (VENV.parent / "pcluster.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not mark.exists():
            pip = (VENV / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check")
            for argv in (
                (sys.executable, "-m", "venv", "--clear", VENV),
                (*pip, *NEEDS),
                (*pip, "--no-deps", f"aws-parallelcluster=={VERSION}"),
            ):
                done = subprocess.run(argv, capture_output=True, text=True, check=False)
                if done.returncode:
                    pytest.skip(f"aws-parallelcluster {VERSION} cannot be installed: {done.stderr.strip()[-300:]}")
            mark.touch()
    return VENV / "bin" / "python"
