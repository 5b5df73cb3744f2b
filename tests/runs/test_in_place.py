"""Attempts that start in the allocation of the one before, on a real Slurm: which faults, and what stays as it was.

Whole trainings that survive them are in tests/faults.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.runs.job import Restart
from runner.runs.schedulers import slurm_commands as scheduler
from tests.conftest import need
from tests.lab import parts
from tests.lab.slurm import SlurmLab
from tests.runs.scripts import SLURM, command_job, write_run
from tests.runs.test_restart import causes
from tests.waiting import until

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
KILLED = "kill -KILL $$"
FIRST = 'n=${RUNNER_ATTEMPT##*/}; [ "$RANK" = 1 ] || { [ "$n" != 1 ] || exec sleep 100; exit 0; }; '
"""rank 1 decides; in the first attempt rank 0 waits for it"""


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    """Three nodes."""
    need(*parts.SLURM)
    with SlurmLab(nodes=3, plugins=()) as made:
        yield made


def written(folder: Path, text: str, *, spare: int = 0, **policy: Any) -> Path:
    """A run folder of two tasks, each on a node."""
    job = command_job("sh", "-c", text, launcher="srun", nodes=2, restart=Restart(**policy))
    job = replace(job, resources=replace(job.resources, spare_nodes=spare))
    return write_run(folder, job, site=SLURM)


def submit(lab: SlurmLab, run: Path, *flags: str) -> str:
    return scheduler.parse_submit(lab.run(scheduler.submit(run, flags), cwd=run).stdout)


def ended(lab: SlurmLab, run: Path, *flags: str) -> dict[str, str]:
    """What Slurm knows about the job of the run, after the job has ended."""
    return lab.wait_for(submit(lab, run, *flags), ENDED)


def rungs(run: Path) -> list[str]:
    """How each attempt was followed."""
    folders = sorted((run / "attempts").iterdir(), key=lambda path: int(path.name))
    return [(folder / "next").read_text().split()[0] for folder in folders if (folder / "next").exists()]


def test_after_a_killed_rank_the_same_job_goes_on(lab: SlurmLab, tmp_path: Path) -> None:
    run = written(tmp_path, f'{FIRST}[ "$n" != 1 ] || {KILLED}', script_failure=1)
    job = ended(lab, run)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0")
    assert causes(run) == ["script_failure", "done"]
    why = "task 1 on nid002 was killed by signal 9: the next attempt starts in this allocation, on the same nodes"
    assert (run / "attempts/1/next").read_text() == f"in_place\n{why}\nnid001,nid002\n"
    assert f"job.sbatch: {why}\n" in (run / "job.log").read_text()
    for number in (1, 2):
        lines = (run / f"attempts/{number}/started").read_text().splitlines()
        assert {"nodes nid[001-002]", "held nid[001-002]", f"job {job['JobId']}"} <= set(lines)


@pytest.mark.parametrize(
    ("policy", "text", "rung"),
    [
        ({}, "exit 3", "requeue"),
        ({"in_place": True}, "exit 3", "in_place"),
        ({"in_place": False}, KILLED, "requeue"),
    ],
)
def test_the_policy_decides_about_errors_of_the_script(
    lab: SlurmLab, tmp_path: Path, policy: dict[str, bool], text: str, rung: str
) -> None:
    run = written(tmp_path, f'{FIRST}[ "$n" != 1 ] || {text}', script_failure=1, **policy)
    submit(lab, run)
    until((run / "attempts/2/exit_code").exists)
    assert (causes(run), rungs(run)) == (["script_failure", "done"], [rung])


def test_a_spare_node_takes_the_place_of_a_lost_one(lab: SlurmLab, tmp_path: Path) -> None:
    down = 'scontrol update nodename="$SLURMD_NODENAME" state=down reason=fault; exec sleep 100'
    run = written(tmp_path, f'{FIRST}[ "$n" != 1 ] || {{ {down}; }}', spare=1, node_failure=1)
    job = ended(lab, run)
    lab.run(("scontrol", "update", "nodename=nid002", "state=resume"), check=False)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0")
    assert causes(run) == ["node_failure", "done"]
    why = "lost nid002: the next attempt starts in this allocation, with nid003 instead of nid002"
    assert (run / "attempts/1/next").read_text() == f"in_place\n{why}\nnid001,nid003\n"
    assert "nodes nid[001,003]" in (run / "attempts/2/started").read_text()
