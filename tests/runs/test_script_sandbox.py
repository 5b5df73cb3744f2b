"""A job inside a squashfs image leaves in good order: signals reach it, and its files stay under it while it saves."""

import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from runner.environments.edf import Mount
from runner.environments.engines import attach
from runner.environments.environment import Environment
from runner.site_files import load_site
from tests.lab.slurm import SlurmLab
from tests.runs.scripts import LOCAL, SLURM, command_job, write_run
from tests.runs.test_script_slurm import LAUNCHER, TRAINER, submit
from tests.waiting import until

pytestmark = pytest.mark.uses("squashfuse", "/dev/fuse", "bubblewrap")


def trainer_in_image(folder: Path, image: Path, site: str, name: str, nodes: int) -> Path:
    """A run of two trainers per node: below a launcher without handlers for USR2; directly for TERM, meant for all."""
    words = ("python3", "-c", TRAINER) if name == "TERM" else ("sh", "-c", LAUNCHER, "sh", TRAINER)
    environment = Environment("python", None, str(image), mounts=(Mount("${RUNNER_RUN}", "${RUNNER_RUN}"),))
    job = replace(command_job(*words, launcher="srun", tasks=2, nodes=nodes), environment=environment)
    attachment = attach(environment, load_site(site), "sandbox")
    return write_run(folder, job, attachment, LOCAL if site == "local" else SLURM)


def all_saved(run: Path, name: str, tasks: int) -> None:
    """Every rank got the signal and lived to say so."""
    assert f"SIG{name} True\n" in (run / "job.log").read_text()
    for rank in range(1, tasks):
        assert f"SIG{name} True\n" in (run / f"attempts/1/rank-{rank}.log").read_text()
    assert (run / "attempts/1/exit_code").read_text() == "75\n"


@pytest.mark.parametrize("name", ["USR2", "TERM"])
def test_on_this_machine(python_sqsh: Path, tmp_path: Path, name: str) -> None:
    """TERM would also end squashfuse, and the Python below the trainer with it."""
    run = trainer_in_image(tmp_path, python_sqsh, "local", name, 1)
    with (run / "job.log").open("wb") as log:
        child = subprocess.Popen(("bash", "job.sbatch"), cwd=run, stdout=log, stderr=log)
        until(lambda: all((run / f"ready-{rank}").exists() for rank in range(2)))
        child.send_signal(getattr(signal, f"SIG{name}"))
        assert child.wait(600) == 75, (run / "job.log").read_text()
    all_saved(run, name, 2)


@pytest.mark.parametrize("name", ["USR2", "TERM"])
def test_on_slurm(plain_slurm: SlurmLab, python_sqsh: Path, tmp_path: Path, name: str) -> None:
    """Slurm's own TERM goes to every process of the step, the file system's too."""
    run = trainer_in_image(tmp_path, python_sqsh, "generic-slurm", name, 2)
    job_id = submit(plain_slurm, run)
    until(lambda: all((run / f"ready-{rank}").exists() for rank in range(4)))
    plain_slurm.run(("scancel", job_id) if name == "TERM" else ("scancel", "--batch", "--signal=USR2", job_id))
    until((run / "attempts/1/exit_code").exists)
    all_saved(run, name, 4)
