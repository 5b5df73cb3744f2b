"""Compare two launches. Each is a run folder, or the launch that would result from the current files."""

from __future__ import annotations

import filecmp
import os
import shlex
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runner.errors import RunnerError
from runner.machine import files
from runner.machine.report import Quiet
from runner.project import Project
from runner.runs import lock
from runner.runs.launch import Requests, prepare
from runner.runs.plan import EDF
from runner.runs.run import Run
from runner.runs.secrets import HIDDEN
from runner.runs.sweep import ARRAY_TASK, with_values

Table = Mapping[str, Any]

# table of the lock -> name to display; other tables are shown under their own name
_KINDS = {
    "job": "arguments",
    "job.resources": "resources",
    "job.env": "variables",
    "environment.env": "variables",
    "site.env": "variables",
    "site.values": "site",
    "image": "image",
    "recipe": "image",
}
# not compared: names, paths and times of a launch; origins of values; keys that describe the code, image and EDF, which
# are compared directly
_OWN = {
    "run": {"name", "created", "command_line", "project", "script_sha256", "again", "after"},
    "environment": {"path", "edf_sha256"},
    "image": {"link", "size_bytes"},
    "job": {"name"},
}
_SKIPPED = {"code", "job.sources", "site.sources", "files", "sweep"}
# compared only if both sides have them: an image that does not exist here has no checksum, and a plan does not ask
# Slurm
_IF_KNOWN = {("image", "digest"), ("image", "sha256"), ("image", "content"), ("slurm", "version")}
_NOTED = {
    "packages",
    "inside",
}  # recorded by the job, so not known for a launch that has not started


@dataclass(frozen=True)
class Side:
    """One of the two launches."""

    name: str
    tables: Mapping[str, Table]
    """dotted name -> table: those of the lock, and those that the newest attempt recorded inside its container"""
    edf: str
    """the text of the EDF; empty if there is none"""
    code: Tree | None
    """None if the snapshot was removed"""


@dataclass(frozen=True)
class Difference:
    """One difference."""

    kind: str
    """code, arguments, resources, image, EDF, variables, site, packages, inside, or a table of the lock"""
    name: str
    left: Any
    """None: this side does not have the value"""
    right: Any


@dataclass(frozen=True)
class Comparison:
    """The differences, and what could not be compared."""

    differences: tuple[Difference, ...]
    left_out: tuple[str, ...] = field(default=())


def run_side(run: Run) -> Side:
    """The side for a run folder. Raises RunnerError if its lock cannot be read."""
    tables = lock.load(run.folder / "lock.toml")
    count = int(tables.get("code", {}).get("files", 0))
    code = tree_of_run(run.name, run.code, count, run.launched)
    return Side(run.name, {**tables, **_inside(run)}, files.text_of(run.folder / EDF), code)


def _inside(run: Run) -> Mapping[str, Table]:
    """What the newest attempt with an inside.toml recorded about its container (payload/inside.sh)."""
    for attempt in reversed(run.attempts):
        with suppress(ValueError):
            if not (table := tomllib.loads(attempt.text("inside.toml"))):
                continue
            return {"packages": table.pop("packages", {}), "inside": table}
    return {}


def side_now(run: Run, requests: Requests, project: Project) -> Side:
    """The side for what the run's command line would launch now, with the current code, environment and site."""
    if "launch" not in run.command_line:
        raise RunnerError(
            f"runner does not know how {run.name} was launched",
            "the run's record contains no `runner launch` command",
            f"compare the run with another run: runner diff {run.name} OTHER",
        )
    plan = prepare(replace(requests(run.command_line), dry_run=True), project, os.environ, Quiet())
    # the lock of a run that repeats one of a sweep has its values too
    values = lock.load(run.folder / "lock.toml").get("sweep", {})
    if values and ARRAY_TASK not in values:
        plan = with_values(plan, values)
    tables = lock.read(lock.lock_text(lock.tables(plan, run)))
    tables.pop("slurm", None)  # it belongs to the run
    # if two sources have the same file, the first one applies
    code = {
        name: source.root / name
        for source in reversed(plan.snapshot.sources)
        for name in source.files
    }
    return Side(".", tables, plan.files[EDF], Tree(".", code))


def compare(left: Side, right: Side) -> Comparison:
    """Compare two launches; differences of the code come first."""
    found: list[Difference] = []
    left_out: list[str] = []
    if left.code is None or right.code is None:
        gone = left.name if left.code is None else right.name
        left_out.append(f"code: the snapshot of {gone} is gone; only the commits are compared")
        known = [side.tables.get("code", {}) for side in (left, right)]
        found += _table(
            "code",
            *({key: code[key] for key in ("commit", "modified") if key in code} for code in known),
        )
    else:
        changed, written = compare_trees(left.code, right.code)
        found += [Difference("code", *each) for each in changed]
        left_out += [
            f"code: {count} files that {name} wrote into its snapshot" for name, count in written
        ]
    names = dict.fromkeys((*left.tables, *right.tables))
    for name in names:
        lacking = [side.name for side in (left, right) if name not in side.tables]
        if name in _NOTED and lacking:
            left_out.append(f"{name}: {lacking[0]} did not record what its container contains")
        elif name not in _SKIPPED:
            found += _table(name, left.tables.get(name, {}), right.tables.get(name, {}))
    found += _edf(left.edf, right.edf)
    if any(HIDDEN in str(side.tables) for side in (left, right)):
        left_out.append("values that look like secrets, which a lock file never contains")
    order = ("code", "arguments", "resources", "image", "EDF", "variables", "site")
    rank = {kind: number for number, kind in enumerate(order)}
    return Comparison(
        tuple(sorted(found, key=lambda each: rank.get(each.kind, len(rank)))), tuple(left_out)
    )


