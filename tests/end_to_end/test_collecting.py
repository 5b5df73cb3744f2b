"""`runner gc --runs` and `--code` remove what is over and old, and nothing that a live job uses."""

import json
import os
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Runner, environment, write
from tests.lab.slurm import SlurmLab
from tests.waiting import until


def aged(folder: Path) -> Path:
    """As if it had been launched long ago."""
    record = json.loads((folder / "run.json").read_text())
    write(folder, {"run.json": json.dumps({**record, "created": "2020-01-01T00:00:00+00:00"})})
    return folder


@pytest.mark.uses("bubblewrap", "squashfuse")
def test_what_a_live_job_uses_stays_and_the_rest_goes(
    cluster: Runner, project: Path, busybox_sqsh: Path, slurm: SlurmLab
) -> None:
    write(project, {"edf/box.toml": environment(busybox_sqsh)})
    words = ("--env", "box")
    over, young, tagged, by_hand, before = (
        cluster.finished(*words, *more, "--", "true")[0] for more in ((), (), ("--tag", "paper"), (), ())
    )
    running = cluster.launch(*words, "--after", before.name, "--", "sleep", "120")
    until((running / "attempts/1/environment.sh").exists, "the job")
    # whoever submits a run's script by hand is seen by where that job works, while it waits too
    job_id = slurm.run(("sbatch", "--parsable", "--begin=now+1hour", "job.sbatch"), cwd=by_hand).stdout.strip()
    for folder in (over, tagged, by_hand, before, running):
        aged(folder)
    shown = cluster("gc", "--runs", "--older", "1d", "--dry-run")
    assert shown.stdout.split() == [str(over)] and over.is_dir()
    for name in (running.name, by_hand.name, before.name, tagged.name):
        assert f"kept: {name}: " in shown.stderr
    assert cluster("gc", "--code", "--older", "1d").stdout.split() == [str(over / "code")]
    assert over.is_dir() and not list((over / "code").iterdir())
    assert cluster("gc", "--runs", "--older", "1d", "--tagged").stdout.split() == [str(over), str(tagged)]
    assert sorted(path.name for path in cluster.made()) == sorted(
        path.name for path in (young, by_hand, before, running)
    )
    slurm.run(("scancel", job_id))
    cluster("cancel", running.name)


@pytest.mark.uses("bubblewrap", "squashfuse")
def test_launches_of_the_same_code_share_it_and_no_job_can_change_it(
    cluster: Runner, project: Path, busybox_sqsh: Path
) -> None:
    """The copy goes with the last run that has it."""
    write(project, {"edf/box.toml": environment(busybox_sqsh), "jobs/try.sh": "cat jobs/x; echo y >jobs/x; echo $?\n",
                    "jobs/x": "one\n"})  # fmt: skip
    for engine in ("ce", "pyxis"):
        site = "generic-pyxis" if engine == "pyxis" else cluster.site
        _, log = Runner(project, cluster.environ, site).finished("--env", "box", "--script", "try")
        assert "one\n" in log and "Read-only file system" in log
    first, second = sorted(path for path in cluster.made())
    assert (first / "code/jobs/x").samefile(second / "code/jobs/x")
    (store,) = (cluster.runs / ".code").iterdir()
    os.utime(store, (0, 0))
    cluster("gc", "--code", "--older", "1m")
    assert store.is_dir()
    for folder in (first, second):
        aged(folder)
    cluster("gc", "--runs", "--older", "1m")
    assert not store.is_dir() and not cluster.made()


def test_where_the_scheduler_does_not_answer_nothing_of_its_runs_goes(local: Runner) -> None:
    folder, _ = local.finished("--engine", "host", "--", "true")
    record = json.loads((aged(folder) / "run.json").read_text())
    assert local("gc", "--runs", "--older", "1d", "--dry-run").stdout.split() == [str(folder)]
    write(folder, {"run.json": json.dumps({**record, "scheduler": "slurm", "job_ids": ["17"]})})
    shown = local("gc", "--runs", "--older", "1d", extra_environ={"PATH": "/nonexistent"})
    assert shown.stdout == "" and folder.is_dir() and "squeue does not answer" in shown.stderr


def test_an_attempt_without_an_exit_code_stays_for_a_day(local: Runner) -> None:
    folder, _ = local.finished("--engine", "host", "--", "true")
    aged(folder)
    (folder / "attempts/1/exit_code").unlink()
    assert local("gc", "--runs", "--older", "1d").stdout == ""
    for path in (*(folder / "attempts/1").iterdir(), folder / "attempts/1", folder / "job.log"):
        os.utime(path, (0, 0))
    assert local("gc", "--runs", "--older", "1d").stdout.split() == [str(folder)]


def test_what_an_interrupted_removal_left_is_not_a_run_and_is_removed(local: Runner) -> None:
    folder, _ = local.finished("--engine", "host", "--", "true")
    left = folder.rename(local.runs / f".going-{folder.name}")
    code = local.runs / "x-0001/.going-code"
    write(code, {"jobs/x": ""})
    assert "[]" in local("status", "--json").stdout
    assert local("gc", "--runs", "--older", "1d").stdout == ""
    assert not left.exists() and not code.exists() and code.parent.is_dir()


def test_an_age_must_be_given(local: Runner) -> None:
    assert "--older" in local("gc", "--runs", code=2).stderr
