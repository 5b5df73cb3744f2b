"""The code snapshot of a launch: which files go into RUN/code, and their state in git.

In a git work tree: the tracked files as they are on disk, and the untracked files that git does not ignore.
Elsewhere: the script's folder. `plan` only reads; `take` copies.
"""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from runner.errors import RunnerError
from runner.machine import files, folders, process
from runner.machine.files import explain
from runner.runs import sent
from runner.runs.git import Git, Question, command, work_tree
from runner.runs.sent import SENT

FILE_LIMIT_BYTES = 10 * 2**20
DIFF = "code.diff"
TOTAL_LIMIT_BYTES = 200 * 2**20
UNTRACKED_LIMIT = 10_000
"""the largest number of untracked files. More take seconds at each launch, and are usually data. Without git, all
files are untracked"""
# never code, in any folder
_NOT_CODE = {
    ".git",
    ".nox",
    ".tox",
    ".venv",
    "venv",
    "__pycache__",
    "node_modules",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".ipynb_checkpoints",
    "wandb",
    SENT,
}
# at the top, usually not code, unless git tracks them or they are Python packages
_BIG = {"data", "datasets", "runs", "outputs", "checkpoints", "models"}
# usually contain secrets, unless git tracks them
_SECRET = {
    ".env",
    ".netrc",
    ".pypirc",
    ".git-credentials",
    "id_rsa",
    "id_ed25519",
    "credentials.json",
}


class Source(NamedTuple):
    """Files of one folder that go into the snapshot."""

    root: Path
    files: tuple[str, ...]
    """relative to root, POSIX"""
    sizes: tuple[int, ...]
    """bytes, one per file"""
    is_folder: bool = False
    """whether these are the files of the user's folder, and not a single script or runner's own files"""


@dataclass(frozen=True)
class Snapshot:
    """The future content of RUN/code. If two sources have the same file, the first one applies."""

    sources: tuple[Source, ...]
    git: Git | None
    left_out: tuple[tuple[str, str], ...] = ()
    """(file or folder, why)"""
    notes: tuple[str, ...] = ()
    content: str = ""
    """the checksum of all files; empty if it was not computed"""
    sums: Mapping[str, str] = field(default_factory=dict)
    """name -> type and checksum of each file"""
    needed: str = ""
    """the file that the job runs: the launch fails if it changes while it is copied"""

    @property
    def loose(self) -> frozenset[str]:
        """The files that may change during the launch, such as logs: those that git does not track, or without git,
        all files of the user's folder."""
        if self.git is not None:
            return frozenset(self.git.untracked) - {self.needed}
        return frozenset(
            self.sources[0].files if self.sources and self.sources[0].is_folder else ()
        ) - {self.needed}

    def without(self, names: Collection[str], why: str) -> Snapshot:
        """The snapshot without these files."""
        if not names:
            return self
        sources = []
        for source in self.sources:
            kept = [
                (name, size)
                for name, size in zip(source.files, source.sizes, strict=True)
                if name not in names
            ]
            sources.append(
                source._replace(
                    files=tuple(n for n, _ in kept), sizes=tuple(size for _, size in kept)
                )
            )
        return replace(
            self,
            sources=tuple(sources),
            left_out=(*self.left_out, *((name, why) for name in names)),
        )

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(sorted({name for source in self.sources for name in source.files}))

    @property
    def size_bytes(self) -> int:
        return sum(size for source in self.sources for size in source.sizes)


def plan(main: Path | None, script: Path | None = None, shipped: Path | None = None) -> Snapshot:
    """What to copy for a launch.

    main     the project, git work tree or folder with the user's code; None: there is none
    script   a file outside of `main`, which is copied to the top of the snapshot
    shipped  runner's own folder; its `jobs/` provides files that the project does not have
    """
    return begin(main, script, shipped)()


def begin(main: Path | None, script: Path | None, shipped: Path | None) -> Callable[[], Snapshot]:
    """Start git in the background, and return a function that waits for it and makes the plan."""
    has_git = main is not None and work_tree(main) is not None and process.which("git") is not None
    question = (
        Question(main) if main is not None and has_git and not (main / SENT).is_dir() else None
    )
    return lambda: _plan(main, script, shipped, question)


