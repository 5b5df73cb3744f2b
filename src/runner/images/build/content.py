"""The input files of a recipe's image, and the hash of them that names the image."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from runner.errors import RunnerError
from runner.images.recipe import Recipe
from runner.machine import process

# increase when the same inputs give a different image: 1
FORMAT = 1


def context_files(recipe: Recipe) -> tuple[str, ...]:
    """The files that COPY may use, relative to the recipe's root, sorted. Symlinks stay symlinks."""
    if recipe.context is None:
        return _all_files(recipe.root)
    names: set[str] = set()
    for entry in recipe.context:
        path = recipe.root / entry
        if path.is_dir() and not path.is_symlink():
            names.update(str(file.relative_to(recipe.root)) for file in path.rglob("*") if _counts(file))
        else:
            names.add(str(Path(entry)))
    return tuple(sorted(names))


def _all_files(folder: Path) -> tuple[str, ...]:
    """Every file of a folder; in a git work tree, only those that git does not ignore."""
    listed = None
    if process.which("git"):
        argv = ("git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        done = process.run(argv, check=False)
        listed = done.stdout.split("\0") if done.exit_code == 0 else None
    if listed is None:
        listed = [str(file.relative_to(folder)) for file in folder.rglob("*") if _counts(file)]
    return tuple(sorted({name for name in listed if name and os.path.lexists(folder / name)}))


def _counts(file: Path) -> bool:
    generated = {".git", "__pycache__"} & set(file.parts)
    return not generated and (file.is_symlink() or file.is_file())


def files_hash(recipe: Recipe) -> str:
    """The sha256 of the Containerfile, the pins and the context: names, types, execute bits and content."""
    digest = hashlib.sha256()
    own = {str(path.relative_to(recipe.root)) for path in (recipe.containerfile, recipe.pins) if path}
    try:
        for name in sorted({*own, *context_files(recipe)}):
            digest.update(_file_line(recipe.root, name).encode())
    except OSError as error:
        raise RunnerError(
            f"cannot read {error.filename}",
            error.strerror or str(error),
            f"recipe {recipe.name!r} uses this file: check its path and mode",
        ) from error
    return digest.hexdigest()


def _file_line(root: Path, name: str) -> str:
    path = root / name
    if path.is_symlink():
        return json.dumps([name, "link", os.readlink(path)]) + "\n"  # noqa: PTH115 (the text itself counts)
    with path.open("rb") as stream:
        content = hashlib.file_digest(stream, "sha256").hexdigest()
    return json.dumps([name, "x" if path.stat().st_mode & 0o100 else "-", content]) + "\n"


def content_hash(recipe: Recipe, base_digest: str, build_args: Mapping[str, str], platform: str) -> str:
    """12 hex digits that name the image. The same inputs give the same hash on every machine.

    The git commit is not an input but a label, so that a commit that does not change these files changes nothing.
    """
    inputs = {
        "format": FORMAT,
        "recipe": recipe.name,
        "containerfile": str(recipe.containerfile.relative_to(recipe.root)),
        "files": files_hash(recipe),
        "base": base_digest,
        "build_args": dict(build_args),
        "platform": platform,
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:12]
