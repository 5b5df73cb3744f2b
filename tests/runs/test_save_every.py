"""`save_every` is decided at launch: who can be told, and how often a failure is to be expected."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.machine.report import Quiet
from runner.project import Project
from runner.runs import resolve
from runner.runs.job import Job, Resources
from runner.runs.launch import prepare
from runner.runs.plan import Request, RunPlan
from runner.runs.program import Program
from runner.runs.run import SUBMITTED, Run, save
from runner.site import Origin
from tests.runs.scripts import SLURM, shell_job

OWN = Program(None, (), None, outside=Path(__file__))
"""this file has the word RUNNER_SAVE_EVERY"""
OURS = (Path(__file__).resolve().parents[2] / "jobs/sft.py").read_text()


def launched(project: Path, text: str, key: str = '"auto"', program: str = 'script = "jobs/own.py"') -> RunPlan:
    for name, content in (("own.py", text), ("own.toml", f"{program}\nsave_every = {key}\n")):
        (project / "jobs").mkdir(exist_ok=True)
        (project / "jobs" / name).write_text(content)
    (project / "runner.toml").touch()
    (project / "edf").mkdir(exist_ok=True)
    (project / "edf/plain.toml").write_text('image = ""\n')
    request = Request(job="own", env="plain", site="local", engine="host", dry_run=True)
    found = Project(project, project / "none", project)
    return prepare(request, found, {"HOME": "/nowhere", "PATH": "/nonexistent"}, Quiet())


def test_the_tasks_get_the_key_and_the_dry_run_shows_the_reason(tmp_path: Path) -> None:
    plan = launched(tmp_path, OURS)
    assert "inside RUNNER_SAVE_EVERY auto\n" in plan.script
    why = "(1 failure in 6,000 node-hours: the training of Llama 3)"
    assert f"inside RUNNER_FAILURE_HOURS '6000.00 {why}'\n" in plan.script
    origin = plan.job.origins["save_every"]
    assert origin.source == f"first save after 300 s, to measure how long it takes; a failure every 6000.0 h {why}"
    assert origin.place is not None
    assert origin.place.line == 2
    script = launched(tmp_path, OURS, "600").script
    assert "inside RUNNER_SAVE_EVERY 600\n" in script
    assert "RUNNER_FAILURE_HOURS" not in script
    assert "inside RUNNER_SAVE_EVERY auto\n" in launched(tmp_path, "every = os.environ['RUNNER_SAVE_EVERY']").script
    without = launched(tmp_path, "", "0").script
    assert "RUNNER_SAVE_EVERY" not in without
    assert "RUNNER_FAILURE_HOURS" not in without


@pytest.mark.parametrize(
    ("text", "program", "option"),
    [
        (
            "from transformers import Trainer\n",
            'script = "jobs/own.py"',
            "TRL: --save_steps N), or let the script read",
        ),
        ("", 'script = "jobs/own.py"\ntrainer = "deepspeed"', "set your program's own option"),
        (OURS, 'command = ["torchrun", "/opt/Megatron-LM/pretrain_gpt.py"]', "--save-interval N"),
        (OURS, 'command = ["train"]\ntrainer = "torchtitan"', "--checkpoint.interval N"),
    ],
)
def test_a_trainer_that_cannot_be_told_is_refused_with_its_own_option(
    tmp_path: Path, text: str, program: str, option: str
) -> None:
    with pytest.raises(RunnerError, match="save_every does not work with") as refused:
        launched(tmp_path, text, program=program)
    assert option in refused.value.fix


@pytest.mark.parametrize(
    "program", ['command = ["python", "-m", "overlap.train"]', 'command = ["python", "/opt/own.py"]']
)
def test_a_program_that_cannot_be_read_here_may_read_the_variable(tmp_path: Path, program: str) -> None:
    assert launched(tmp_path, "", program=program).job.env["RUNNER_SAVE_EVERY"] == "auto"


def test_a_script_that_cannot_be_read_may_read_the_variable(tmp_path: Path) -> None:
    (tmp_path / "broken.py").symlink_to("/proc/self/mem")  # reading it is an error, also for root
    assert launched(tmp_path, "", program='command = ["python", "broken.py"]').job.env["RUNNER_SAVE_EVERY"] == "auto"


def test_our_script_may_also_be_a_word_of_the_command(tmp_path: Path) -> None:
    assert launched(tmp_path, OURS, program='command = ["torchrun", "jobs/own.py"]').job.env["RUNNER_FAILURE_HOURS"]


@pytest.mark.parametrize(("key", "what"), [('"5m"', "save_every cannot be '5m'"), ("true", "save_every cannot be True"),
                                           ("-1", "save_every cannot be -1")])  # fmt: skip
def test_another_value_is_refused(tmp_path: Path, key: str, what: str) -> None:
    with pytest.raises(RunnerError) as refused:
        launched(tmp_path, OURS, key)
    assert what in refused.value.what


def run_of(runs: Path, name: str, hours: float, *causes: str, site: str = "generic-slurm", nodes: int = 4) -> None:
    """A run on some nodes whose attempts took these hours each and ended for these causes."""
    folder = runs / name
    folder.mkdir(parents=True)
    save(Run(name, folder, "x", site, "slurm", f"2026-11-20T10:00:00 {name}", SUBMITTED, ("1",), nodes=nodes))
    for number, cause in enumerate(causes, 1):
        attempt = folder / "attempts" / str(number)
        attempt.mkdir(parents=True)
        for file, text, moment in (("started", "job 1\n", 0.0), ("cause", f"{cause}\n", hours * 3600)):
            (attempt / file).write_text(text)
            os.utime(attempt / file, (1e9 + moment, 1e9 + moment))


def auto(nodes: int = 10) -> Job:
    job = replace(shell_job("true"), save_every="auto", resources=Resources(nodes=nodes))
    return replace(job, origins={**job.origins, "save_every": Origin("job file")})


def test_the_runs_of_the_site_tell_how_often_a_failure_is_to_be_expected(tmp_path: Path) -> None:
    """3 failures in 4 nodes x 100 h x 5 attempts, and one in the published 6,000 node-hours, on 10 nodes."""
    run_of(tmp_path, "a-0001", 100, "node_failure", "hang", "time_limit")
    run_of(tmp_path, "b-0001", 100, "script_failure", "node_failure")
    run_of(tmp_path, "c-0001", 100, "node_failure", site="another")
    job = resolve.with_save_every(auto(), OWN, SLURM, tmp_path)
    why = "(1 failure in 6,000 node-hours: the training of Llama 3; 3 in 2,000 node-hours of earlier runs)"
    assert job.env["RUNNER_FAILURE_HOURS"] == f"{8000 / 4 / 10:.2f} {why}"


def test_the_figure_of_the_site_comes_before_the_published_one(tmp_path: Path) -> None:
    origins: dict[str, Any] = {"failure_hours": Origin("our admins", "2026-01-01")}
    site = replace(SLURM, failure_hours=500, origins=origins)
    for runs in (tmp_path, None):
        found = resolve.with_save_every(auto(), OWN, site, runs).env["RUNNER_FAILURE_HOURS"]
        assert found == "50.00 (1 failure in 500 node-hours: our admins)"


def test_the_dry_run_shows_how_long_a_save_of_the_last_run_of_the_job_took(tmp_path: Path) -> None:
    for number, waited in ((1, 9.0), (2, 2.1), (3, None)):
        run = tmp_path / f"test-{number:04}"
        run.mkdir()
        entry = f'{{"step": 1, "checkpoint_wait_seconds": {waited}}}\n' if waited else ""
        (run / "metrics.jsonl").write_text(entry)
    job = resolve.with_save_every(auto(nodes=500), OWN, SLURM, tmp_path)
    source = job.origins["save_every"].source
    assert source.startswith("the training waited 2.1 s for a save of test-0002; a failure every 12.0 h (")
