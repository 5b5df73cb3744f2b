"""The code as it was at launch: which files of which folder go into RUN/code, and what git knows about them.

In a git work tree: the tracked files as they are on disk, plus the untracked ones that git does not ignore.
Elsewhere: the script's own folder. Deciding (`plan`) reads only; `take` copies.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.errors import RunnerError
from runner.machine import folders, process

FILE_LIMIT_BYTES = 10 * 2**20
DIFF = "code.diff"
TOTAL_LIMIT_BYTES = 200 * 2**20
# never code, wherever they lie
_NOT_CODE = {".git", ".nox", ".tox", ".venv", "venv", "__pycache__", "node_modules", ".mypy_cache", ".ruff_cache",
             ".pytest_cache", ".ipynb_checkpoints", "wandb"}  # fmt: skip
# beside a project's code, unless git tracks them
_BIG = {"data", "datasets", "runs", "outputs", "checkpoints", "models"}
# files that hold secrets by convention, unless git tracks them
_SECRET = {".env", ".netrc", ".pypirc", ".git-credentials", "id_rsa", "id_ed25519", "credentials.json"}


@dataclass(frozen=True)
class Source:
    """Files of one folder that go into the snapshot, laid under `below`."""

    root: Path
    files: tuple[str, ...]
    """relative to root, POSIX"""
    sizes: tuple[int, ...]
    """bytes, one per file"""


@dataclass(frozen=True)
class Git:
    """What git says about the main folder."""

    commit: str
    """empty before the first commit"""
    modified: tuple[str, ...]
    """tracked files that differ from the commit"""
    untracked: tuple[str, ...]
    """code that git does not track"""

    @property
    def dirty(self) -> bool:
        return bool(self.modified or self.untracked)


@dataclass(frozen=True)
class Snapshot:
    """What RUN/code will hold; of two sources with the same file the first one's counts."""

    sources: tuple[Source, ...]
    git: Git | None
    left_out: tuple[tuple[str, str], ...] = ()
    """(file or folder, why)"""
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(sorted({name for source in self.sources for name in source.files}))

    @property
    def size_bytes(self) -> int:
        return sum(size for source in self.sources for size in source.sizes)


def plan(main: Path | None, script: Path | None = None, shipped: Path | None = None) -> Snapshot:
    """What to copy for a launch.

    main     the project, git work tree or folder whose code the job sees; None: there is none
    script   a file that lies outside of `main` and is laid at the snapshot's top
    shipped  runner's own folder, whose `jobs/` stands in for what the project lacks
    """
    sources: list[Source] = []
    left_out: list[tuple[str, str]] = []
    notes: list[str] = []
    git = None
    if main is not None:
        names, git, said = _names(main)
        notes += said
        tracked = set(names) - set(git.untracked) if git else set()
        source, dropped = _measure(main, names, tracked)
        sources.append(source)
        left_out += dropped
    if script is not None:
        sources.append(_single(script, sources))
    if shipped is not None:
        source, _ = _measure(shipped, _walk(shipped, "jobs"), set())
        sources.append(source)
    return Snapshot(tuple(sources), git, tuple(left_out), tuple(notes))


def take(snapshot: Snapshot, run_folder: Path) -> None:
    """Copy the files to RUN/code and git's diff to RUN/code.diff."""
    code = run_folder / "code"
    folders.make(code)
    for source in snapshot.sources:
        folders.copy(source.files, source.root, code)
    if snapshot.git and snapshot.git.modified:
        # git writes the file itself: bytes that are not UTF-8 and line ends stay as they are
        words = (
            "diff",
            "HEAD",
            "--binary",
            "--no-color",
            "--no-ext-diff",
            "--relative",
            f"--output={run_folder}/{DIFF}",
        )
        process.run(_git(snapshot.sources[0].root, *words))


def work_tree(folder: Path) -> Path | None:
    """The top of the git work tree that a folder lies in, None outside of one (or without git)."""
    for parent in (folder, *folder.parents):
        if (parent / ".git").exists():
            return parent
    return None


def is_shared_place(folder: Path) -> bool:
    """Whether a folder is home, the root or a place for everybody's temporary files: never copied whole."""
    places = {Path.home(), Path("/"), Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), Path(tempfile.gettempdir())}
    return folder.resolve() in {place.resolve() for place in places}


