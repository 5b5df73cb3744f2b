"""What git says about a folder; its words are those of git 2.39 for a work tree with every kind of entry."""

import subprocess
from pathlib import Path

from runner.runs.git import Git, Question, parse_status

STATUS = """\
# branch.oid 5e7db7a1d9ed22c07a1cbaa4bcb23d4bfb3a71dd\0\
# branch.head main\0\
1 .M N... 100644 100644 100644 3367afdbbf91e638efe983616377c60477cc6612 3367afdbbf91e638efe983616377c60477cc6612 sub/a b.py\0\
1 D. N... 100644 000000 000000 587be6b4c3f93f93c489c0111bba5596147a26cb 0000000000000000000000000000000000000000 sub/gone\0\
u UU N... 100644 100644 100644 100644 df967b96a579e45a18b8251732d16804b2e56a55 45b983be36b73c0788dc9cbcb76cbb80fc7bb057 d95f3ad14dee633a758d2e331151e950dd13e4ed sub/both\0\
? sub/new\nline\0"""  # noqa: E501


def test_every_kind_of_entry() -> None:
    """Changed, removed, conflicting, untracked; blanks and line breaks in names; names relative to a folder."""
    found = parse_status(STATUS.split("\0")[:-1], "sub/")
    assert found == Git(
        "5e7db7a1d9ed22c07a1cbaa4bcb23d4bfb3a71dd", ("a b.py", "gone", "both"), ("new\nline",)
    )  # fmt: skip


def test_a_folder_that_git_refuses(tmp_path: Path) -> None:
    """Its own words come back, nothing is raised."""
    (tmp_path / ".git").write_text("gitdir: /nowhere\n")
    answer = Question(tmp_path).answer()
    assert isinstance(answer, str) and "fatal" in answer


def test_more_than_a_pipe_holds(tmp_path: Path) -> None:
    """Both answers wait in their pipes while nobody reads: neither stops the other."""
    subprocess.run(("git", "init", "-q", str(tmp_path)), check=True)
    for number in range(400):
        (tmp_path / f"{number:05}-{'x' * 200}").touch()
    subprocess.run(("git", "-C", str(tmp_path), "add", "."), check=True)
    for number in range(400):
        (tmp_path / f"new-{number:05}-{'x' * 200}").touch()
    answer = Question(tmp_path).answer()
    assert not isinstance(answer, str)
    assert sum(map(len, answer[0])) > 65536  # bytes of a pipe
    assert (len(answer[0]), len(answer[1].untracked)) == (400, 400)
