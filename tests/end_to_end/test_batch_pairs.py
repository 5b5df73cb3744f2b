"""On a real Slurm: what happens when two features of a user's own batch script meet."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import Runner, write
from tests.lab.slurm import SlurmLab
from tests.waiting import until

HET = "#!/bin/bash\n#SBATCH -t 5 -N 1 -o out-%j\n#SBATCH hetjob\n#SBATCH -t 5 -N 1\n"


@pytest.fixture
def place(project: Path) -> Path:
    """A folder of the user's, apart from the project's folders."""
    (project / "work").mkdir(parents=True)
    return project / "work"


def ended(runner: Runner, name: str) -> dict[str, Any]:
    """The status after the last attempt."""
    folder = runner.runs / name
    until(
        lambda: (
            (folder / "stopped").exists() or "done\n" in [path.read_text() for path in folder.glob("attempts/*/cause")]
        )
    )
    return runner.wait(name, lambda status: status["state"] not in ("PENDING", "RUNNING", "COMPLETING"))


AGAIN = 'srun --het-group=0,1 sh -c "echo part $SLURM_HET_SIZE"\n[ "${RUNNER_ATTEMPT##*/}" = 3 ] || exit 75\n'


def test_a_heterogeneous_job_is_submitted_again_with_all_components(cluster: Runner, place: Path) -> None:
    write(place, {"het.sh": HET.replace("#SBATCH hetjob", "#SBATCH --no-requeue\n#SBATCH hetjob") + AGAIN})
    last = ended(cluster, cluster("launch", "--restart", "time_limit=2", "./het.sh", cwd=place).stdout.strip())
    assert (last["state"], last["causes"]) == ("COMPLETED", ["time_limit", "time_limit", "done"])
    assert cluster("logs", last["run"]).stdout.count("part 2\n") == 6 and len(last["job_ids"]) == 3


def test_a_heterogeneous_job_is_requeued_whole_and_counted_once(cluster: Runner, slurm: SlurmLab, place: Path) -> None:
    """Slurm lists each component, with its own count. It starts a requeued job after two minutes, so this test does not
    wait for that."""
    write(place, {"het.sh": HET + AGAIN})
    folder = cluster.launch("--restart", "time_limit=2", "./het.sh", cwd=place)
    job = cluster.status(folder.name)["job_id"]
    slurm.wait_for(job, "PENDING")
    until(lambda: (folder / "attempts/1/exit_code").exists() and slurm.job(job)["Restarts"] == "1")
    script = f". payload/restart.sh; RUNNER_JOB={job}; restarts_by_slurm"
    assert slurm.run(("bash", "-c", script), cwd=folder).stdout == "1"
    cluster("cancel", folder.name)
    assert {slurm.wait_for(each, "CANCELLED")["Restarts"] for each in (job, str(int(job) + 1))} == {"1"}


def test_a_rerun_of_a_heterogeneous_job_has_all_components(cluster: Runner, place: Path) -> None:
    write(place, {"het.sh": HET + 'srun --het-group=0,1 sh -c "echo part $SLURM_HET_SIZE"\n'})
    first, _ = cluster.finished("./het.sh", cwd=place)
    again = cluster("rerun", first.name).stdout.strip()
    cluster.wait(again, lambda status: status["state"] == "COMPLETED")
    assert cluster("logs", again).stdout.count("part 2\n") == 2


def test_a_sweep_over_a_heterogeneous_job(cluster: Runner, place: Path) -> None:
    write(place, {"het.sh": HET + 'srun --het-group=0,1 sh -c "echo $LR of $SLURM_HET_SIZE"\n'})
    name = cluster("launch", "--wait", "--sweep", "LR=1,2", "./het.sh", cwd=place).stdout.strip()
    rows = json.loads(cluster("status", "--json", name).stdout)
    assert [row["state"] for row in rows] == ["COMPLETED"] * 2
    for row, rate in zip(rows, "12", strict=True):
        assert cluster("logs", row["run"]).stdout.count(f"{rate} of 2\n") == 2


def test_a_task_of_an_array_that_may_not_be_requeued_is_submitted_again_alone(cluster: Runner, place: Path) -> None:
    """With its own number, also when a rerun has started it."""
    text = '#!/bin/bash\n#SBATCH -t 5 -a 3-4 --no-requeue -o out-%A_%a\necho "of $SLURM_ARRAY_TASK_ID"\n'
    text += '[ "$SLURM_ARRAY_TASK_ID" = 3 ] || [ "${RUNNER_ATTEMPT##*/}" = 2 ] || exit 75\n'
    write(place, {"array.sh": text})
    name = cluster("launch", "--restart", "time_limit=1", "./array.sh", cwd=place).stdout.strip()
    rows = [ended(cluster, row["run"]) for row in json.loads(cluster("status", "--json", name).stdout)]
    assert [row["causes"] for row in rows] == [["done"], ["time_limit", "done"]]
    again = ended(cluster, cluster("rerun", rows[1]["run"]).stdout.strip())
    for row in (rows[1], again):
        assert (row["state"], row["causes"], len(row["job_ids"])) == ("COMPLETED", ["time_limit", "done"], 2)
        assert cluster("logs", row["run"]).stdout.count("of 4\n") == 2
