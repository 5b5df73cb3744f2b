"""RUN/code is the code as it was on disk at launch, and git's knowledge of it; tested on real git work trees."""

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.runs import snapshot

IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@example.org")


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(("git", "-C", str(folder), *IDENTITY, *words), check=True, capture_output=True, text=True)
    return done.stdout


def write(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A work tree with one commit, one change, one untracked, one ignored and one deleted file."""
    root = tmp_path / "project"
    write(root, {"jobs/train.py": "old\n", "gone.py": "x", ".gitignore": "ignored/\n", "data/small.txt": "tracked"})
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    write(
        root,
        {
            "jobs/train.py": "new\r\nline\xe9\n",
            "new name.py": "untracked",
            "ignored/big": "",
            "data/more.txt": "untracked data",
            "runs/sft-0001/code/x.py": "another run",
            ".env": "KEY=secret",
        },
    )
    (root / "gone.py").unlink()
    return root


def test_the_work_tree_as_it_is_on_disk(project: Path, tmp_path: Path) -> None:
    """Tracked files as they are now and untracked ones; ignored, deleted, data and other runs stay out."""
    snapshot.take(snapshot.plan(project), tmp_path / "run")
    code = tmp_path / "run" / "code"
    names = sorted(path.relative_to(code).as_posix() for path in code.rglob("*") if path.is_file())
    assert names == [".gitignore", "data/small.txt", "jobs/train.py", "new name.py"]
    assert (code / "jobs/train.py").read_bytes() == (project / "jobs/train.py").read_bytes()


def test_commit_changes_and_untracked_files_are_recorded(project: Path) -> None:
    known = snapshot.plan(project).git
    assert known is not None
    assert known.commit == git(project, "rev-parse", "HEAD").strip()
    assert set(known.modified) == {"jobs/train.py", "gone.py"}
    assert known.untracked == ("new name.py",)
    assert known.dirty


@pytest.mark.parametrize("tracked", [True, False])
def test_thousands_of_untracked_files_are_refused(
    tracked: bool, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy would take long at each launch; .gitignore is named, with what to write into it."""
    monkeypatch.setattr(snapshot, "UNTRACKED_LIMIT", 1000)
    root = project if tracked else tmp_path / "plain"
    pictures = root / "pictures/small"
    pictures.mkdir(parents=True)
    (root / "new name.py").touch()
    for number in range(999):
        (pictures / f"{number}.txt").touch()
    snapshot.plan(root)
    (pictures / "999.txt").touch()
    with pytest.raises(RunnerError) as caught:
        snapshot.plan(root)
    assert f"{root} has more than 1,000 files that git does not track, at least 1,000 in pictures/" == caught.value.what
    before = "" if tracked else f"run git init {root}, and "
    assert caught.value.fix.startswith(f"{before}add /pictures/ to {root}/.gitignore")
    if not tracked:
        git(root, "init", "-q")
    (root / ".gitignore").write_text("/pictures/\n")
    snapshot.plan(root)


def test_earlier_runs_are_not_worth_a_warning(project: Path) -> None:
    """Data and secrets that stay out are counted; the folders that runner itself makes are not."""
    (note,) = snapshot.plan(project).notes
    assert note.startswith("2 untracked files")  # data/more.txt and .env
    (project / ".env").unlink()
    (note,) = snapshot.plan(project).notes
    assert note.startswith("1 untracked file is left out")
    (project / "data/more.txt").unlink()
    assert snapshot.plan(project).notes == ()


def test_the_diff_turns_the_commit_into_the_snapshot(project: Path, tmp_path: Path) -> None:
    """`git apply` of RUN/code.diff on a clean clone gives the very bytes, CRLF and all."""
    snapshot.take(snapshot.plan(project), tmp_path / "run")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(project), str(clone))
    git(clone, "apply", str(tmp_path / "run" / "code.diff"))
    assert (clone / "jobs/train.py").read_bytes() == (project / "jobs/train.py").read_bytes()
    assert not (clone / "gone.py").exists()


def test_a_clean_work_tree_has_no_diff(project: Path, tmp_path: Path) -> None:
    git(project, "reset", "-q", "--hard")
    git(project, "clean", "-fdq")
    plan = snapshot.plan(project)
    snapshot.take(plan, tmp_path / "run")
    assert plan.git is not None and not plan.git.dirty
    assert not (tmp_path / "run" / "code.diff").exists()


def test_before_the_first_commit(tmp_path: Path) -> None:
    write(tmp_path / "p", {"a.py": "1", "b.py": "2"})
    git(tmp_path / "p", "init", "-q")
    git(tmp_path / "p", "add", "a.py")
    plan = snapshot.plan(tmp_path / "p")
    assert plan.files == ("a.py", "b.py")
    assert plan.git is not None and plan.git.commit == "" and plan.git.dirty


def test_a_project_below_the_top_of_its_work_tree(project: Path, tmp_path: Path) -> None:
    """Only the project's own folder is copied, and the diff's names are relative to it."""
    plan = snapshot.plan(project / "jobs")
    snapshot.take(plan, tmp_path / "run")
    assert plan.files == ("train.py",)
    assert plan.git is not None and plan.git.modified == ("train.py",)
    assert "a/train.py" in (tmp_path / "run" / "code.diff").read_text(errors="replace")


def test_outside_git_the_folder_without_caches_data_and_runs(tmp_path: Path) -> None:
    root = tmp_path / "plain"
    write(root, {"train.py": "", "lib/x.py": "", "__pycache__/x.pyc": "", ".nox/a": "", "data/d": "", "runs/r/x": "",
                 "lib/data/table.py": "", "a.sqsh": "", ".venv/lib/y.py": ""})  # fmt: skip
    assert snapshot.plan(root).files == ("lib/data/table.py", "lib/x.py", "train.py")
    assert snapshot.plan(root).git is None


