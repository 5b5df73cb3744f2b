"""Which folder is the project: what lies beside the user counts, and home never does."""

import re
import subprocess
from pathlib import Path

import pytest

from runner.project import find_project, page


@pytest.mark.parametrize("part", ["jobs/t.toml", "edf/t.toml", "containers/t.toml", "Containerfile.tiny"])
@pytest.mark.parametrize("git", [False, True])
def test_a_folder_with_jobs_environments_or_recipes_is_a_project(tmp_path: Path, part: str, git: bool) -> None:
    (tmp_path / part).parent.mkdir(exist_ok=True)
    (tmp_path / part).write_text("")
    if git:
        subprocess.run(("git", "init", "-q"), cwd=tmp_path, check=True)
    assert find_project(tmp_path).root == tmp_path


def test_in_a_repository_without_them_the_folder_of_the_user_may_be_one(tmp_path: Path) -> None:
    subprocess.run(("git", "init", "-q"), cwd=tmp_path, check=True)
    (tmp_path / "a/jobs").mkdir(parents=True)
    assert find_project(tmp_path).root is None and find_project(tmp_path / "a").root == tmp_path / "a"


def test_home_is_no_project_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code would be copied whole."""
    (tmp_path / "jobs").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_project(tmp_path).root is None
    (tmp_path / "runner.toml").write_text("")
    assert find_project(tmp_path).root == tmp_path


def test_a_page_that_a_message_names_is_there() -> None:
    source = Path(__file__).parents[1] / "src/runner"
    named = {name for path in source.rglob("*.py") for name in re.findall(r"page\([\"'](.+?)[\"']\)", path.read_text())}
    assert named and [name for name in sorted(named) if not page(name).is_file()] == []