def _plan(
    main: Path | None, script: Path | None, shipped: Path | None, question: Question | None
) -> Snapshot:
    sources: list[Source] = []
    left_out: list[tuple[str, str]] = []
    notes: list[str] = []
    git = None
    if main is not None:
        names, git, left_out, said = sent.names_and_state(main) or _names(main, question)
        notes += said
        tracked = set(names) - set(git.untracked) if git else set()
        source, dropped = _measure(main, names, tracked)
        sources.append(source._replace(is_folder=True))
        left_out += dropped
    if script is not None:
        sources.append(_single(script, sources))
    if shipped is not None:
        source, _ = _measure(shipped, _walk(shipped, "jobs"), set())
        sources.append(source)
    return Snapshot(tuple(sources), git, tuple(left_out), tuple(notes))


def secrets_left_out(snapshot: Snapshot, main: Path, folder: Path) -> list[str]:
    """Notes about files that a script in `folder` may read, but that are not in the snapshot of `main`."""
    paths = {
        (place / name).relative_to(main)
        for place in (main, folder)
        for name in _SECRET
        if (place / name).exists()
    }
    names = sorted({path.as_posix() for path in paths} - {*snapshot.files})
    return [
        f"{name} is not in the snapshot (it may contain secrets, or git ignores it): the script cannot read it"
        for name in names
    ]


def take(snapshot: Snapshot, run_folder: Path) -> None:
    """Copy the files to RUN/code and git's diff to RUN/code.diff."""
    copy(snapshot, run_folder / "code")
    write_diff(snapshot, run_folder)


def copy(snapshot: Snapshot, code: Path) -> None:
    """Copy the files into a folder."""
    folders.make(code)
    for source in snapshot.sources:
        folders.copy(source.files, source.root, code, skip_missing=True)


def write_diff(snapshot: Snapshot, run_folder: Path) -> None:
    """Write git's diff against the commit to RUN/code.diff."""
    copied = snapshot.sources[0].root / SENT / DIFF if snapshot.sources else Path(DIFF)
    if snapshot.git and copied.is_file():
        folders.copy((DIFF,), copied.parent, run_folder)
    elif snapshot.git and snapshot.git.modified:
        # git writes the file itself, so that line ends and bytes that are not UTF-8 are not changed
        words = ("diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--relative")
        process.run(command(snapshot.sources[0].root, *words, f"--output={run_folder}/{DIFF}"))


def _names(root: Path, question: Question | None) -> sent.Names:
    if question is None:
        note = "git is not installed here: the commit and your changes are not recorded"
        notes = [note] if work_tree(root) is not None else []
        return _walk(root), None, [], [*notes, *_note_of_folders(root)]
    answer = question.answer()
    if isinstance(answer, str):
        return (
            _walk(root),
            None,
            [],
            [
                f"git failed ({answer}): the commit and your changes are not recorded",
                *_note_of_folders(root),
            ],
        )
    tracked, git = answer
    data = _data_folders(root)
    code = tuple(name for name in git.untracked if not _skip(name, data))
    if len(code) > UNTRACKED_LIMIT:
        raise _too_many(root, code, git=True)
    others = sum(not name.startswith("runs/") for name in git.untracked) - len(code)
    what = "1 untracked file is" if others == 1 else f"{others} untracked files are"
    note = f"{what} left out of the code snapshot: caches, data, outputs or secrets"
    return (*tracked, *code), replace(git, untracked=code), [], [note] if others else []


def _too_many(root: Path, names: Sequence[str], *, git: bool) -> RunnerError:
    """The error for too many files. It names the top-level entry that contains the most of them."""
    tops: dict[str, int] = {}
    for name in names:
        top = f"{name.partition('/')[0]}/" if "/" in name else ""
        tops[top] = tops.get(top, 0) + 1
    top = max(tops, key=lambda each: tops[each])
    ignore = (
        f"add /{top} to {root}/.gitignore, move the files elsewhere,"
        if top
        else "move the files elsewhere"
    )
    return RunnerError(
        f"{root} has more than {UNTRACKED_LIMIT:,} files that git does not track, "
        f"at least {tops[top]:,} {f'in {top}' if top else 'in the folder itself'}",
        "a launch copies untracked files together with the code; that many files are usually data, not code",
        f"{'' if git else f'run git init {root}, and '}{ignore} or commit them",
    )


def _data_folders(root: Path) -> set[str]:
    """The names of top-level folders that are left out; one of them that is a Python package is code."""
    return {name for name in _BIG if not files.is_file(root / name / "__init__.py")}