@pytest.mark.parametrize("tracked", [True, False])
def test_a_folder_of_code_may_be_called_data_or_models(tmp_path: Path, tracked: bool) -> None:
    """A Python package is code whatever its name; of other such folders, the launch says that they stay out."""
    root = tmp_path / "plain"
    write(root, {"train.py": "", "models/__init__.py": "", "models/unet/net.py": "", "data/d": "", "outputs/o": ""})
    if tracked:
        git(root, "init", "-q")
    found = snapshot.plan(root)
    assert found.files == ("models/__init__.py", "models/unet/net.py", "train.py")
    (note,) = found.notes
    if tracked:
        assert note.startswith("2 untracked files are left out")
    else:
        assert note.startswith("left out of the code snapshot: data/, outputs/ (usually data;")


def test_modes_and_symlinks_are_kept(tmp_path: Path) -> None:
    root = tmp_path / "plain"
    write(root, {"run.sh": "#!/bin/sh\n", "lib/x.py": ""})
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("run.sh")
    (root / "libs").symlink_to("lib")
    snapshot.take(snapshot.plan(root), tmp_path / "run")
    code = tmp_path / "run" / "code"
    assert os.access(code / "run.sh", os.X_OK)
    assert (code / "link").readlink() == Path("run.sh")
    assert (code / "libs").readlink() == Path("lib")


def test_what_is_too_large_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "FILE_LIMIT_BYTES", 2**20)
    monkeypatch.setattr(snapshot, "TOTAL_LIMIT_BYTES", 1500)
    root = tmp_path / "plain"
    write(root, {"a.py": "a" * 1000, "b.py": "b" * 900, "c.py": "c" * 100, "huge.bin": ""})
    os.truncate(root / "huge.bin", 2**20 + 1)
    plan = snapshot.plan(root)
    assert plan.files == ("b.py", "c.py")
    assert [name for name, _ in plan.left_out] == ["huge.bin", "a.py"]
    assert plan.left_out[0][1] == "it has 1.1 MiB; the limit is 1 MiB"


def test_a_script_from_elsewhere_is_laid_at_the_top(project: Path, tmp_path: Path) -> None:
    write(tmp_path, {"own.py": "print(1)"})
    plan = snapshot.plan(project, script=tmp_path / "own.py")
    snapshot.take(plan, tmp_path / "run")
    assert (tmp_path / "run/code/own.py").read_text() == "print(1)"


def test_a_script_that_would_hide_a_file_of_the_project_is_refused(project: Path, tmp_path: Path) -> None:
    write(tmp_path, {"new name.py": "print(1)"})
    with pytest.raises(RunnerError, match="would replace"):
        snapshot.plan(project, script=tmp_path / "new name.py")


def test_shipped_jobs_stand_in_and_never_replace_the_users(project: Path, tmp_path: Path) -> None:
    shipped = tmp_path / "shipped"
    write(shipped, {"jobs/train.py": "shipped", "jobs/sft.py": "shipped", "edf/x.toml": ""})
    snapshot.take(snapshot.plan(project, shipped=shipped), tmp_path / "run")
    code = tmp_path / "run" / "code"
    assert (code / "jobs/sft.py").read_text() == "shipped"
    assert (code / "jobs/train.py").read_text().startswith("new")
    assert not (code / "edf").exists()


def test_a_refusing_git_is_said_and_the_files_are_taken(tmp_path: Path) -> None:
    """A `.git` that git does not accept (damaged, or of another owner) is no reason not to launch."""
    write(tmp_path / "p", {"a.py": "", ".git": "gitdir: /nowhere\n"})
    plan = snapshot.plan(tmp_path / "p")
    assert plan.files == ("a.py",)
    assert plan.git is None and "git failed" in plan.notes[0]


def test_a_small_repository_takes_no_time(project: Path, tmp_path: Path) -> None:
    write(project, {f"src/m{number}.py": "x = 1\n" * 50 for number in range(100)})
    started = time.process_time()
    snapshot.take(snapshot.plan(project), tmp_path / "run")
    assert time.process_time() - started < 0.3


def test_without_git_what_other_runs_write_meanwhile_is_left_out(tmp_path: Path) -> None:
    """A log that grows, and a file that goes, while a launch copies the code. A program that changes is refused."""
    root = tmp_path / "project"
    write(root, {"train.py": "x", "train_7.log": "step 1\n", "note.tmp": "", "settings.yaml": "a: 1\n"})
    taken = snapshot.summed(snapshot.plan(root))
    (root / "note.tmp").unlink()
    write(root, {"train_7.log": "step 1\nstep 2\n"})
    taken = snapshot.store_files(taken, tmp_path / "runs/a-1", shared=True)
    assert taken.files == ("settings.yaml", "train.py")
    assert sorted(path.name for path in (tmp_path / "runs/a-1/code").iterdir()) == ["settings.yaml", "train.py"]
    assert {(name, why) for name, why in taken.left_out} == {
        ("note.tmp", "it changed during the launch"),
        ("train_7.log", "it changed during the launch"),
    }
    taken = replace(snapshot.summed(snapshot.plan(root)), needed="train.py")
    write(root, {"train.py": "y"})
    with pytest.raises(RunnerError, match=r"train\.py changed while runner copied it"):
        snapshot.store_files(taken, tmp_path / "runs/a-2", shared=True)
