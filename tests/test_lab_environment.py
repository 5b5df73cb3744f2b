"""The lab's `--environment` runs a command in the container that an EDF describes."""

from pathlib import Path

import pytest

from tests.lab.slurm import SlurmLab


@pytest.fixture
def edf(tmp_path: Path, busybox_sqsh: Path) -> Path:
    """An EDF of the busybox image with a read-only mount and a variable."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/file").write_text("content\n")
    path = tmp_path / "edf.toml"
    path.write_text(
        f'image = "{busybox_sqsh}"\nmounts = ["{tmp_path}/data:/data:ro"]\n'
        '[env]\nFROM_EDF = "edf $${X}"\nGREETING = "from the EDF"\n'
    )
    return path


def test_command_runs_in_the_image_with_its_environment(slurm: SlurmLab, edf: Path) -> None:
    script = 'echo "$FROM_EDF|$GREETING|$HOST_OR_IMAGE|$PWD"; cat /data/file; touch /data/new; exit 7'
    ran = slurm.run(("srun", f"--environment={edf}", "sh", "-c", script), check=False)
    assert ran.stdout == "edf ${X}|from the EDF|image|/work\ncontent\n"
    assert "Read-only file system" in ran.stderr
    assert ran.returncode == 7
