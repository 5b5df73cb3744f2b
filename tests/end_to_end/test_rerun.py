"""The same launch again: of the very bytes while they are there, from git and the image source where they are gone."""

import json
import shutil
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from runner.machine.report import Quiet
from runner.runs import rerun
from runner.runs.schedulers import local as scheduler
from tests.end_to_end.conftest import Runner, environment, write
from tests.images.handmade import file, layout, tar


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


def test_a_kept_lock_brings_the_commit_back_and_says_what_is_lost(
    local: Runner, launched: Path, tmp_path: Path
) -> None:
    lock = shutil.copy(launched / "lock.toml", tmp_path / "kept.toml")
    shutil.rmtree(launched)
    done = local("rerun", str(lock))
    assert "jobs/new.txt: it was never committed" in done.stderr
    assert "the changes to jobs/data.txt: they were not committed" in done.stderr
    assert "code/ differs from the original run" in done.stderr
    assert "one\n" in finished(local, done.stdout.strip())


def test_with_the_diff_beside_it_a_purged_snapshot_comes_back_as_it_was(local: Runner, launched: Path) -> None:
    shutil.rmtree(launched / "code")
    (launched / "lock.toml").write_text(
        (launched / "lock.toml").read_text().replace('untracked = ["jobs/new.txt"]', "")
    )
    shown = local("rerun", launched.name, "--dry-run")
    assert "incomplete" in shown.stderr and len(local.made()) == 1
    done = local("rerun", launched.name)
    assert "not available" not in done.stderr
    assert "two\n" in finished(local, done.stdout.strip())


def test_an_image_that_was_purged_is_made_again_or_refused(local: Runner, project: Path, tmp_path: Path) -> None:
    """From where it came; what gives another image now is not run as if it were the same."""
    source = tmp_path / "app"
    layout(source, [tar([file("version", b"1")])])
    runner = Runner(project, {**local.environ, "RUNNER_IMAGES": str(tmp_path / "images")}, "local")
    path = Path(runner("import", f"oci:{source}").stdout.strip())
    write(project, {"edf/app.toml": environment(path)})
    words = ("launch", "--env", "app", "--engine", "host", "--", "true")
    name = runner(*words).stdout.strip()
    lock = local.runs / name / "lock.toml"
    made = path.resolve()
    lock.write_text(lock.read_text().replace('reference = ""', f'reference = "{made}"'))
    lines = ('source = "', 'architecture = "')
    assert made.is_file()
    text = lock.read_text().replace("[image]\n", f'[image]\nsource = "oci:{source}"\narchitecture = "amd64"\n')
    lock.write_text(text if not all(line in lock.read_text() for line in lines) else lock.read_text())
    for each in made.parent.glob("*.sqsh*"):
        each.unlink()
    assert "would rebuild image" in runner("rerun", name, "--dry-run").stderr and not made.exists()
    runner("rerun", name)
    assert made.is_file()
    for each in made.parent.glob("*.sqsh*"):
        each.unlink()
    shutil.rmtree(source)
    layout(source, [tar([file("version", b"2")])])
    assert "cannot restore the image" in runner("rerun", name, code=1).stderr


def test_a_chain_is_run_again_as_long_as_it_was(launched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links: list[int] = []
    monkeypatch.setattr(scheduler, "start", lambda run, waits, report: run)
    monkeypatch.setattr(scheduler, "start_chain", lambda run, count: links.append(count) or run)
    locked = rerun.find(launched.name, launched.parent)
    chain = {**locked.tables["job"], "chain": 3}
    for tables in (locked.tables, {**locked.tables, "job": chain}):
        rerun.same_bytes(replace(locked, tables=tables), launched.parent, Quiet())
    assert links == [0, 3]
