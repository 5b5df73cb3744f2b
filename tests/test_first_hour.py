"""What a newcomer reads in the first hour: messages name the next command, and nothing is printed twice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.commands.console import Console
from runner.runs import shell
from runner.runs.run import Run
from runner.runs.status import RunStatus


def runner(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "HOME": str(folder / "home"), "RUNNER_SITE": "local", **environ}
    argv = (sys.executable, "-m", "runner", *words)
    return subprocess.run(argv, cwd=folder, env=variables, capture_output=True, text=True, check=False)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "runner.toml").write_text('environment = "plain"\n')
    (tmp_path / "edf").mkdir()
    (tmp_path / "edf/plain.toml").write_text('image = ""\n')
    return tmp_path


def test_cancel_without_a_run_names_last(project):
    done = runner(project, "cancel")
    assert done.returncode == 2 and "runner cancel last" in done.stderr and "usage" not in done.stderr


def test_prefetch_without_a_job_speaks_of_prefetch(project):
    done = runner(project, "prefetch")
    assert done.returncode == 2 and "runner prefetch JOB" in done.stderr and "launch" not in done.stderr


@pytest.mark.parametrize("words", [("env", "show", "plain"), ("env", "check", "plain"), ("shell", "plain", "--dry-run"),
                                   ("launch", "--env", "plain", "--dry-run", "--", "true")])  # fmt: skip
def test_a_misspelt_key_of_runner_toml_is_named_by_every_verb_that_takes_an_environment(project, words):
    (project / "runner.toml").write_text('enviroment = "plain"\n')
    done = runner(project, *words)
    assert done.returncode == 1 and "unknown key 'enviroment'" in done.stderr and "'environment'" in done.stderr


def test_a_launch_says_what_it_uses_in_one_line_and_why_with_v(project):
    words = ("launch", "--engine", "host", "--dry-run", "--", "true")
    lines = runner(project, *words).stderr.splitlines()
    assert lines[0] == "environment plain, site local, engine host"
    assert lines[1].startswith("would run: ")
    long = runner(project, "-v", *words).stderr
    assert (
        "site local (RUNNER_SITE)" in long and "engine host (--engine)" in long and "the default of runner.toml" in long
    )


def test_a_dry_run_lists_what_git_does_not_have(project):
    """Not a dozen of a thousand names: what differs from the commit, or how many files each folder has."""
    (project / "jobs").mkdir()
    for name in ("jobs/own.sh", "jobs/other.sh", "new.sh"):
        (project / name).write_text("true\n")
    words = ("launch", "--engine", "host", "--dry-run", "--script", "own")
    assert "  2 jobs/, 2 at the top, 1 edf/" in runner(project, *words).stderr.splitlines()
    for argv in (("git", "init", "-q"), ("git", "add", "jobs", "edf", "runner.toml"),
                 ("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all of it")):  # fmt: skip
        subprocess.run(argv, cwd=project, check=True)
    lines = runner(project, *words).stderr.splitlines()
    assert "  new.sh (untracked)" in lines and not [line for line in lines if "other.sh" in line]


def test_a_shell_prompt_shows_where_it_is():
    """The run or environment comes before bash's own prompt, whatever its start-up files set; sh has it too."""
    command = shell.prompt(True, "sft-0003")[-1]
    for program, text in (("bash", 'PS1=\'mine# \'; eval "$PROMPT_COMMAND"; eval "$PROMPT_COMMAND"'), ("sh", ":")):
        done = subprocess.run(
            ("sh", "-c", command.split("command -v")[0] + f'exec {program} -c "$1"', "sh", text + '; printf %s "$PS1"'),
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout == {"bash": "(sft-0003) mine# ", "sh": "(sft-0003) $ "}[program]
    assert "(a_b_) " in shell.prompt(True, "a'b$")[-1]


def test_json_has_one_object_per_line(project):
    for words in (("site", "show", "local", "--json"), ("env", "show", "plain", "--json")):
        done = runner(project, *words)
        assert len(done.stdout.splitlines()) == 1 and json.loads(done.stdout)["name"]


def test_memory_names_its_unit_before_the_table(project):
    shape = ("--hidden_size", "64", "--num_hidden_layers", "2", "--num_attention_heads", "4")
    done = runner(project, "memory", *shape, "--vocab_size", "100", "--intermediate_size", "128")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0].endswith("GiB per GPU:") and "LOSS" not in done.stdout.splitlines()[0]


def test_a_shell_of_a_waiting_run_says_that_it_takes_an_allocation_of_its_own(tmp_path, monkeypatch):
    (tmp_path / shell.EDF).write_text('image = "/x.sqsh"\n')
    run = Run("x-0001", tmp_path, "x", "generic-slurm", "slurm", "2026")
    monkeypatch.setattr(shell, "ask", lambda runs: (RunStatus(run, "PENDING"),))
    said: list[str] = []
    report = Console()
    monkeypatch.setattr(report, "say", said.append)
    shell._place_of_run(run, None, {}, report)
    assert said == ["x-0001 is not running (PENDING): requesting a separate allocation for this shell"]


@pytest.mark.parametrize(
    ("own", "requested", "contained"),
    [("host", None, False), ("sarus", None, True), ("sarus", "host", False), ("", None, True)],
)
def test_a_shell_of_a_run_promises_a_container_only_if_its_engine_has_one(
    tmp_path, monkeypatch, own, requested, contained
):
    """Own batch scripts, too, have the engine host. --engine overrides the run's."""
    (tmp_path / shell.EDF).write_text('image = "/x.sqsh"\n')
    run = Run("x-0001", tmp_path, "x", "generic-slurm", "slurm", "2026", engine=own)
    said: list[str] = []
    report = Console()
    monkeypatch.setattr(report, "say", said.append)
    for state in ("RUNNING", "COMPLETED"):
        status = RunStatus(run, state, nodes="n1")
        monkeypatch.setattr(shell, "ask", lambda runs, status=status: (status,))
        shell._place_of_run(run, requested, {}, report)
    if contained:
        opening = "a new container from the same image inside its allocation"
    else:
        opening = "a shell inside its allocation, outside any container"
    assert said[0] == f"x-0001 is running on n1: opening {opening}"
    what = "new container from the same image" if contained else "shell outside any container"
    assert said[1] == f"x-0001 is COMPLETED: requesting an allocation for a {what}"
