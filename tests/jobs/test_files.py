"""A file or folder of a job is there whole, or not at all; and which of several checkpoints is the newest."""

import subprocess
from pathlib import Path

import pytest

from tests.runs.scripts import shell_job, write_run
from training import files, marker, resume


def test_a_text_is_replaced_whole_and_leaves_nothing_beside(tmp_path: Path) -> None:
    files.write_text(tmp_path / "a", "one")
    files.write_text(tmp_path / "a", "two")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "two"}


def test_a_folder_whose_making_fails_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), files.whole_folder(tmp_path / "made") as partial:
        (partial / "half").write_text("x")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_of_two_jobs_that_make_the_same_folder_the_first_wins(tmp_path: Path) -> None:
    with files.whole_folder(tmp_path / "made") as slow:
        (slow / "by").write_text("slow")
        other = tmp_path / "made"
        other.mkdir()
        (other / "by").write_text("quick")
    assert (tmp_path / "made" / "by").read_text() == "quick"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_two_containers_with_the_same_process_number_share_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fills a folder of its own, though both are process 1 of their container."""
    monkeypatch.setattr("os.getpid", lambda: 1)
    with files.whole_folder(tmp_path / "made") as one, files.whole_folder(tmp_path / "made") as other:
        for folder in (one, other):
            (folder / "a").write_text("x")
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "a"]


def test_a_folder_is_replaced_and_the_old_one_is_gone(tmp_path: Path) -> None:
    for name in ("final", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    files.replace_folder(tmp_path / "new", tmp_path / "final")
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert files.sizes(tmp_path / "final") == {"new": 3}


def test_the_program_and_the_batch_script_agree_which_checkpoint_is_the_newest(tmp_path: Path) -> None:
    run = write_run(tmp_path, shell_job("true"))
    folder = run / "checkpoints"
    for step, generation in ((9, 1), (80, 1), (100, 2), (5, 2), (1000, 0), (2000, None), (3000, 0)):
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        if generation is not None:  # None: incomplete
            found = marker.digests(folder / f"checkpoint-{step}", [], sync=False)
            facts = {"step": step, "world_size": 1} | ({"generation": generation} if step < 3000 else {})
            marker.write(folder / f"checkpoint-{step}", found, facts)
    script = ". payload/checkpoints.sh; checkpoint_candidates | cut -d / -f 2"
    done = subprocess.run(("bash", "-uc", script), cwd=run, capture_output=True, text=True, check=True)
    names = [path.name for path in resume.by_age(folder)]
    assert done.stdout.split() == names
    assert names == [f"checkpoint-{step}" for step in (100, 5, 80, 9, 3000, 2000, 1000)]
