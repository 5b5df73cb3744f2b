"""A file or folder of a job is there whole, or not at all."""

from pathlib import Path

import pytest

from training import files


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