def _note_of_folders(root: Path) -> list[str]:
    """A note about folders that are left out of a project without git. Folders of runs are not named."""
    found = sorted(name for name in _data_folders(root) - {"runs"} if (root / name).is_dir())
    names = ", ".join(f"{name}/" for name in found)
    note = f"left out of the code snapshot: {names} (usually data; if one is a Python package, add an __init__.py)"
    return [note] if found else []


def _skip(name: str, data: Collection[str]) -> bool:
    """Whether to leave out an untracked file: a cache, data, output of another run, or a file with secrets."""
    *above, last = name.split("/")
    return bool(
        {*above, last} & _NOT_CODE
        or (above and above[0] in data)
        or last in _SECRET
        or last.endswith(".sqsh")
    )


def _walk(root: Path, below: str = "") -> tuple[str, ...]:
    """The files below a folder without git, sorted. Files that are not code are skipped."""
    found: list[str] = []
    data = _data_folders(root)
    for folder, inner, names in os.walk(root / below):
        at = Path(folder).relative_to(root).as_posix()
        prefix = "" if at == "." else at + "/"
        inner[:] = sorted(name for name in inner if not _skip(f"{prefix}{name}/x", data))
        links = [name for name in inner if (Path(folder) / name).is_symlink()]
        inner[:] = [name for name in inner if name not in links]
        found += [prefix + name for name in (*names, *links) if not _skip(prefix + name, data)]
        if len(found) > UNTRACKED_LIMIT:
            raise _too_many(root, found, git=False)
    return tuple(sorted(found))


def _measure(
    root: Path, names: Sequence[str], tracked: set[str]
) -> tuple[Source, list[tuple[str, str]]]:
    """(the files that exist and are not too large, the files that are left out with the reason)."""
    kept: list[tuple[str, int]] = []
    left_out: list[tuple[str, str]] = []
    for name in names:
        try:
            found = os.lstat(
                f"{root}/{name}"
            )  # creating a Path for each of many files takes longer than lstat itself
        except OSError:
            if "\ufffd" in name:
                left_out.append((name, "its name is not UTF-8"))
            continue  # deleted in the work tree
        if stat.S_ISDIR(found.st_mode):
            continue  # a submodule that is not checked out
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
            left_out.append((name, "it is neither a file nor a symlink"))
        elif found.st_size > FILE_LIMIT_BYTES:
            kind = "git tracks it, but " if name in tracked else ""
            # rounded up, so that it exceeds the limit
            size = math.ceil(found.st_size / 2**20 * 10) / 10
            why = f"{kind}it has {size:,} MiB; the limit is {FILE_LIMIT_BYTES >> 20} MiB"
            left_out.append((name, why))
        else:
            kept.append((name, found.st_size))
    kept, dropped = _within_total(kept)
    return Source(root, tuple(name for name, _ in kept), tuple(size for _, size in kept)), [
        *left_out,
        *dropped,
    ]


def _within_total(
    kept: list[tuple[str, int]],
) -> tuple[list[tuple[str, int]], list[tuple[str, str]]]:
    """Leave out the largest files until the rest fits the limit."""
    total = sum(size for _, size in kept)
    dropped: set[str] = set()
    for name, size in sorted(kept, key=lambda each: -each[1]):
        if total <= TOTAL_LIMIT_BYTES:
            break
        dropped.add(name)
        total -= size
    why = f"all code together exceeds {TOTAL_LIMIT_BYTES >> 20} MiB, so the largest files are left out"
    return [each for each in kept if each[0] not in dropped], [
        (name, why) for name in sorted(dropped)
    ]


def _single(script: Path, sources: Iterable[Source]) -> Source:
    """A source with one file from another folder, which is copied to the top under its own name."""
    for source in sources:
        if script.name in source.files:
            raise RunnerError(
                f"{script} would replace {source.root / script.name} in the code snapshot",
                "a script from outside the project is copied to the top of the snapshot, where that name is in use",
                "rename the script, or copy it into the project",
            )
    return Source(script.parent, (script.name,), (script.stat().st_size,))


STORE = ".code"
_LAUNCH_SECONDS = 3600
"""for this long, a copy without links counts as one that a launch is still creating"""


