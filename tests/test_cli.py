"""The command line's manners: exit codes, errors in three parts, stdout is exactly the answer."""

from __future__ import annotations

import argparse
import importlib
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from runner import cli
from runner.cli import VERBS, split_rest
from runner.errors import RunnerError


def runner(*argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run((sys.executable, "-m", "runner", *argv), capture_output=True, text=True, cwd=cwd)


def test_words_after_the_first_bare_dashes_are_left_alone() -> None:
    assert split_rest(["launch", "--env", "x", "--", "a", "--", "-v"]) == (["launch", "--env", "x"], ("a", "--", "-v"))
    assert split_rest(["status"]) == (["status"], ())


def test_the_overview_names_every_verb_and_its_own_help_exists() -> None:
    overview = runner("--help")
    assert overview.returncode == 0 and not overview.stderr
    for verb in VERBS:
        assert f"  {verb} " in overview.stdout
        own = runner(verb, "--help")
        program = "runner-importer" if verb == "importer" else f"runner {verb}"  # as pyxis and administrators call it
        assert own.returncode == 0 and f"usage: {program} " in own.stdout


def test_each_verb_has_a_function_that_takes_its_arguments() -> None:
    """The modules of verbs are imported when the verb runs, so a misspelt name would be found only then."""
    for module, _, function in (name.partition(":") for name, _ in VERBS.values()):
        found = getattr(importlib.import_module(f"runner.commands.{module}"), function or "add")
        assert list(inspect.signature(found).parameters) == (
            ["args", "console"] if function else ["subparsers", "common"]
        )


def test_each_table_of_options_belongs_to_a_verb() -> None:
    """A command reads its own table only. This test reads the whole file."""
    tables = tomllib.loads((Path(cli.__file__).parent / "commands" / "options.toml").read_text())
    env = tables.pop("env")
    assert set(tables) <= set(VERBS) and set(env) == {"show", "emit", "check", "adopt"}
    for words, table in ((["gc"], tables["gc"]), (["env", "check"], env["check"])):
        shown = runner(*words, "--help").stdout
        assert all(option.split()[-1].strip("-") in shown for option in table if option.startswith("-"))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("lanch",), "did you mean `runner launch`?"),
        (("launch", "--nodse", "2"), "--nodse"),
        (("launch", "--nod", "2"), "--nod"),  # no abbreviations
        (("env",), "runner env --help"),
        (("gc", "--older", "30d", "--dry-run"), "--older is given without --runs or --code"),
        (("gc", "--tagged"), "--tagged is given without --runs or --code"),
        (("init", "--account", "a01", "--dry-run"), "runner init --site NAME --account NAME"),
        (("init", "--site", "x", "--all", "--dry-run"), "--all is given with --site"),
        (("connect", "host", "--close", "--install"), "not allowed with argument --close"),
        (("memory", "--megatron", "7.5B", "--dtype", "fp16"), "--dtype has no effect with --megatron"),
        (("memory", "gpt2", "--megatron", "7.5B"), "gpt2 has no effect with --megatron"),
        (("why", "last", "--log", "x"), "why: both a run and --log are given"),
        (("why", "--list", "nccl", "--log", "x"), "not allowed with argument"),
        (("env", "check", "--list", "mount", "--json"), "--json has no effect with --list"),
    ],
)
def test_a_usage_error_is_exit_code_2_in_three_parts(argv: tuple[str, ...], said: str) -> None:
    done = runner(*argv)
    assert done.returncode == 2 and not done.stdout
    assert "because:" in done.stderr and "try:" in done.stderr and said in done.stderr
    assert "runner: runner" not in done.stderr


@pytest.mark.parametrize(
    ("argv", "named", "advice"),
    [
        (("launch", "--env", "cpu", "--nodess", "2"), "launch: unknown option '--nodess 2'", "did you mean --nodes?"),
        (("status", "--sitee=x"), "status: unknown option '--sitee=x'", "did you mean --site?"),
        (("env", "show", "--jsn"), "env show: unknown option '--jsn'", "did you mean --json?"),
        (("--hlep",), "no verb in '--hlep'", "did you mean runner --help?"),
    ],
)
def test_an_unknown_option_is_named_whole_with_what_was_meant(argv: tuple[str, ...], named: str, advice: str) -> None:
    done = runner(*argv)
    assert done.returncode == 2 and named in done.stderr and advice in done.stderr
    verb = " ".join(word for word in argv if word in ("launch", "status", "env", "show"))
    assert not verb or f"usage: runner {verb}" in done.stderr


