"""Folders that runner creates: with unique names, filled with files, and removed as a whole."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from runner.errors import RunnerError
from runner.machine import files

NUMBERS = ".numbers.json"
"""a file beside numbered folders: stem -> the highest number ever used"""


def take_numbered(parent: Path, stem: str) -> Path:
    """Create and return the folder PARENT/STEM-NNNN with a new number. Numbers of deleted folders are not reused.

    The file NUMBERS stores the highest number. If it is missing or damaged, the number follows the highest existing
    one. If several processes try the same number, mkdir succeeds for only one. Raises RunnerError if the parent is
    read-only.
    """
    with files.explained(f"make a folder in {parent}"):
        parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            with suppress(OSError):  # the file system has no locks, or another user owns this one
                held.enter_context(files.locked(parent / "numbers"))
            given = _read_numbers(parent / NUMBERS)
            number = max(given.get(stem, 0), _highest(parent, stem))
            while True:
                number += 1
                folder = parent / f"{stem}-{number:04}"
                # NUMBERS first: to skip a number does no harm, but to use one twice would. In a shared folder,
                # another user may own the file; then the number comes from the folders that exist
                with suppress(RunnerError):
                    files.write(
                        parent / NUMBERS, json.dumps({**given, stem: number}, indent=1) + "\n"
                    )
                try:
                    folder.mkdir()
                    return folder
                except FileExistsError:
                    continue


def _highest(parent: Path, stem: str) -> int:
    form = re.compile(re.escape(stem) + r"-(\d+)")
    matches = (form.fullmatch(entry.name) for entry in os.scandir(parent))
    return max((int(match[1]) for match in matches if match), default=0)


def _read_numbers(ledger: Path) -> dict[str, int]:
    try:
        content = json.loads(ledger.read_bytes())
        return {str(stem): number for stem, number in content.items() if type(number) is int}
    except (OSError, ValueError, AttributeError):
        return {}


def make(folder: Path) -> None:
    """Create a folder and its parents, unless they exist."""
    with files.explained(f"make the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)


def fill(folder: Path, texts: Mapping[str, str]) -> None:
    """Write the files (relative path -> text) into a folder that runner created.

    Unlike `files.write`, this does not sync each file: the folder becomes valid only with the record, written last.
    """
    with files.explained(f"write below {folder}"):
        for name, text in texts.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text.encode(errors="surrogateescape"))  # a script of the user


def copy(
    names: Iterable[str],
    source: Path,
    target: Path,
    *,
    link: bool = False,
    skip_missing: bool = False,
) -> None:
    """Copy the named files (relative paths) with modes and times. Symlinks stay symlinks; existing files are kept.

    With `link`, make hard links if the file system supports them. With `skip_missing`, a file that no longer exists is
    no error.
    """
    import shutil  # `runner-importer get` does not need it

    made: set[Path] = set()
    try:
        for name in names:
            to = target / name
            if to.parent not in made:
                to.parent.mkdir(parents=True, exist_ok=True)
                made.add(to.parent)
            if os.path.lexists(to) or (link and _linked(source / name, to)):
                continue
            try:
                shutil.copy2(source / name, to, follow_symlinks=False)
            except FileNotFoundError:
                if not skip_missing or os.path.lexists(source / name):
                    raise
    except OSError as error:
        raise files.explain(error, f"copy {error.filename or source} to {target}") from error


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(source, target, follow_symlinks=False)
        return True
    except OSError:
        # another file system, no support for hard links, or too many of them: copy instead
        return False


@contextmanager
def beside(target: Path, suffix: str) -> Iterator[Path]:
    """A new private folder `.TARGET.RANDOM+suffix` beside `target`, which is removed on exit."""
    folder = target.parent / f".{target.name}.{os.urandom(4).hex()}{suffix}"
    try:
        folder.mkdir(mode=0o700)  # inside the block, because Ctrl-C may come as soon as it exists
        yield folder
    finally:
        remove(folder)


def move(folder: Path, target: Path) -> None:
    """Rename a folder. Raises RunnerError if that fails."""
    with files.explained(f"move {folder} to {target}"):
        folder.rename(target)


def remove(folder: Path) -> None:
    """Remove a folder that runner created, with all its content, and ignore errors."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """The user's folder for data that can be recreated: private configurations, build contexts, build logs."""
    return Path(environ.get("XDG_CACHE_HOME") or home(environ) / ".cache") / "runner"


def home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HOME") or "~").expanduser()


def open_to_others(folder: Path) -> bool:
    """Whether every user may enter the folder: it and all its parents are executable for others."""
    try:
        return all(step.stat().st_mode & 0o001 for step in (folder, *folder.parents))
    except OSError:
        return False


@contextmanager
def temporary(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A new, private folder below `parent` (default: TMPDIR), which is removed on exit."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder:
        yield Path(folder)


def discard(file: Path) -> None:
    """Remove a file of a folder that is being created."""
    file.unlink(missing_ok=True)