def store_files(taken: Snapshot, run_folder: Path, *, shared: bool) -> Snapshot:
    """Put the files into RUN/code as links to a copy that is named by its content. Create that copy if it is missing.

    Returns the snapshot that was taken, without files such as logs that changed meanwhile.
    """
    if not shared or not taken.content or not taken.files:
        take(taken, run_folder)
        return unchanged(taken, run_folder / "code") if taken.content else taken
    store = run_folder.parent / STORE / taken.content[:32]
    if not store.is_dir():
        fresh = store.parent / f".{store.name}.{os.getpid()}.partial"
        copy(taken, fresh)
        try:
            taken = unchanged(taken, fresh)
        except RunnerError:
            folders.remove(fresh)
            raise
        store = run_folder.parent / STORE / taken.content[:32]
        if store.is_dir():  # another launch of the same code has created it meanwhile
            folders.remove(fresh)
        else:
            folders.move(fresh, store)
    folders.copy(taken.files, store, run_folder / "code", link=True)
    write_diff(taken, run_folder)
    return taken


def unused_stores(runs: Path) -> tuple[Path, ...]:
    """The copies to which no run has links any more, except those that a launch may still be creating."""
    if not (runs / STORE).is_dir():
        return ()
    old = (
        path
        for path in (runs / STORE).iterdir()
        if time.time() - path.lstat().st_mtime > _LAUNCH_SECONDS
    )
    return tuple(path for path in old if path.is_dir() and not _has_links(path))


def _has_links(store: Path) -> bool:
    return any(
        os.lstat(f"{folder}/{name}").st_nlink > 1
        for folder, _, names in os.walk(store)
        for name in names
    )


def summed(snapshot: Snapshot) -> Snapshot:
    """The snapshot with the checksums of its files, without files such as logs that no longer exist.

    Raises RunnerError if a file contains a known secret.
    """
    roots = {name: source.root for source in reversed(snapshot.sources) for name in source.files}
    loose = snapshot.loose
    sums = _sums(
        ((name, roots[name] / name) for name in snapshot.files), careful=True, may_lack=loose
    )
    gone = [name for name in snapshot.files if name not in sums]
    snapshot = snapshot.without(gone, "it was removed during the launch")
    return replace(snapshot, sums=sums, content=_total(sums))


def unchanged(snapshot: Snapshot, code: Path) -> Snapshot:
    """Compare a copy with its snapshot. Files such as logs that changed meanwhile are removed from both.

    Raises RunnerError if a file that git tracks has changed, or the program.
    """
    sums = _sums(((name, code / name) for name in snapshot.files), may_lack=snapshot.files)
    changed = [name for name in snapshot.files if sums.get(name) != snapshot.sums.get(name)]
    loose = snapshot.loose
    if not changed:
        return snapshot
    if found := [name for name in changed if name not in loose]:
        raise RunnerError(
            f"{found[0]} changed while runner copied it",
            "git tracks it or the job runs it, so the run needs an exact copy",
            "stop what writes to it, then launch again",
        )
    for name in changed:
        folders.discard(code / name)
    kept = {name: line for name, line in snapshot.sums.items() if name not in changed}
    return replace(
        snapshot.without(changed, "it changed during the launch"), sums=kept, content=_total(kept)
    )


def fingerprint_of_folder(code: Path, names: Iterable[str]) -> str:
    """The checksum of these files of RUN/code."""
    return _total(_sums((name, code / name) for name in sorted(names)))


def check_diff(run_folder: Path) -> None:
    """Raise RunnerError if git's diff contains a secret, even in a removed line."""
    from runner.machine import secrets

    path = run_folder / DIFF
    if path.is_file():
        secrets.refuse(path.read_bytes(), f"the record of uncommitted changes ({DIFF})")


def _total(sums: Mapping[str, str]) -> str:
    import hashlib

    lines = (f"{sums[name]} {name}\n" for name in sorted(sums))
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def _sums(
    files: Iterable[tuple[str, Path]], *, careful: bool = False, may_lack: Collection[str] = ()
) -> dict[str, str]:
    """Name -> type and sha256 of each file, without those of `may_lack` that do not exist."""
    import hashlib

    from runner.machine import secrets  # slow to import, and a dry run computes no checksums

    sums: dict[str, str] = {}
    try:
        for name, path in files:
            try:
                kind, data = content_of(path)
            except FileNotFoundError:
                if name not in may_lack:
                    raise
                continue
            if careful and kind != "link":
                secrets.refuse(data, f"the code snapshot ({name})")
            sums[name] = f"{kind} {hashlib.sha256(data).hexdigest()}"
    except OSError as error:
        raise explain(error, f"read {error.filename}") from error
    return sums


def content_of(path: Path) -> tuple[str, bytes]:
    """(link, program or file; the content). Raises OSError."""
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return "link", os.fsencode(path.readlink())
    return "program" if status.st_mode & stat.S_IXUSR else "file", path.read_bytes()