@pytest.mark.parametrize(
    ("argv", "advice"),
    [
        (("run", "train.py"), "did you mean `runner launch`?"),
        (("kill", "last"), "did you mean `runner cancel`?"),
        (("version",), "did you mean `runner --version`?"),
        (("launch", "-N", "2"), "did you mean --nodes?"),
        (("launch", "-t10"), "did you mean --time?"),
        (("launch", "--mem=10G"), "did you mean --memory?"),
        (("launch", "--gres", "gpu:4"), "did you mean --gpus-per-node?"),
        (("launch", "--qos=normal"), "--sbatch=--qos=normal"),
        (("launch", "-C", "gpu"), "--sbatch=--constraint=gpu"),
        (("launch", "--exclusive"), "--sbatch=--exclusive"),
        (("launch", "sft", "--array=1-3"), "runner launch --sweep NAME=VALUE,VALUE"),
        (("launch", "./job.sh", "--array=1-3"), "--sbatch=--array=1-3"),
        (("launch", "x" * 300, "--qos=a"), "--sbatch=--qos=a"),
        (("launch", "--container-mounts=/a:/b"), "write `mounts` in the EDF"),
        (("shell", "--qos=normal"), "--srun=--qos=normal"),
        (("launch", "bash", "job.sh"), "runner launch -- bash job.sh"),
        (("launch", "sft", "3"), "runner launch … -- 3"),
        (("launch", "job.py", "--site", "local"), "runner launch --script job.py"),
        (("build", "Containerfile"), "runner build ./Containerfile"),
        (("build", "."), "runner build ./Containerfile"),
        (("build", "app"), "runner build app/Dockerfile"),
        (("shell", "image.sqsh"), "is an image, not an environment"),
        (("shell", "./image.sqsh"), "name the environment ./edf/image.toml"),
        (("launch", "own.toml"), "to use the file of that name: ./own.toml"),
        (("build", "-t", "me/img"), "did you mean --tag?"),
        (("build", "--qos=normal"), "--sbatch=--qos=normal"),
        (("build", "--network=host"), "for a flag of podman or docker: runner build … -- --network=host"),
        (("env", "show", "--", "x"), "`runner env show` does not pass arguments on"),
    ],
)
def test_what_other_programs_call_it_is_answered_with_what_it_is_called_here(
    tmp_path: Path, argv: tuple[str, ...], advice: str
) -> None:
    (tmp_path / "app").mkdir()
    for name in ("job.sh", "job.py", "own.toml", "Containerfile", "app/Dockerfile", "image.sqsh"):
        (tmp_path / name).write_text("FROM scratch\n")
    done = runner(*argv, cwd=tmp_path)
    assert done.returncode != 0 and advice in done.stderr, done.stderr


def test_nothing_is_suggested_that_is_far_off() -> None:
    assert "did you mean" not in runner("logs", "--zebra").stderr
    assert "did you mean" not in runner("status", "--ntasks").stderr
    assert "use --nodes" not in runner("shell", "--nodes", "2").stderr  # shell has no such option


def test_options_of_every_verb_may_stand_before_it() -> None:
    assert runner("--site", "generic-pyxis", "site", "show").stdout == runner("site", "show", "generic-pyxis").stdout


@pytest.mark.parametrize("words", ["--help", "launch --help", "completion bash"])
def test_a_reader_that_goes_away_makes_no_noise(words: str) -> None:
    command = f"env -u PYTHONUNBUFFERED {sys.executable} -m runner {words} | true"
    done = subprocess.run(("bash", "-o", "pipefail", "-c", command), capture_output=True, text=True)
    assert not done.stderr


