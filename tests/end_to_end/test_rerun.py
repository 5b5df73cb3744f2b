"""The same launch again, of the very bytes; if one is gone, the error says what is missing and how to launch again."""

import json
import shutil
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.machine.report import Quiet
from runner.runs import rerun
from runner.runs.schedulers import local as scheduler
from runner.runs.secrets import HIDDEN
from tests.end_to_end.conftest import Runner, write


def git(project: Path, *words: str) -> None:
    subprocess.run(("git", "-c", "user.name=a", "-c", "user.email=a@b", *words), cwd=project, check=True, timeout=600)


def finished(local: Runner, name: str) -> str:
    local("watch", name)
    return (local.runs / name / "job.log").read_text()


@pytest.fixture
def launched(local: Runner, project: Path) -> Path:
    """A run of committed code with a change and an untracked file."""
    write(project, {"jobs/where.sh": "cat jobs/data.txt jobs/new.txt; echo seed $2\n", "jobs/data.txt": "one\n"})
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-qm", "first")
    write(project, {"jobs/data.txt": "two\n", "jobs/new.txt": "new\n"})
    folder, log = local.finished("--engine", "host", "--script", "where", "--", "--seed", "7")
    assert "two\nnew\nseed 7\n" in log
    return folder


def test_the_lock_tells_what_the_container_held_and_sums_of_all_it_was_made_of(launched: Path) -> None:
    lock = tomllib.loads((launched / "lock.toml").read_text())
    assert lock["job"]["seed"] == "7"
    assert len(lock["code"]["content"]) == 64 and {"job.sbatch", "environment.toml"} <= set(lock["files"])
    inside = tomllib.loads((launched / "attempts/1/inside.toml").read_text())
    assert inside["kernel"] and inside["python"].startswith("3.") and inside["packages"]


def test_a_run_whose_folder_is_whole_is_run_again_byte_by_byte(local: Runner, launched: Path, project: Path) -> None:
    """Whatever the project holds by now."""
    write(project, {"jobs/data.txt": "three\n", "edf/plain.toml": "broken"})
    done = local("rerun", launched.name, "--tag", "again")
    again = local.runs / done.stdout.strip()
    assert "two\nnew\nseed 7\n" in finished(local, again.name)
    for name in ("job.sbatch", "environment.toml", "code.diff", "code/jobs/data.txt"):
        assert (again / name).read_bytes() == (launched / name).read_bytes()
    assert local("diff", launched.name, again.name).stderr.endswith("are equal\n")
    assert json.loads((again / "run.json").read_text())["tags"] == ["again"]


def test_a_kept_lock_finds_its_run_folder(local: Runner, launched: Path, tmp_path: Path) -> None:
    lock = shutil.copy(launched / "lock.toml", tmp_path / "kept.toml")
    assert (
        "can be rerun: its run folder has all files of its launch, unchanged"
        in local("rerun", str(lock), "--dry-run").stderr
    )
    shutil.rmtree(launched)
    refused = local("rerun", str(lock), code=1).stderr
    assert f"missing or changed in {tmp_path}: " in refused
    assert "--engine host --script where -- --seed 7\n" in refused


def test_an_incomplete_run_folder_is_refused_with_the_command_and_what_is_missing(
    local: Runner, launched: Path, project: Path
) -> None:
    commit = subprocess.run(("git", "rev-parse", "HEAD"), cwd=project, capture_output=True, text=True).stdout.strip()
    shutil.rmtree(launched / "code")
    (launched / "job.sbatch").write_text("changed")
    for words in (("rerun", launched.name), ("rerun", launched.name, "--dry-run")):
        refused = local(*words, code=1).stderr
        assert f"missing or changed in {launched}: job.sbatch, code/" in refused
        assert f"git checkout {commit}" in refused and "runner launch --site local" in refused
    assert len(local.made()) == 1


def test_an_image_that_is_gone_is_named_with_the_command_that_imports_it(launched: Path) -> None:
    locked = rerun.find(launched.name, launched.parent)
    image = {"reference": "/gone/i.sqsh", "source": "docker://a/b:1", "digest": "12", "manifest": "sha256:12"}
    with pytest.raises(RunnerError) as caught:
        rerun.need_image(replace(locked, tables={**locked.tables, "image": image}), Quiet())
    assert "needs the squashfs file /gone/i.sqsh" in caught.value.what
    assert caught.value.fix == "runner import docker://a/b:1@sha256:12"
    given = {"reference": "/gone/i.sqsh"}  # the user named a file that runner has not imported
    with pytest.raises(RunnerError) as caught:
        rerun.need_image(replace(locked, tables={**locked.tables, "image": given}), Quiet())
    assert caught.value.fix == "put the file back, or launch again with another image"


def test_the_command_line_of_a_sweep_and_one_with_a_secret_are_said_to_be_so(launched: Path) -> None:
    (launched / "job.sbatch").unlink()
    locked = rerun.find(launched.name, launched.parent)
    run = {**locked.tables["run"], "command_line": ["launch", "where", "--", "--token", HIDDEN]}
    with pytest.raises(RunnerError) as caught:
        rerun.refuse_incomplete(replace(locked, tables={**locked.tables, "run": run, "sweep": {"--lr": "1"}}))
    assert f'replace "{HIDDEN}" with the secret' in caught.value.fix
    assert caught.value.fix.endswith("# this command launches all runs of the sweep")


def test_a_chain_is_run_again_as_long_as_it_was(launched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links: list[int] = []
    monkeypatch.setattr(scheduler, "start", lambda run, waits, report: run)
    monkeypatch.setattr(scheduler, "start_chain", lambda run, count: links.append(count) or run)
    locked = rerun.find(launched.name, launched.parent)
    chain = {**locked.tables["job"], "chain": 3}
    for tables in (locked.tables, {**locked.tables, "job": chain}):
        rerun.same_bytes(replace(locked, tables=tables), launched.parent, Quiet())
    assert links == [0, 3]
