"""What the user's words after `launch` mean: which script, at which place, with which folder's code."""

import subprocess
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.project import Project
from runner.runs.program import find_script, program_of_command, program_of_script


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    return make(tmp_path / "shipped", "jobs/sft.py", "jobs/hello.sh", "jobs/training/__init__.py")


@pytest.fixture
def project(tmp_path: Path, shipped: Path) -> Project:
    root = make(tmp_path / "project", "runner.toml", "jobs/own.py", "jobs/hello.sh", "tools/other.py", "tools/x.txt")
    return Project(root, shipped, root / "tools")


def test_a_name_is_the_projects_script_before_the_shipped_one(project: Project, shipped: Path) -> None:
    assert project.root is not None
    assert find_script("hello", project) == project.root / "jobs/hello.sh"
    assert find_script("sft", project) == shipped / "jobs/sft.py"
    assert find_script("sft.py", project) == shipped / "jobs/sft.py"
    assert find_script("jobs/sft.py", project) == shipped / "jobs/sft.py", "also from a folder below the project"


def test_a_suffix_chooses_between_two_scripts_of_one_name(project: Project, shipped: Path) -> None:
    assert project.root is not None
    make(shipped, "jobs/hello.py")
    assert find_script("hello.py", project) == shipped / "jobs/hello.py"
    assert find_script("hello.sh", project) == project.root / "jobs/hello.sh"


def test_a_path_is_read_from_where_the_user_stands(project: Project) -> None:
    assert project.root is not None
    assert find_script("./other.py", project) == project.root / "tools/other.py"
    assert find_script("other.py", project) == project.root / "tools/other.py"
    assert find_script(str(project.root / "jobs/own.py"), project) == project.root / "jobs/own.py"


def test_a_path_through_a_link_or_a_parent_folder_means_the_file_that_is_there(
    project: Project, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to("project")
    make(tmp_path, "beside.py")
    words = (f"{tmp_path}/link/tools/other.py", "../jobs/own.py", "../../beside.py")
    found = [program_of_script(find_script(word, project), project) for word in words]
    places = [(each.script, each.outside) for each in found]
    assert places == [("tools/other.py", None), ("jobs/own.py", None), ("beside.py", tmp_path / "beside.py")]


@pytest.mark.parametrize(
    ("word", "advice"),
    [("stf", "did you mean 'sft'?"), ("./othr.py", "did you mean 'other.py'?"), ("./none/x.py", "check the path")],
)
def test_an_unknown_script_lists_the_known_ones(project: Project, word: str, advice: str) -> None:
    with pytest.raises(RunnerError, match="there is no script") as caught:
        find_script(word, project)
    assert caught.value.fix == advice


def test_a_file_that_is_no_script_is_refused_with_the_way_to_run_it(project: Project) -> None:
    with pytest.raises(RunnerError, match="as a script") as caught:
        find_script("./x.txt", project)
    assert "-- COMMAND" in caught.value.fix


def test_a_projects_script_keeps_its_place(project: Project) -> None:
    assert project.root is not None
    program = program_of_script(project.root / "tools/other.py", project)
    assert (program.script, program.main, program.outside, program.shipped) == (
        "tools/other.py",
        project.root,
        None,
        None,
    )


def test_a_shipped_script_comes_with_the_projects_code(project: Project, shipped: Path) -> None:
    program = program_of_script(shipped / "jobs/sft.py", project)
    assert (program.script, program.main, program.shipped) == ("jobs/sft.py", project.root, shipped)


def test_a_script_outside_the_project_is_laid_at_the_top(project: Project, tmp_path: Path) -> None:
    make(tmp_path / "else", "mine.py")
    program = program_of_script(tmp_path / "else/mine.py", project)
    assert (program.script, program.main, program.outside) == ("mine.py", project.root, tmp_path / "else/mine.py")


def test_without_a_project_the_scripts_work_tree_or_folder_is_taken(tmp_path: Path, shipped: Path) -> None:
    plain = make(tmp_path / "plain", "a/mine.py")
    project = Project(None, shipped, plain)
    assert program_of_script(plain / "a/mine.py", project).main == plain / "a"
    subprocess.run(("git", "init", "-q", str(plain)), check=True)
    program = program_of_script(plain / "a/mine.py", project)
    assert (program.script, program.main) == ("a/mine.py", plain)


def test_home_is_never_copied_whole(tmp_path: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a script that lies there, not for a command, not even where home is a git work tree."""
    home = make(tmp_path / "home", "mine.py")
    monkeypatch.setenv("HOME", str(home))
    subprocess.run(("git", "init", "-q", str(home)), check=True)
    project = Project(None, shipped, home)
    program = program_of_script(home / "mine.py", project)
    assert (program.main, program.outside) == (None, home / "mine.py")
    assert program_of_command(("python", "mine.py"), project).main is None


def test_a_command_takes_the_folder_whose_file_it_names(tmp_path: Path, shipped: Path) -> None:
    plain = make(tmp_path / "plain", "train.py")
    project = Project(None, shipped, plain)
    assert program_of_command(("python", "train.py"), project).main == plain
    assert program_of_command(("hostname",), project).main is None


def test_a_command_from_below_the_top_is_told_where_it_starts(project: Project) -> None:
    program = program_of_command(("python", "other.py"), project)
    assert program.main == project.root
    assert "starts in the top folder of the snapshot" in program.notes[0]


def test_a_word_of_any_length_is_just_a_word(tmp_path: Path, shipped: Path) -> None:
    project = Project(None, shipped, tmp_path)
    assert program_of_command(("echo", "x" * 100_000, "\udcff"), project).main is None


@pytest.mark.parametrize("word", ["train.sbatch", "./train.sbatch"])
def test_a_batch_script_given_as_a_script_is_told_how_to_launch_it(project: Project, word: str) -> None:
    make(project.start, "train.sbatch")
    with pytest.raises(RunnerError, match="as a script") as caught:
        find_script(word, project)
    assert caught.value.fix.startswith(f"runner launch {word} if it is a batch script")
