"""Sweeps and chains on a real Slurm, and without one: a run per combination, each after those that it waits for."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Runner, environment, write
from tests.lab.slurm import SlurmLab
from tests.waiting import until

SCORE = """\
echo "arguments $*"
printf '{"step": 1, "loss": %s}\\n' "0.$4" >"$RUNNER_RUN/metrics.jsonl"
[ "$4" != 2 ] || exit 3
"""

WAITS = (
    "trap 'touch $RUNNER_RUN/told' USR2; touch $RUNNER_RUN/up; until [ -e $RUNNER_RUN/go ]; do sleep 0.1; done; : {n}"
)


@pytest.fixture
def boxed(project: Path, busybox_sqsh: Path) -> None:
    write(project, {"edf/box.toml": environment(busybox_sqsh), "jobs/score.sh": SCORE})


def check_table(runner: Runner, name: str) -> None:
    """The results of `--sweep lr=1e-5,2e-5 --sweep seed=1,2`, in which seed 2 fails."""
    runs = json.loads(runner("status", "--json", name).stdout)
    assert [each["state"] for each in runs] == ["COMPLETED", "FAILED"] * 2
    rows = [line.split() for line in runner("history", name, "--tag", "try").stdout.splitlines()]
    columns = [rows[0].index(word) + 1 for word in ("lr", "seed", "LOSS")]  # CREATED has two words
    assert [[row[column] for column in columns] for row in rows[1:]] == [
        ["1e-5", "1", "0.1000"], ["1e-5", "2", "0.2000"], ["2e-5", "1", "0.1000"], ["2e-5", "2", "0.2000"]]  # fmt: skip


@pytest.mark.uses("bubblewrap", "squashfuse")
def test_a_sweep_is_one_array_job_with_a_run_for_each_combination(
    cluster: Runner, boxed: None, slurm: SlurmLab
) -> None:
    words = ("--env", "box", "--script", "score", "--sweep", "lr=1e-5,2e-5", "--sweep", "seed=1,2", "--tag", "try")
    shown = cluster("launch", *words, "--dry-run")
    assert "#SBATCH --array=0-3\n" in shown.stderr and "--lr 1e-5 --seed 1" in shown.stdout
    name = cluster("launch", *words).stdout.strip()
    (folder,) = (path for path in cluster.made() if path.name == name)
    array = {json.loads((folder / str(n) / "run.json").read_text())["job_ids"][0] for n in range(4)}
    assert len({job_id.partition("_")[0] for job_id in array}) == 1 and len(array) == 4
    until(lambda: all((folder / f"{n}/attempts/1/exit_code").exists() for n in range(4)), "the tasks")
    cluster("watch", name)
    check_table(cluster, name)
    assert "arguments --lr 2e-5 --seed 1" in cluster("logs", "score-0003").stdout
    assert "sweep of 4 runs" in cluster("logs", name, code=1).stderr


@pytest.mark.uses("bubblewrap", "squashfuse")
def test_a_task_of_an_array_is_cancelled_and_told_to_save_alone(cluster: Runner, boxed: None, slurm: SlurmLab) -> None:
    """The last task of an array has the array's own number as its job id: what is meant for it must not hit all."""
    name = cluster("launch", "--env", "box", "--sweep", "n=0,1", "--", "sh", "-c", WAITS).stdout.strip()
    until(lambda: all((cluster.runs / name / f"{n}/up").exists() for n in (0, 1)), "both")
    last = (cluster.runs / name / "1").resolve()
    slurm.run(("scancel", "--batch", "--signal=USR2", json.loads((last / "run.json").read_text())["job_ids"][0]))
    until((last / "told").exists, "the signal")
    cluster("cancel", last.name)
    (cluster.runs / name / "0/go").touch()
    state = cluster.wait((cluster.runs / name / "0").resolve().name, lambda one: one["state"] != "RUNNING")
    assert state["state"] in ("COMPLETED", "COMPLETING"), "the other task goes on to its end"
    assert not (cluster.runs / name / "0/told").exists()


@pytest.mark.uses("bubblewrap", "squashfuse")
def test_a_chain_starts_in_turn_and_finds_what_was_left_and_never_starts_after_a_failure(
    cluster: Runner, boxed: None
) -> None:
    waits = "until [ -e $RUNNER_RUN/go ]; do sleep 0.2; done; echo found >$RUNNER_RUN/out"
    first = cluster.launch("--env", "box", "--", "sh", "-c", waits)
    words = ("--env", "box", "--after", first.name, "--")
    second = cluster.launch(*words, "sh", "-c", "cat $RUNNER_AFTER/out {after}/out; touch $RUNNER_AFTER/x; exit 4")
    third = cluster.launch("--env", "box", "--after", second.name, "--", "true")
    fourth = cluster.launch("--env", "box", "--after-any", second.name, "--", "true")
    assert cluster.status(second.name)["state"] == "PENDING"
    (first / "go").touch()
    states = {name: cluster.wait(name, lambda one: one["state"] not in ("PENDING", "RUNNING", "COMPLETING"))["state"]
              for name in (second.name, third.name, fourth.name)}  # fmt: skip
    assert list(states.values()) == ["FAILED", "CANCELLED", "COMPLETED"]
    assert (second / "job.log").read_text().count("found\n") == 2
    assert not (first / "x").exists(), "the folder of the run before is there to read"
    assert "ended as FAILED" in cluster("launch", "--env", "box", "--after", second.name, "--", "true", code=1).stderr


def test_without_a_scheduler_runs_of_a_sweep_come_in_turn_and_a_chain_waits(local: Runner, project: Path) -> None:
    write(project, {"jobs/score.sh": SCORE})
    name = local("launch", "--engine", "host", "--script", "score", "--sweep", "lr=1e-5,2e-5", "--sweep", "seed=1,2",
                 "--tag", "try").stdout.strip()  # fmt: skip
    last = (local.runs / name / "3").resolve().name
    after = local.launch("--engine", "host", "--after", last, "--", "true")
    assert local.status(after.name)["state"] == "PENDING"
    local("watch", name)
    check_table(local, name)
    state = local.wait(after.name, lambda one: one["state"] not in ("PENDING", "RUNNING"))
    assert state["state"] == "CANCELLED" and f"{last} ended with exit code 3" in state["reason"]
