"""Snapshots of the same code are one copy with many names; what no run has any more is found."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.runs import snapshot
from runner.runs.snapshot import Snapshot


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "jobs").mkdir(parents=True)
    (root / "jobs/a.sh").write_text("one\n")
    (root / "jobs/a.sh").chmod(0o755)
    (root / "link").symlink_to("jobs/a.sh")
    return root


def planned(project: Path) -> Snapshot:
    taken = snapshot.plan(project)
    return snapshot.summed(taken)


def take(project: Path, runs: Path, name: str, *, shared: bool = True) -> Path:
    (runs / name).mkdir(parents=True)
    snapshot.store_files(planned(project), runs / name, shared=shared)
    return runs / name / "code"


def test_the_same_code_is_one_copy_and_other_code_another(project: Path, tmp_path: Path) -> None:
    one, two = (take(project, tmp_path / "runs", name) for name in ("a-1", "a-2"))
    assert (one / "jobs/a.sh").samefile(two / "jobs/a.sh") and os.access(one / "jobs/a.sh", os.X_OK)
    assert (one / "link").readlink() == Path("jobs/a.sh")
    (project / "jobs/a.sh").write_text("two\n")
    three = take(project, tmp_path / "runs", "a-3")
    assert [(code / "jobs/a.sh").read_text() for code in (one, three)] == ["one\n", "two\n"]
    assert len(list((tmp_path / "runs/.code").iterdir())) == 2


def test_a_run_without_a_container_has_a_copy_of_its_own(project: Path, tmp_path: Path) -> None:
    code = take(project, tmp_path / "runs", "a-1", shared=False)
    assert (code / "jobs/a.sh").stat().st_nlink == 1 and not (tmp_path / "runs/.code").exists()


def test_content_mode_and_links_make_the_sum(project: Path) -> None:
    sums = [planned(project).content]
    (project / "jobs/a.sh").chmod(0o644)
    sums.append(planned(project).content)
    (project / "link").unlink()
    (project / "link").symlink_to("jobs")
    sums.append(planned(project).content)
    (project / "jobs/a.sh").rename(project / "jobs/b.sh")
    sums.append(planned(project).content)
    assert len(set(sums)) == 4
    os.utime(project / "jobs/b.sh", (0, 0))
    assert planned(project).content == sums[-1]


def commit(project: Path) -> None:
    for words in (("init", "-q"), ("add", "."), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one")):
        subprocess.run(("git", *words), cwd=project, check=True)


def test_tracked_code_that_changes_while_it_is_copied_is_refused(project: Path, tmp_path: Path) -> None:
    commit(project)
    taken = planned(project)
    (project / "jobs/a.sh").write_text("meanwhile\n")
    (tmp_path / "runs/a-1").mkdir(parents=True)
    with pytest.raises(RunnerError):
        snapshot.store_files(taken, tmp_path / "runs/a-1", shared=True)
    assert not list((tmp_path / "runs/.code").iterdir())


@pytest.mark.parametrize("has_git", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_a_log_that_changes_or_goes_meanwhile_is_left_out_and_named(
    shared: bool, has_git: bool, project: Path, tmp_path: Path
) -> None:
    """A running job may write its log beside the code. That stops no launch, and the run can be repeated."""
    if has_git:
        commit(project)
    for name in ("notes", "gone", "removed"):
        (project / f"{name}.log").write_text("1\n")
    listed = snapshot.plan(project)
    (project / "gone.log").unlink()
    taken = snapshot.summed(listed)
    (project / "notes.log").write_text("2\n")
    (project / "removed.log").unlink()
    run = tmp_path / "runs/a-1"
    run.mkdir(parents=True)
    kept = snapshot.store_files(taken, run, shared=shared)
    names = {path.name for path in (run / "code").iterdir()} - {".git"}
    assert names == {"jobs", "link"}
    assert [name for name, _ in kept.left_out] == ["gone.log", "notes.log", "removed.log"]
    assert kept.content == snapshot.fingerprint_of_folder(run / "code", kept.files)
    assert set(kept.files) == {"jobs/a.sh", "link"}


def test_a_program_that_changes_meanwhile_is_refused(project: Path, tmp_path: Path) -> None:
    """Without it, the job could not start."""
    taken = replace(planned(project), needed="jobs/a.sh")
    (project / "jobs/a.sh").write_text("meanwhile\n")
    with pytest.raises(RunnerError, match=r"jobs/a\.sh changed while runner copied it"):
        snapshot.store_files(taken, tmp_path, shared=False)


def test_a_copy_is_unused_when_its_last_run_is_gone_and_a_launch_had_its_time(project: Path, tmp_path: Path) -> None:
    code = take(project, tmp_path / "runs", "a-1")
    (kept,) = (tmp_path / "runs/.code").iterdir()
    os.utime(kept, (0, 0))
    assert snapshot.unused_stores(tmp_path / "runs") == ()
    for path in (code / "jobs/a.sh", code / "link"):
        path.unlink()
    assert snapshot.unused_stores(tmp_path / "runs") == (kept,)
    os.utime(kept)
    assert snapshot.unused_stores(tmp_path / "runs") == ()
