"""On a real Slurm: what happens when two features of a user's own batch script meet."""

import json
import subprocess
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


def test_a_sweep_over_a_heterogeneous_job_and_a_rerun_have_all_components(cluster: Runner, place: Path) -> None:
    write(place, {"het.sh": HET + 'srun --het-group=0,1 sh -c "echo $LR of $SLURM_HET_SIZE"\n'})
    name = cluster("launch", "--wait", "--sweep", "LR=1,2", "./het.sh", cwd=place).stdout.strip()
    rows = json.loads(cluster("status", "--json", name).stdout)
    again = cluster("rerun", rows[1]["run"]).stdout.strip()
    rows.append(cluster.wait(again, lambda status: status["state"] == "COMPLETED"))
    assert [row["state"] for row in rows] == ["COMPLETED"] * 3
    for row, rate in zip(rows, "122", strict=True):
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


OWN = "#!/bin/bash\n#SBATCH -t 5 -o out\npwd\ncat lib\n"


def test_attempts_from_a_snapshot_run_in_the_runs_own_copy(cluster: Runner, place: Path) -> None:
    """Also if Slurm gets the script again. What a script writes there reaches no other run, and no rerun."""
    write(place, {"own.sh": OWN + 'echo new >>lib\n[ "${RUNNER_ATTEMPT##*/}" = 2 ] || exit 75\n', "lib": "old\n"})
    words = ("launch", "--from-snapshot", "--restart", "time_limit=1", "./own.sh")
    for more, jobs in (((), 1), (("--sbatch=--no-requeue", "--sbatch=--open-mode=append"), 2)):
        last = ended(cluster, cluster(*words, *more, cwd=place).stdout.strip())
        own = cluster.runs / last["run"] / "code/work"
        assert (last["causes"], len(last["job_ids"])) == (["time_limit", "done"], jobs)
        lines = [line for line in (own / "out").read_text().splitlines() if "DUE TO JOB REQUEUE" not in line]
        assert lines == [str(own), "old", str(own), "old", "new"]
    assert (place / "lib").read_text() == "old\n" and not (place / "out").exists()
    refused = cluster("rerun", last["run"], code=1).stderr
    assert f"{last['run']} cannot be rerun" in refused and "--from-snapshot --restart time_limit=1 ./own.sh" in refused


def test_a_rerun_from_a_snapshot_has_the_code_of_the_launch(cluster: Runner, place: Path) -> None:
    write(place, {"own.sh": OWN, "lib": "old\n"})
    first, log = cluster.finished("--from-snapshot", "./own.sh", cwd=place)
    write(place, {"own.sh": "#!/bin/bash\n#SBATCH -t 5\nexit 9\n", "lib": "new\n"})
    again = cluster("rerun", first.name, cwd=cluster.project).stdout.strip()
    cluster.wait(again, lambda status: status["state"] == "COMPLETED")
    assert log.partition("\n")[2] == "old\n"
    assert (cluster.runs / again / "job.log").read_text() == log.replace(first.name, again)


def test_the_tasks_of_an_array_run_from_one_snapshot(cluster: Runner, place: Path) -> None:
    """A folder without code exists there too. A rerun of a task runs in its own copy."""
    write(place, {"array.sh": "#!/bin/bash\n#SBATCH -t 5 -a 1-2 -o out-%a\npwd\ncat ../work/lib\n", "lib": "old\n"})
    (cluster.project / "empty").mkdir()
    words = ("launch", "--wait", "--from-snapshot", "../work/array.sh")
    name = cluster(*words, cwd=cluster.project / "empty").stdout.strip()
    rows = json.loads(cluster("status", "--json", name).stdout)
    logs = [(cluster.runs / row["run"] / "job.log").read_text() for row in rows]
    assert logs == [f"{cluster.runs}/{name}/code/empty\nold\n"] * 2
    again = cluster("rerun", rows[1]["run"]).stdout.strip()
    cluster.wait(again, lambda status: status["state"] == "COMPLETED")
    assert (cluster.runs / again / "job.log").read_text() == f"{cluster.runs}/{again}/code/empty\nold\n"


def test_what_a_snapshot_leaves_out_is_named(cluster: Runner, place: Path) -> None:
    """A file with secrets, which the script may read; and the script itself, which cannot run then."""
    write(place, {"own.sh": OWN, ".env": "export A=1\n", "data/own.sh": OWN})
    words = ("launch", "--dry-run", "--from-snapshot")
    note = "work/.env is not in the snapshot (it may contain secrets, or git ignores it): the script cannot read it"
    assert note in cluster(*words, "./own.sh", cwd=place).stderr
    assert "secrets" not in cluster("launch", "--dry-run", "./own.sh", cwd=place).stderr
    write(cluster.project, {".gitignore": "own.sh\n"})
    subprocess.run(("git", "init", "-q"), cwd=cluster.project, check=True)
    error = cluster(*words, "./own.sh", cwd=place, code=1).stderr
    assert "cannot run ./own.sh from a snapshot" in error and "git ignores it" in error


GROWING = """\
#!/bin/bash
#SBATCH -t 5 -o train_%j.log
while :; do echo "iter 1: loss 2.0"; sleep 0.002; done
"""


def test_a_log_that_grows_beside_the_scripts_stops_no_launch(cluster: Runner, slurm: SlurmLab, place: Path) -> None:
    """In a folder without git, the log of a running job is one of the files of the snapshot."""
    write(place, {"slow.sbatch": GROWING, "own.sh": OWN, "lib": "x\n"})
    write(cluster.project, {"work/main.sh": "echo started\n"})
    job = slurm.run(("sbatch", "--parsable", "slow.sbatch"), cwd=place).stdout.strip()
    log = place / f"train_{job}.log"
    until(lambda: log.exists() and log.stat().st_size > 0)
    shown = [cluster("launch", "./own.sh", cwd=place), cluster("launch", "--script", "./main.sh", cwd=place)]
    slurm.run(("scancel", job))
    note = f"left out of the code snapshot: work/train_{job}.log (it changed during the launch)"
    assert [note in each.stderr for each in shown] == [True, True]


def test_a_sweep_over_an_array_is_refused_with_its_line(cluster: Runner, place: Path) -> None:
    write(place, {"array.sh": "#!/bin/bash\n#SBATCH -t 5\n#SBATCH -a 1-2\n"})
    error = cluster("launch", "--sweep", "LR=1,2", "./array.sh", cwd=place, code=2).stderr
    assert "./array.sh:3: --sweep does not work with an array" in error and not cluster.made()