def test_a_name_that_is_too_long_for_a_file_is_no_bug(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(("logs", "--site", "local", f"{tmp_path}/{'x' * 300}")) == 1
    assert "because: File name too long" in capsys.readouterr().err


@pytest.mark.parametrize("named", ["slurm-7.out", "./slurm-7.out"])
def test_why_takes_the_log_of_any_job_and_other_verbs_say_so(tmp_path: Path, named: str) -> None:
    """What a stranger types first. No run has the name of the file, with and without any runs."""
    (tmp_path / "slurm-7.out").write_text("torch.OutOfMemoryError: CUDA out of memory.\n")
    told = runner("why", "--site", "local", named, cwd=tmp_path)
    assert told.returncode == 0 and "cause:    gpu-out-of-memory" in told.stdout, told.stderr
    refused = runner("logs", "--site", "local", named, cwd=tmp_path)
    assert f"{named} is a file, not a run" in refused.stderr and f"runner why {named}" in refused.stderr
    assert "there is no run 'slurm-8.out'" in runner("why", "--site", "local", "slurm-8.out", cwd=tmp_path).stderr


def test_completion_scripts_are_shell() -> None:
    for shell in ("bash", "zsh", "fish"):
        script = runner("completion", shell)
        assert script.returncode == 0 and "runner completion words" in script.stdout.replace('"$1"', "runner")
    checked = subprocess.run(("bash", "-n"), input=runner("completion", "bash").stdout, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    refused = runner("completion", "ksh")
    assert refused.returncode == 2 and "there is no completion for 'ksh'" in refused.stderr
    assert "words" not in refused.stderr
    assert runner("completion", "words", "--", "completion", "").stdout.split() == ["bash", "fish", "zsh"]


def test_words_after_the_dashes_are_refused_where_they_would_be_ignored() -> None:
    for words in (("status", "--", "last"), ("env", "show", "--", "cpu"), ("cluster", "list", "--", "x")):
        done = runner(*words)
        assert done.returncode == 2 and f"unexpected argument '{words[-1]}' after `--`" in done.stderr, done.stderr
    assert runner("status", "--site", "local", "--").returncode == 0


def test_a_site_may_have_the_name_of_a_verb() -> None:
    done = runner("--site", "status", "status")
    assert "there is no site 'status'" in done.stderr


# what takes longer to import than most of a dry run, or has no part in one
HEAVY = """asyncio concurrent csv ctypes decimal difflib docker email html http huggingface_hub importlib.metadata
    importlib.resources isal logging lz4 matplotlib multiprocessing numpy platform pydoc requests secrets smtplib socket
    sqlite3 ssl tarfile tomlkit torch transformers unittest urllib.request urllib3 uuid xml yaml zipfile zstandard
    runner.cluster runner.doctor runner.environments.emit runner.environments.lint runner.images runner.memory
    runner.remote runner.runs.adopt runner.runs.rerun runner.runs.submit runner.runs.sweep runner.runs.why"""


def imported(*words: str, cwd: Path) -> set[str]:
    """The modules that a start of Python imports."""
    listed = subprocess.run(
        (sys.executable, "-X", "importtime", *words), capture_output=True, text=True, cwd=cwd, check=True
    ).stderr
    return {line.rpartition("|")[2].strip() for line in listed.splitlines() if line.startswith("import time:")}


def test_a_dry_run_imports_nothing_heavy(tmp_path: Path) -> None:
    """It takes at most ten times the start of Python; docs/benchmarks.md has the measurement."""
    subprocess.run(("git", "init", "-q"), cwd=tmp_path, check=True)
    words = ("launch", "--dry-run", "--site", "alps-clariden", "--account", "a01", "--env", "ngc-ds-alps")
    found = imported("-m", "runner", *words, "--script", "sft", cwd=tmp_path) - imported("-c", "pass", cwd=tmp_path)
    assert {"runner.runs.launch", "jinja2"} <= found
    assert [name for name in HEAVY.split() if name in found or any(each.startswith(f"{name}.") for each in found)] == []


def test_a_module_is_launched_by_a_launcher(tmp_path: Path) -> None:
    """`-m MODULE` after `--`; the run is named after the module."""
    words = ("launch", "--dry-run", "--site", "alps-clariden", "--account", "a01", "--env", "ngc-ds-alps")
    done = runner(*words, "--launcher", "torchrun", "--", "-m", "pkg.train", "--lr", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --job-name=pkg.train\n" in done.stdout
    assert "torchrun command \\\n    -m pkg.train --lr 1\n" in done.stdout


@pytest.mark.parametrize("error", [RunnerError("cannot cancel job 7", "scancel failed", "scancel 7"), OSError("full")])
def test_ctrl_c_is_130_also_when_cleaning_up_fails(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(args: argparse.Namespace, console: object) -> int:
        try:
            raise KeyboardInterrupt
        finally:
            raise error

    monkeypatch.setattr(cli, "parse", lambda argv: argparse.Namespace(run=command))
    assert cli.run(("launch",)) == 130
    printed = capsys.readouterr().err
    assert ("cannot cancel job 7" if isinstance(error, RunnerError) else "stopped by Ctrl-C") in printed


def test_ctrl_c_is_130_also_while_a_class_is_created() -> None:
    """Python makes dataclasses from text, and at its end kills itself with a SIGINT that came meanwhile."""
    code = """
import sys
from runner import __main__, cli
def run(argv):
    try:
        exec("raise KeyboardInterrupt")
    except KeyboardInterrupt:
        return 130
cli.run = run
sys.exit(__main__.main())
"""
    assert subprocess.run((sys.executable, "-c", code), check=False).returncode == 130
