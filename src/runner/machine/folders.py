"""Folders of our own: taken under a name that nobody else gets, filled, removed whole."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from runner.machine import files


def take_numbered(parent: Path, stem: str, digits: int = 4) -> Path:
    """Make and return the folder PARENT/STEM-NNNN with the next free number; mkdir decides between racers.

    Raises RunnerError where the parent cannot be written.
    """
    form = re.compile(re.escape(stem) + r"-(\d+)")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        taken = [int(found[1]) for entry in os.scandir(parent) if (found := form.fullmatch(entry.name))]
        number = max(taken, default=0)
        while True:
            number += 1
            folder = parent / f"{stem}-{number:0{digits}}"
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                continue
    except OSError as error:
        raise files.explain(error, f"make a folder in {parent}") from error


def make(folder: Path) -> None:
    """Make a folder, and those above it, where they do not exist."""
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


def copy(names: Iterable[str], source: Path, target: Path) -> None:
    """Copy the named files (relative paths) with modes and times; symlinks stay symlinks; what is there stays."""
    made: set[Path] = set()
    try:
        for name in names:
            to = target / name
            if to.parent not in made:
                to.parent.mkdir(parents=True, exist_ok=True)
                made.add(to.parent)
            if not os.path.lexists(to):
                shutil.copy2(source / name, to, follow_symlinks=False)
    except OSError as error:
        raise files.explain(error, f"copy {error.filename or source} to {target}") from error


def remove(folder: Path) -> None:
    """Remove a folder that we made, with all that lies in it; what cannot be removed stays."""
    shutil.rmtree(folder, ignore_errors=True)


def open_to_others(folder: Path) -> bool:
    """Whether any user may walk into the folder: each step of the way to it has the right bit."""
    try:
        return all(step.stat().st_mode & 0o001 for step in (folder, *folder.parents))
    except OSError:
        return False
