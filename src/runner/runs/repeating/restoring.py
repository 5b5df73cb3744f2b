"""What a lock names, had again: the code from a snapshot or from git, the image from its recipe or its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.errors import RunnerError
from runner.images.build.build import BuildOptions, build
from runner.images.importer.importer import import_image
from runner.images.importer.plan import ImportOptions
from runner.images.recipe import load_recipe
from runner.machine import process
from runner.machine.report import Report
from runner.project import Project
from runner.runs.code.snapshot import DIFF
from runner.runs.code.work_tree import command

Table = Mapping[str, Any]


def code_from_git(code: Table, root: Path, target: Path, diff: Path | None) -> tuple[str, ...]:
    """Lay the commit that a lock names into `target`, with the changes of a kept diff; returns what cannot be had.

    Raises RunnerError where the commit is not in the repository of `root`.
    """
    commit = code.get("commit", "")
    index = {"GIT_INDEX_FILE": str(target.parent / ".restored-index")}
    below = process.run(command(root, "rev-parse", "--show-prefix"), check=False).stdout.strip()
    tree = f"{commit}:{below.rstrip('/')}" if below else commit
    read = process.run(command(root, "read-tree", tree), env=index, check=False) if commit else None
    if read is None or read.exit_code != 0:
        raise RunnerError(
            "the code of that run cannot be had",
            f"its snapshot is gone, and {root} has no commit {commit[:12]}" if commit else "it was under no git",
            "git fetch, or run it in a clone that has the commit",
        )
    process.run(command(root, "checkout-index", "--all", f"--prefix={target}/"), env=index)
    Path(index["GIT_INDEX_FILE"]).unlink(missing_ok=True)
    lost = [f"{name}: it was never committed" for name in code.get("untracked", ())]
    changed: Sequence[str] = code.get("modified", ())
    if changed and diff is not None and diff.is_file():
        alone = {"GIT_CEILING_DIRECTORIES": str(target.parent)}  # a repository around it is none of its business
        process.run(("git", "-C", str(target), "apply", "--binary", str(diff)), env=alone)
    else:
        lost += [f"{name}: its changes were not committed, and {DIFF} is gone" for name in changed]
    return tuple(lost)


def image(table: Table, recipe: Table, project: Project, environ: Mapping[str, str], report: Report) -> None:
    """Make the squashfs file that a lock names where it is gone: by its recipe, else from where it was imported.

    Raises RunnerError where what is made is another image.
    """
    path = Path(table["reference"])
    name, source = recipe.get("name", ""), table.get("source", "")
    options = ImportOptions(architecture=table.get("architecture") or None)
    report.say(f"the image {path.name} is gone: making it again from {f'the recipe {name}' if name else source}")
    if name:
        platform = f"linux/{table['architecture']}" if table.get("architecture") else None
        build(load_recipe(name, project), BuildOptions(platform=platform), environ, report)
        source = name
    made = import_image(_pinned(source, table), path.parent, project, environ, report, options).squashfs
    if made.path != path:
        raise RunnerError(
            f"the image {path.name} cannot be had as it was",
            f"{source} gives {made.path.name} now"
            + (f"; its recipe was {recipe.get('content')}, at {recipe.get('revision', '?')}" if name else ""),
            "check that version of the recipe out, and try again; or launch anew with the image of today",
        )


def _pinned(source: str, table: Table) -> str:
    """A registry's name with the digest that it had: a tag may have moved."""
    digest = table.get("digest", "")
    return f"{source}@{digest}" if source.startswith("docker://") and digest and "@" not in source else source


def at(project: Project, root: Path) -> Project:
    """The project as it lies in a restored tree."""
    return replace(project, root=root, start=root)
