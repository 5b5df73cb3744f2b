"""A training on two nodes of a real Slurm: told to leave, queued again twice, and one loss curve over all attempts."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.runs.job import Job, Resources
from runner.runs.schedulers import slurm as scheduler
from tests.lab.slurm import SlurmLab
from tests.runs.scripts import BARE, SLURM, write_run

pytestmark = pytest.mark.training
for package in ("torch", "trl", "deepspeed"):
    pytest.importorskip(package)

JOBS = Path(__file__).resolve().parents[2] / "jobs"
STEPS = 60
TRAIN = (
    *("--model_name_or_path=tiny-llama", "--dataset_name=python-docs", "--vocabulary_size=512", "--max_length=32"),
    *("--packing", "--packing_strategy=wrapped", "--per_device_train_batch_size=2", "--learning_rate=1e-3"),
    *("--activation_checkpointing=false", "--gradient_checkpointing=false", "--logging_steps=1"),
    *("--deepspeed=zero2", "--save_strategy=no", f"--max_steps={STEPS}"),
)
ENVIRON = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def training(folder: Path) -> Path:
    """The run folder of sft on two nodes, one process each."""
    resources = Resources(nodes=2, tasks_per_node=1)
    job = Job("sft", BARE, script="jobs/sft.py", arguments=TRAIN, launcher="srun", resources=resources, env=ENVIRON)
    sources = (path for path in JOBS.rglob("*") if path.suffix in (".py", ".json"))
    code = {f"jobs/{path.relative_to(JOBS)}": path.read_text() for path in sources}
    return write_run(folder, job, site=SLURM, code=code)


def submit(lab: SlurmLab, run: Path) -> str:
    return scheduler.parse_submit(lab.run(scheduler.submit(run, ()), cwd=run).stdout)


def losses(run: Path, attempt: int | None = None) -> dict[int, float]:
    """loss by step, of all attempts or of one"""
    path = run / "metrics.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = [entry for entry in entries if "loss" in entry and attempt in (None, entry["attempt"])]
    return {entry["step"]: entry["loss"] for entry in found}


def until(condition: Callable[[], object], run: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, (run / "job.log").read_text()
        time.sleep(0.02)


def test_queued_again_twice_it_has_the_losses_of_a_run_that_nothing_interrupted(
    plain_slurm: SlurmLab, tmp_path: Path
) -> None:
    """After the fourth step of a start comes what Slurm sends before the time limit: it saves, leaves and goes on."""
    whole = training(tmp_path / "whole")
    plain_slurm.wait_for(submit(plain_slurm, whole), "COMPLETED", 180)
    assert sorted(losses(whole)) == list(range(1, STEPS + 1))

    run = training(tmp_path / "queued-again")
    job_id = submit(plain_slurm, run)
    for attempt in (1, 2):
        until(lambda number=attempt: len(losses(run, number)) >= 4, run)  # type: ignore[misc]
        plain_slurm.run(("scancel", "--batch", "--signal=USR2", job_id))
        until((run / "attempts" / str(attempt) / "exit_code").exists, run)
        assert (run / "attempts" / str(attempt) / "exit_code").read_text() == "75\n", (run / "job.log").read_text()
        plain_slurm.wait_for(job_id, "FAILED")
        plain_slurm.run(("scontrol", "requeue", job_id))
    plain_slurm.wait_for(job_id, "COMPLETED", 180)

    assert losses(run) == losses(whole)
    assert all(losses(run, attempt) for attempt in (1, 2, 3))
    log = (run / "job.log").read_text()
    assert log.count("resuming from ") == 2
    assert "skipped" not in log
