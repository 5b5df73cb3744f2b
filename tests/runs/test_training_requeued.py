"""A training on two nodes of a real Slurm: told to leave, requeued twice, and one loss curve over all attempts."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.runs.job import Job, Resources, Restart
from runner.runs.schedulers import slurm_commands as scheduler
from tests.conftest import need
from tests.faults import by_jobs
from tests.faults.case import Case
from tests.faults.faults import GIVEN_UP
from tests.jobs import small
from tests.lab import parts
from tests.lab.slurm import SlurmLab
from tests.runs.scripts import BARE, SLURM, write_run

pytestmark = pytest.mark.training
for package in ("torch", "trl", "deepspeed"):
    pytest.importorskip(package)

JOBS = Path(__file__).resolve().parents[2] / "jobs"
TRAIN = (
    *(f"--model_name_or_path={small.MODEL}", f"--dataset_name={small.CONVERSATIONS}", "--max_length=32"),
    *("--packing", "--packing_strategy=wrapped", "--per_device_train_batch_size=2", "--learning_rate=1e-3"),
    *("--activation_checkpointing=false", "--gradient_checkpointing=false", "--logging_steps=1"),
    *("--deepspeed=zero2", "--save_strategy=no"),
)
ENVIRON = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def training(folder: Path, steps: int, minutes: int = 60, save_seconds: int = 60) -> Path:
    """The run folder of sft on two nodes, one process each, requeued twice by its policy."""
    resources = Resources(nodes=2, tasks_per_node=1, time_minutes=minutes)
    words = (*small.filled(TRAIN, folder), f"--max_steps={steps}")
    policy = {"restart": Restart(time_limit=2), "save_seconds": save_seconds}
    job = Job("sft", BARE, script="jobs/sft.py", arguments=words, launcher="srun", resources=resources,
              env=ENVIRON, **policy)  # fmt: skip
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


def until(condition: Callable[[], object], run: Path, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, (run / "job.log").read_text()
        time.sleep(0.02)


def one_curve(run: Path, whole: Path) -> None:
    """Three attempts, each of which took steps, have the losses of one; nothing was skipped or taken twice."""
    assert losses(run) == losses(whole)
    assert sum(len(losses(run, attempt)) for attempt in (1, 2, 3)) == len(losses(whole))
    assert all(losses(run, attempt) for attempt in (1, 2, 3))
    log = (run / "job.log").read_text()
    assert log.count("resuming from ") == 2
    assert "skipped" not in log
    assert [(run / f"attempts/{number}/cause").read_text().strip() for number in (1, 2, 3)] == [
        "time_limit",
        "time_limit",
        "done",
    ]


def uninterrupted(lab: SlurmLab, folder: Path, steps: int) -> Path:
    whole = training(folder, steps)
    lab.wait_for(submit(lab, whole), "COMPLETED", 600)
    assert sorted(losses(whole)) == list(range(1, steps + 1))
    return whole


def test_requeued_twice_it_has_the_losses_of_a_run_that_nothing_interrupted(
    plain_slurm: SlurmLab, tmp_path: Path
) -> None:
    """After the fourth step of a start comes what Slurm sends before the time limit: it saves, leaves and goes on."""
    whole = uninterrupted(plain_slurm, tmp_path / "whole", 60)
    run = training(tmp_path / "requeued", 60)
    job_id = submit(plain_slurm, run)
    for attempt in (1, 2):
        until(lambda number=attempt: len(losses(run, number)) >= 4, run)  # type: ignore[misc]
        plain_slurm.run(("scancel", "--batch", "--signal=USR2", job_id))
        until((run / "attempts" / str(attempt + 1)).exists, run)
    until((run / "attempts/3/exit_code").exists, run)
    one_curve(run, whole)


@pytest.mark.slow
def test_the_time_limit_itself(plain_slurm: SlurmLab, tmp_path: Path) -> None:
    """One minute a start, told 20 seconds before; the third is given an hour, since it is to come to the end."""
    steps = 1500
    run = training(tmp_path / "requeued", steps, minutes=1, save_seconds=20)
    job_id = submit(plain_slurm, run)
    until((run / "attempts/2/exit_code").exists, run)
    plain_slurm.run(("scontrol", "update", f"JobId={job_id}", "TimeLimit=60"))
    until((run / "attempts/3/exit_code").exists, run)
    one_curve(run, uninterrupted(plain_slurm, tmp_path / "whole", steps))


# a model whose losses do not depend on random states; each step is logged, and changes the next losses much
ELASTIC = (
    *("--model_type=gpt2", f"--tokenizer_name={small.MODEL}", "--block_size=32", "--do_train"),
    "--config_overrides=n_embd=32,n_head=2,n_layer=2,vocab_size=512,n_positions=64,attn_pdrop=0,embd_pdrop=0,resid_pdrop=0",
    *("--train_file={corpus}", "--deepspeed=zero2", "--learning_rate=1e-2", "--logging_steps=1", "--max_steps={steps}"),
    *("--per_device_train_batch_size=1", "--global_batch_size=4", "--save_steps=40"),
)


@pytest.mark.slow
def test_without_a_spare_node_it_continues_on_fewer_nodes() -> None:
    """A node is lost after a save. The other node takes all four sequences of a step, and repeats the steps since then.

    Sums of the same numbers in another order differ by 1e-6 at most; other data, other weights or another batch change
    a loss by 1e-3 and more.
    """
    need(*parts.SLURM)
    with Case(steps=120, config=GIVEN_UP) as case:
        case.resources = {"min_nodes": 1}
        by_jobs.use_our_job("clm.py", case, *ELASTIC)
        case.write()
        job_id = case.submit()
        case.reach(45)
        first, second = case.held_nodes()
        stop_between_saves(case, second)
        case.kill_node(second)
        outcome = case.outcome()
        assert outcome.causes == ("node_failure", "done") and outcome.rungs == ("in_place",), outcome.trouble
        assert case.job_ids() == {job_id}
        log = (case.run / "job.log").read_text()
        assert f"lost {second}: the next attempt starts in this allocation, without {second}\n" in log
        assert f"job.sbatch: ranks run on {first}; the job holds " in log
        assert "batch: 1 per process x 2 accumulation x 2 processes = 4 sequences per step" in log
        assert "batch: 1 per process x 4 accumulation x 1 processes = 4 sequences per step" in log
        before, after = losses(case.run, 1), losses(case.run, 2)
        resumed = min(after) - 1
        assert resumed in (40, 80) and f"checkpoints/checkpoint-{resumed} (step {resumed})\n" in log
        assert sorted(after) == list(range(resumed + 1, 121)) and sorted(before)[0] == 1
        repeated = before.keys() & after.keys()
        assert repeated, log
        assert {step: after[step] for step in repeated} == pytest.approx(
            {step: before[step] for step in repeated}, abs=1e-4
        )
        assert max(before.values()) - min(before.values()) > 0.1


def stop_between_saves(case: Case, node: str) -> None:
    """Suspend the ranks of a node, so that the others wait for them: not up to two steps before or after a save."""
    pids = by_jobs.ranks("clm.py", case, node)
    while True:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        if 2 <= max(losses(case.run)) % 40 <= 37:
            return
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.02)