def _table(name: str, left: Table, right: Table) -> Iterator[Difference]:
    for key in dict.fromkeys((*left, *right)):
        if key in _OWN.get(name, ()) or (
            (name, key) in _IF_KNOWN and not (left.get(key) and right.get(key))
        ):
            continue
        if left.get(key) != right.get(key):
            yield Difference(_KINDS.get(name, name), key, left.get(key), right.get(key))


def _edf(left: str, right: str) -> Iterator[Difference]:
    """Compare two EDFs, except comments and variables, which are in the lock without secrets.

    For lists, report the items that only one side has.
    """
    sides = [lock.read(text) for text in (left, right)]
    for name in dict.fromkeys((*sides[0], *sides[1])):
        if name in ("env", "image"):  # the image is compared by its content
            continue
        for each in _table(name, *(side.get(name, {}) for side in sides)):
            key = f"{name}.{each.name}".removesuffix(".")
            if isinstance(each.left or [], list) and isinstance(each.right or [], list):
                left_items, right_items = each.left or [], each.right or []
                missing = [
                    Difference("EDF", key, item, None)
                    for item in left_items
                    if item not in right_items
                ]
                added = [
                    Difference("EDF", key, None, item)
                    for item in right_items
                    if item not in left_items
                ]
                # the same items in another order: if two mounts have the same target, the later one applies
                moved = Difference("EDF", key, shown(left_items), shown(right_items))
                yield from (missing + added) or [moved]
            else:
                yield Difference("EDF", key, each.left, each.right)


def shown(value: Any) -> str:
    """A value, formatted for a table."""
    if isinstance(value, list | tuple):
        return shlex.join(map(str, value))
    if isinstance(value, bool):
        return "true" if value else "false"
    return "-" if value is None else str(value)


@dataclass(frozen=True)
class Tree:
    """The files of a snapshot, or the files that a snapshot would contain."""

    name: str
    files: Mapping[str, Path]
    """path in the snapshot -> path of the file"""
    since: float = float("inf")
    """files that are newer than this time may be output of the job, which ran in this folder; infinite if no job did"""


def tree_of_run(name: str, code: Path, count: int, launched: float | None) -> Tree | None:
    """The tree of RUN/code, which had `count` files at launch; None if it was removed."""
    if not code.is_dir():
        return None
    files: dict[str, Path] = {}
    for folder, inner, names in os.walk(code):
        inner[:] = [each for each in inner if each != "__pycache__"]
        links = [each for each in inner if (Path(folder) / each).is_symlink()]
        for each in (*names, *links):
            path = Path(folder) / each
            files[path.relative_to(code).as_posix()] = path
    since = launched if len(files) > count else None
    return Tree(name, files, float("inf") if since is None else since)


def compare_trees(
    left: Tree, right: Tree
) -> tuple[list[tuple[str, str | None, str | None]], list[tuple[str, int]]]:
    """(file, left, right) for each file that differs, with None if a side lacks it; and (name, count) of files that a
    run wrote into its code folder, which are not compared.
    """
    found: list[tuple[str, str | None, str | None]] = []
    written = {left.name: 0, right.name: 0}
    for name in sorted({*left.files, *right.files}):
        mine, theirs = left.files.get(name), right.files.get(name)
        if mine is not None and theirs is not None:
            said = _difference(mine, theirs)
            if said:
                found.append((name, *said))
            continue
        tree, path = (left, mine) if mine is not None else (right, theirs)
        assert path is not None
        if path.lstat().st_mtime > tree.since:
            written[tree.name] += 1
        else:
            found.append((name, "there", None) if tree is left else (name, None, "there"))
    return found, [(name, count) for name, count in written.items() if count]


def _difference(left: Path, right: Path) -> tuple[str, str] | None:
    """How two files with the same name differ; None if they are equal."""
    one, two = left.lstat(), right.lstat()
    if stat.S_ISLNK(one.st_mode) or stat.S_ISLNK(two.st_mode):
        targets = tuple(
            f"link to {path.readlink()}" if path.is_symlink() else "a file"
            for path in (left, right)
        )
        return None if targets[0] == targets[1] else (targets[0], targets[1])
    if one.st_size != two.st_size:
        return f"{one.st_size} bytes", f"{two.st_size} bytes"
    if not filecmp.cmp(left, right, shallow=False):
        return "other text", "other text"
    modes = tuple(
        "executable" if each.st_mode & stat.S_IXUSR else "not executable" for each in (one, two)
    )
    return None if modes[0] == modes[1] else (modes[0], modes[1])
