"""Ask git about a folder: its tracked files, its commit, and its changes since that commit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runner.machine import files, process


@dataclass(frozen=True)
class Git:
    """The state of a folder, from git."""

    commit: str
    """empty before the first commit"""
    modified: tuple[str, ...]
    """tracked files that differ from the commit"""
    untracked: tuple[str, ...]
    """files that git neither tracks nor ignores"""

    @property
    def dirty(self) -> bool:
        return bool(self.modified or self.untracked)


def work_tree(folder: Path) -> Path | None:
    """The root of the git work tree that contains a folder; None if there is none, or git is not installed."""
    for parent in (folder, *folder.parents):
        if files.exists(parent / ".git"):
            return parent
    return None


def command(folder: Path, *words: str) -> tuple[str, ...]:
    """A git command for a folder. It does not lock anything, so that it never blocks the user's own git."""
    return ("git", "-C", str(folder), "--no-optional-locks", *words)


class Question:
    """git commands that run in the background while runner does other things."""

    def __init__(self, folder: Path) -> None:
        top = work_tree(folder)
        self._below = (
            "" if top is None or top == folder else f"{folder.relative_to(top).as_posix()}/"
        )
        self._tracked = process.Started(
            command(folder, "ls-files", "-z", "--cached", "--recurse-submodules")
        )
        self._status = process.Started(
            command(
                folder,
                "status",
                "--porcelain=v2",
                "--branch",
                "-z",
                "--no-renames",
                "--untracked-files=all",
                ".",
            )
        )

    def answer(self) -> tuple[tuple[str, ...], Git] | str:
        """(the tracked files, relative to the folder; the state), or git's error message if it fails."""
        done = (self._tracked.finish(), self._status.finish())
        for each in done:
            if each.exit_code != 0:
                return (each.stderr.strip() or "no message").splitlines()[0]
        tracked, status = (each.stdout.split("\0")[:-1] for each in done)
        return tuple(tracked), parse_status(status, self._below)


def parse_status(entries: list[str], below: str = "") -> Git:
    """Parse the entries of `git status --porcelain=v2 --branch -z --no-renames`.

    Paths in the entries are relative to the root of the work tree; the prefix `below` (`a/b/`) is removed. Source:
    git-status(1).
    """
    commit = ""
    modified: list[str] = []
    untracked: list[str] = []
    # type of an entry -> the number of words before its path, including the type
    words_before = {"1": 8, "u": 10}
    for entry in entries:
        kind, _, rest = entry.partition(" ")
        if entry.startswith("# branch.oid ") and not entry.endswith(" (initial)"):
            commit = entry.split(" ", 2)[2]
        elif kind in words_before:
            modified.append(entry.split(" ", words_before[kind])[-1].removeprefix(below))
        elif kind == "?":
            untracked.append(rest.removeprefix(below))
    return Git(commit, tuple(modified) if commit else (), tuple(untracked))
