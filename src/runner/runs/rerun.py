"""`runner rerun`: repeat a launch from its lock. Deleted parts are recreated, or reported as lost."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from runner.errors import RunnerError
from runner.images import sarus_store
from runner.images.build.base import BuildOptions
from runner.images.build.build import build
from runner.images.importer.importer import import_image
from runner.images.importer.plan import ImportOptions, ImportRequest
from runner.images.recipe import load_recipe
from runner.machine import folders, process
from runner.machine.report import Report
from runner.project import Project
from runner.runs import diff, hub, lock, snapshot, submit
from runner.runs.after import Dependencies
from runner.runs.git import command
from runner.runs.run import PREPARING, Run, find_run, load, save
from runner.runs.schedulers.scheduler import scheduler_of
from runner.runs.secrets import write_record
from runner.runs.snapshot import DIFF

LOCK = "lock.toml"


@dataclass(frozen=True)
class Locked:
    """A lock, and what still exists of its run."""

    path: Path
    tables: Mapping[str, Table]

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def name(self) -> str:
        return str(self.tables.get("run", {}).get("name", self.folder.name))

    @property
    def changed_files(self) -> tuple[str, ...]:
        """The files of the run folder that are missing or have changed."""
        wanted = self.tables.get("files", {})
        return tuple(
            name for name, sha256 in wanted.items() if _sha256(self.folder / name) != sha256
        )

    @property
    def code(self) -> tuple[str, ...] | None:
        """The files of the snapshot; None if it is missing or has changed."""
        table = self.tables.get("code", {})
        run = Run(
            self.name, self.folder, "", "", "", str(self.tables.get("run", {}).get("created", ""))
        )
        if not table.get("files"):
            return ()
        tree = diff.tree_of_run(run, int(table["files"]))
        if tree is None or not tree.files:
            return None
        names = tuple(
            name for name, path in tree.files.items() if path.lstat().st_mtime <= tree.since
        )
        return (
            names
            if snapshot.fingerprint_of_folder(run.code, names) == table.get("content")
            else None
        )


def find(word: str, runs: Path) -> Locked:
    """The lock that the user named: a file, or the lock of a run. Raises RunnerError if it cannot be read."""
    path = Path(word).expanduser().resolve()
    path = path if path.is_file() else find_run(word, runs).folder / LOCK
    tables = lock.load(path)
    if "files" not in tables:
        raise RunnerError(
            f"cannot launch the run of {path} again",
            "an earlier version of runner wrote the file, without the table [files]",
            "launch with the command line that `runner history` prints",
        )
    return Locked(path, tables)


def is_whole(locked: Locked) -> bool:
    """Whether the run folder still has every byte of the launch."""
    return not locked.changed_files and locked.code is not None


def changed_script(locked: Locked) -> tuple[str, bool]:
    """(the path of the user's batch script if it has changed since, else empty; whether the run has a copy)."""
    path = str(locked.tables["job"].get("batch", ""))
    changed = (
        path if path and _sha256(Path(path)) != locked.tables["run"].get("script_sha256") else ""
    )
    return changed, (locked.folder / "script" / Path(path).name).is_file()


def losses(locked: Locked) -> tuple[str, ...]:
    """The parts that cannot be restored, one line each."""
    words = (
        *locked.tables.get("job", {}).get("command", ()),
        *locked.tables.get("job", {}).get("arguments", ()),
    )
    now = hub.revisions(words, locked.folder, locked.tables.get("job.env", {}))
    return tuple(
        f"{name}: the run used {before}; the cache now has {now.get(name, hub.NOT_HERE)}"
        for name, before in locked.tables.get("revisions", {}).items()
        if before != hub.NOT_HERE and now.get(name) != before
    )


def same_bytes(locked: Locked, runs: Path, report: Report, tags: Sequence[str] = ()) -> Run:
    """Start a new run from the exact files of an earlier one."""
    tables, names, old = locked.tables, locked.code or (), load(locked.folder)
    folder = folders.take_numbered(runs, str(tables["job"]["name"]))
    with ExitStack() as undo:
        undo.callback(folders.remove, folder)
        run = replace(
            old,
            name=folder.name,
            folder=folder,
            created=datetime.now().astimezone().isoformat(),
            state=PREPARING,
            job_ids=(),
            host="",
            process="",
            slurm=scheduler_of(old.scheduler).version(),
            tags=tuple(tags),
            sweep="",
            parameters=old.parameters if tables["job"].get("batch") else {},
            after=(),
        )
        save(run)
        folders.copy(tables["files"], locked.folder, folder)
        folders.make(run.code)
        folders.copy(names, locked.folder / "code", run.code)
        if (locked.folder / DIFF).is_file():
            folders.copy((DIFF,), locked.folder, folder)
        mine = {**tables["run"], "name": run.name, "created": run.created, "again": locked.name}
        write_record(folder / LOCK, lock.lock_text({**tables, "run": mine}))
        undo.pop_all()
    return submit.start(run, Dependencies(), int(tables["job"].get("chain", 0)), report)


def differences(locked: Locked, run: Run) -> tuple[str, ...]:
    """The parts of a new run that differ from the lock, one line each."""
    now = lock.read((run.folder / LOCK).read_text())
    names = {**locked.tables["files"], **now["files"]}
    found = [name for name in names if locked.tables["files"].get(name) != now["files"].get(name)]
    same = locked.tables.get("code", {}).get("content") == now.get("code", {}).get("content")
    return (*found, *(() if same else ("code/",)))


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


Table = Mapping[str, Any]


def code_from_git(code: Table, root: Path, target: Path, diff: Path | None) -> tuple[str, ...]:
    """Check out the lock's commit into `target`, and apply the saved diff. Returns what cannot be restored.

    Raises RunnerError if the commit is not in the repository of `root`.
    """
    commit = code.get("commit", "")
    index = {"GIT_INDEX_FILE": str(target.parent / ".restored-index")}
    below = process.run(command(root, "rev-parse", "--show-prefix"), check=False).stdout.strip()
    tree = f"{commit}:{below.rstrip('/')}" if below else commit
    read = process.run(command(root, "read-tree", tree), env=index, check=False) if commit else None
    if read is None or read.exit_code != 0:
        why = f"its code snapshot no longer exists, and {root} has no commit {commit[:12]}"
        fix = "run git fetch, or run `runner rerun` in a clone that has the commit"
        if not commit:
            why = "its code snapshot no longer exists, and the code was not in a git repository"
            fix = "launch again with the command line that `runner history` prints"
        raise RunnerError("cannot restore the code of that run", why, fix)
    process.run(command(root, "checkout-index", "--all", f"--prefix={target}/"), env=index)
    folders.discard(Path(index["GIT_INDEX_FILE"]))
    lost = [f"the file {name}: it was never committed" for name in code.get("untracked", ())]
    changed: Sequence[str] = code.get("modified", ())
    if changed and diff is not None and diff.is_file():
        alone = {
            "GIT_CEILING_DIRECTORIES": str(target.parent)
        }  # ignore a git repository that contains `target`
        process.run(("git", "-C", str(target), "apply", "--binary", str(diff)), env=alone)
    else:
        lost += [
            f"the changes to {name}: they were not committed, and {DIFF} is gone"
            for name in changed
        ]
    return tuple(lost)


def need_image(
    locked: Locked, project: Project, environ: Mapping[str, str], report: Report, *, dry_run: bool
) -> None:
    """Recreate the squashfs file if it is missing: from its recipe, or else from the source of the import.

    Raises RunnerError if the result is a different image, or if Sarus Suite's store lacks the image.
    """
    table, recipe = locked.tables.get("image", {}), locked.tables.get("recipe", {})
    if table.get("store_id"):
        _need_stored(table, recipe, report)
        return
    path = Path(str(table.get("reference", "")))
    name, source = recipe.get("name", ""), table.get("source", "")
    if not path.is_absolute() or path.exists():
        return
    if dry_run:
        report.say(f"would rebuild image {path.name} from {table.get('source')}")
        return
    options = ImportOptions(architecture=table.get("architecture") or None)
    report.say(
        f"the image {path.name} no longer exists; rebuilding it from {f'the recipe {name}' if name else source}"
    )
    if name:
        platform = f"linux/{table['architecture']}" if table.get("architecture") else None
        build(load_recipe(name, project), BuildOptions(platform=platform), environ, report)
        source = name
    digest = table.get("digest", "")
    # the tag of a registry reference may have moved
    pinned = (
        f"{source}@{digest}"
        if source.startswith("docker://") and digest and "@" not in source
        else source
    )
    made = import_image(
        ImportRequest(pinned, path.parent, project, environ, options), report
    ).squashfs
    if made.path != path:
        raise RunnerError(
            f"cannot restore the image {path.name}",
            f"importing {source} now produces another image, {made.path.name}"
            + (
                f"; the run used the recipe {recipe.get('content')}, at {recipe.get('revision', '?')}"
                if name
                else ""
            ),
            "check out that version of the recipe and try again, or launch again with the current image",
        )


def _need_stored(table: Mapping[str, Any], recipe: Mapping[str, Any], report: Report) -> None:
    """Raise RunnerError if Sarus Suite's store lacks the image of a lock. Another image of that name is a warning."""
    reference = str(table["reference"])
    row = sarus_store.find(reference, sarus_store.list_images())
    if row is None:
        source = str(table.get("source", ""))
        command = (
            f"runner build {recipe['name']} --import"
            if recipe.get("name")
            else f"runner import {source}"
        )
        revision = f"   (the recipe was at {recipe['revision']})" if recipe.get("revision") else ""
        why = "sarusctl images does not list it"
        raise RunnerError(
            f"the image {reference} is not in Sarus Suite's store", why, f"{command}{revision}"
        )
    if row.id != table["store_id"]:
        report.warn(f"{reference} in the store is {row.id}, and the run used {table['store_id']}")
