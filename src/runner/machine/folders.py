"""Folders that runner creates: under a unique name, filled, removed as a whole."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from runner.errors import RunnerError
from runner.machine import files

NUMBERS = ".numbers.json"
"""the ledger of a folder of numbered folders: stem -> the highest number ever given"""


def take_numbered(parent: Path, stem: str, digits: int = 4) -> Path:
    """Make and return the folder PARENT/STEM-NNNN with a number that was never given before, to a deleted one either.

    A ledger beside the folders remembers; where it is missing or damaged, the next number follows the folders that are
    there. mkdir decides between simultaneous callers. Raises RunnerError where the parent cannot be written.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with _ledger_lock(parent):
            given = _read_numbers(parent / NUMBERS)
            number = max(given.get(stem, 0), _highest(parent, stem))
            while True:
                number += 1
                folder = parent / f"{stem}-{number:0{digits}}"
                # the ledger first: a number that is lost does no harm, one that is given twice does
                with suppress(RunnerError):  # another user's ledger in a shared folder: the folders are counted then
                    files.write(parent / NUMBERS, json.dumps({**given, stem: number}, indent=1) + "\n")
                try:
                    folder.mkdir()
                    return folder
                except FileExistsError:
                    continue
    except OSError as error:
        raise files.explain(error, f"make a folder in {parent}") from error


def _highest(parent: Path, stem: str) -> int:
    form = re.compile(re.escape(stem) + r"-(\d+)")
    return max((int(found[1]) for entry in os.scandir(parent) if (found := form.fullmatch(entry.name))), default=0)


def _read_numbers(ledger: Path) -> dict[str, int]:
    try:
        content = json.loads(ledger.read_bytes())
        return {str(stem): number for stem, number in content.items() if type(number) is int}
    except (OSError, ValueError, AttributeError):
        return {}


@contextmanager
def _ledger_lock(parent: Path) -> Iterator[None]:
    """The ledger's lock; none on a file system without locks, and if another user owns the lock."""
    with ExitStack() as held:
        with suppress(OSError):
            held.enter_context(files.locked(parent / "numbers"))
        yield


def make(folder: Path) -> None:
    """Make a folder and its parents, unless they exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise files.explain(error, f"make the folder {folder}") from error


def fill(folder: Path, texts: Mapping[str, str]) -> None:
    """Write the files (relative path -> text) below a folder of our own.

    They are not synced one by one, as `files.write` does: what makes the folder count is the record written last.
    """
    try:
        for name, text in texts.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text.encode())
    except OSError as error:
        raise files.explain(error, f"write below {folder}") from error


def copy(names: Iterable[str], source: Path, target: Path, *, link: bool = False) -> None:
    """Copy the named files (relative paths) with modes and times; symlinks stay symlinks; existing files are kept.

    With `link` as hard links where the file system has them: names of the same files.
    """
    made: set[Path] = set()
    try:
        for name in names:
            to = target / name
            if to.parent not in made:
                to.parent.mkdir(parents=True, exist_ok=True)
                made.add(to.parent)
            if os.path.lexists(to) or (link and _linked(source / name, to)):
                continue
            shutil.copy2(source / name, to, follow_symlinks=False)
    except OSError as error:
        raise files.explain(error, f"copy {error.filename or source} to {target}") from error


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(source, target, follow_symlinks=False)
        return True
    except OSError:  # another file system, one without links, or too many of them: a copy does
        return False


@contextmanager
def beside(target: Path, suffix: str) -> Iterator[Path]:
    """A new folder `.TARGET.RANDOM+suffix` beside `target`, for this user alone; removed at the end with its files."""
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=suffix, dir=target.parent))
    try:
        yield folder
    finally:
        remove(folder)


def move(folder: Path, target: Path) -> None:
    """Rename a folder. Raises RunnerError if that is not allowed."""
    try:
        folder.rename(target)
    except OSError as error:
        raise files.explain(error, f"move {folder} to {target}") from error


def remove(folder: Path) -> None:
    """Remove a folder that we made, with all its content, as far as that is possible."""
    shutil.rmtree(folder, ignore_errors=True)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """The user's folder for data that can be recreated: private configurations, staged contexts, logs of builds."""
    return Path(environ.get("XDG_CACHE_HOME") or home(environ) / ".cache") / "runner"


def home(environ: Mapping[str, str]) -> Path:
    """The user's home folder."""
    return Path(environ.get("HOME") or "~").expanduser()


def open_to_others(folder: Path) -> bool:
    """Whether every user may enter the folder: each of its parents has the right bit."""
    try:
        return all(step.stat().st_mode & 0o001 for step in (folder, *folder.parents))
    except OSError:
        return False


@contextmanager
def temporary(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A new, private folder below `parent` (default: TMPDIR), removed on leaving."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder:
        yield Path(folder)


def discard(file: Path) -> None:
    """Remove a file of a folder that we are making."""
    file.unlink(missing_ok=True)