def _names(root: Path) -> tuple[tuple[str, ...], Git | None, list[str]]:
    """The files of a folder, what git knows, and what to tell the user."""
    if work_tree(root) is None:
        return _walk(root), None, []
    if process.which("git") is None:
        return _walk(root), None, ["git is not installed here: commit and changes are not recorded"]
    listed = process.run(_git(root, "ls-files", "-z", "--cached", "--recurse-submodules"), check=False)
    if listed.exit_code != 0:
        words = (listed.stderr.strip() or "no message").splitlines()[0]
        return _walk(root), None, [f"git does not answer ({words}): commit and changes are not recorded"]
    untracked = _split(process.run(_git(root, "ls-files", "-z", "--others", "--exclude-standard")).stdout)
    code = tuple(name for name in untracked if not _skip(name))
    notes = (
        [f"{len(untracked) - len(code)} untracked files are not code: left out"] if len(untracked) > len(code) else []
    )
    return (*_split(listed.stdout), *code), _ask_git(root, code), notes


def _ask_git(root: Path, untracked: tuple[str, ...]) -> Git:
    head = process.run(_git(root, "rev-parse", "--verify", "--quiet", "HEAD"), check=False)
    if head.exit_code != 0:
        return Git("", (), untracked)
    # paths relative to `root`, which may lie below the top of the work tree
    changed = process.run(_git(root, "diff", "HEAD", "--name-only", "-z", "--relative", "--no-ext-diff"))
    return Git(head.stdout.strip(), _split(changed.stdout), untracked)


def _git(root: Path, *words: str) -> tuple[str, ...]:
    return ("git", "-C", str(root), *words)


def _split(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split("\0") if name)


def _skip(name: str) -> bool:
    """Whether an untracked file is left out: a cache, data, another run's output, or a file for secrets."""
    *above, last = name.split("/")
    return bool({*above, last} & _NOT_CODE or (above and above[0] in _BIG) or last in _SECRET or last.endswith(".sqsh"))


def _walk(root: Path, below: str = "") -> tuple[str, ...]:
    """The files below a folder that are not under git, sorted; what is not code is skipped."""
    found: list[str] = []
    for folder, inner, names in os.walk(root / below):
        at = Path(folder).relative_to(root).as_posix()
        prefix = "" if at == "." else at + "/"
        inner[:] = sorted(name for name in inner if not _skip(f"{prefix}{name}/x"))
        links = [name for name in inner if (Path(folder) / name).is_symlink()]
        inner[:] = [name for name in inner if name not in links]
        found += [prefix + name for name in (*names, *links) if not _skip(prefix + name)]
        if len(found) > 20_000:
            raise RunnerError(
                f"{root} holds too many files for a snapshot of the code",
                "more than 20000 files, and no git work tree that says which of them are code",
                f"git init {root} with a .gitignore, or put the script into a folder of its own",
            )
    return tuple(sorted(found))


def _measure(root: Path, names: Sequence[str], tracked: set[str]) -> tuple[Source, list[tuple[str, str]]]:
    """The files that exist and are not too large, and those that are."""
    kept: list[tuple[str, int]] = []
    left_out: list[tuple[str, str]] = []
    for name in names:
        try:
            found = os.lstat(root / name)
        except OSError:
            if "\ufffd" in name:
                left_out.append((name, "its name is not UTF-8"))
            continue  # else: deleted in the work tree
        if stat.S_ISDIR(found.st_mode):
            continue  # a submodule that is not checked out
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
            left_out.append((name, "neither a file nor a symlink"))
        elif found.st_size > FILE_LIMIT_BYTES:
            kind = "tracked by git, yet " if name in tracked else ""
            left_out.append((name, f"{kind}larger than {FILE_LIMIT_BYTES >> 20} MiB ({found.st_size >> 20} MiB)"))
        else:
            kept.append((name, found.st_size))
    kept, dropped = _within_total(kept)
    return Source(root, tuple(name for name, _ in kept), tuple(size for _, size in kept)), [*left_out, *dropped]


def _within_total(kept: list[tuple[str, int]]) -> tuple[list[tuple[str, int]], list[tuple[str, str]]]:
    """The largest files are dropped until the rest fits the limit."""
    total = sum(size for _, size in kept)
    dropped: set[str] = set()
    for name, size in sorted(kept, key=lambda each: -each[1]):
        if total <= TOTAL_LIMIT_BYTES:
            break
        dropped.add(name)
        total -= size
    why = f"the code is larger than {TOTAL_LIMIT_BYTES >> 20} MiB in all: largest files left out"
    return [each for each in kept if each[0] not in dropped], [(name, why) for name in sorted(dropped)]


def _single(script: Path, sources: Iterable[Source]) -> Source:
    """One file of the user's from elsewhere, laid at the top under its own name."""
    for source in sources:
        if script.name in source.files:
            raise RunnerError(
                f"{script} would hide {source.root / script.name} in the code snapshot",
                "a script from outside the project is laid at the snapshot's top, where a file has that name",
                "rename the script, or copy it into the project",
            )
    return Source(script.parent, (script.name,), (script.stat().st_size,))
