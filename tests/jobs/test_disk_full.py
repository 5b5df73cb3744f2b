"""A disk that is full while a checkpoint is written costs no older checkpoint, and is said in one clear error."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.training

from tests.jobs.conftest import TRAIN, Attempt, Launcher  # noqa: E402
from training import (  # noqa: E402
    files,
    resume,
)
from training.processes import Processes  # noqa: E402

# A file system of $1 bytes at $2 for this command alone; afterwards what lies there is copied to $3.
INSIDE = """
mount -t tmpfs -o size="$1" none "$2" || exit 99
run=$2 kept=$3
shift 3
"$@"
code=$?
cp -a "$run/." "$kept"
exit "$code"
"""
NAMESPACE = ("unshare", "--mount", *(() if os.geteuid() == 0 else ("--map-root-user",)))


@pytest.fixture
def can_mount(tmp_path: Path) -> None:
    """Skips where this machine lets nobody have a mount of his own."""
    probe = (*NAMESPACE, "mount", "-t", "tmpfs", "none", str(tmp_path))
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("no mount namespace can be had here")


@pytest.mark.usefixtures("can_mount")
def test_the_older_checkpoint_stays_and_the_half_one_goes(launcher: Launcher, whole: Attempt, tmp_path: Path) -> None:
    """There is room for one and a half checkpoints: the first is written, the second is not."""
    size = sum(files.sizes(whole.run / "checkpoints" / "checkpoint-3").values())
    run, kept = tmp_path / "run", tmp_path / "kept"
    run.mkdir()
    kept.mkdir()
    prefix = (*NAMESPACE, "sh", "-c", INSIDE, "sh", str(size * 3 // 2), str(run), str(kept))
    full = launcher.sft(run, *TRAIN, prefix=prefix)
    assert full.code == 1, full.output
    assert "sft: the checkpoint of step 6 could not be written" in full.output
    assert "because: No space left on device" in full.output
    assert "--save_total_limit" in full.output
    assert sorted(path.name for path in (kept / "checkpoints").iterdir() if path.is_dir()) == ["checkpoint-3"]
    alone = Processes(0, 0, 1, 1, "alone")
    newest = resume.find(kept / "checkpoints", None, automatic=True, processes=alone)
    assert newest is not None
    assert newest.step == 3
    assert {step: whole.losses[step] for step in range(1, 7)} == Attempt(1, "", kept).losses
