"""`runner rerun`: repeat a launch from its run folder and its lock."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from runner.errors import RunnerError
from runner.images import sarus_store
from runner.machine import folders
from runner.machine.report import Report
from runner.runs import diff, hub, lock, snapshot, submit
from runner.runs.run import PREPARING, Dependencies, Run, find_run, load, save, unix_time
from runner.runs.schedulers.scheduler import scheduler_of
from runner.runs.secrets import HIDDEN, write_record
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
        if not table.get("files"):
            return ()
        code = self.folder / "code"
        launched = unix_time(str(self.tables.get("run", {}).get("created", "")))
        tree = diff.tree_of_run(self.name, code, int(table["files"]), launched)
        if tree is None or not tree.files:
            return None
        names = tuple(
            name for name, path in tree.files.items() if path.lstat().st_mtime <= tree.since
        )
        return (
            names if snapshot.fingerprint_of_folder(code, names) == table.get("content") else None
        )


def find(word: str, runs: Path) -> Locked:
    """The lock that the user named: a file, or the lock of a run. Raises RunnerError if it cannot be read."""
    path = Path(word).expanduser().resolve()
    path = path if path.is_file() else find_run(word, runs).folder / LOCK
    tables = lock.load(path)
    original = runs / str(tables.get("run", {}).get("name", "")) / LOCK
    if original.is_file() and original.read_bytes() == path.read_bytes():
        path = original  # the user has kept a copy of the lock in another folder
    if "files" not in tables:
        raise RunnerError(
            f"cannot launch the run of {path} again",
            "the file has no table [files]: it is not a lock, or an earlier version of runner wrote it",
            "run `runner` with the arguments listed under `command_line` in the run folder's run.json",
        )
    return Locked(path, tables)


def refuse_incomplete(locked: Locked) -> None:
    """Raise RunnerError if the run folder no longer has every byte of the launch."""
    missing = (*locked.changed_files, *(() if locked.code is not None else ("code/",)))
    if not missing:
        return
    shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if missing[5:] else "")
    words = [str(word) for word in locked.tables["run"]["command_line"]]
    lines = [shlex.join(("runner", *words))]
    if commit := locked.tables.get("code", {}).get("commit"):
        why = "the code of that launch, without uncommitted changes"
        lines.insert(0, f"git checkout {commit}   # {why}")
    if any(HIDDEN in word for word in words):
        lines.append(f'# replace "{HIDDEN}" with the secret: lock.toml stores none')
    if locked.tables.get("sweep"):
        lines.append("# this command launches all runs of the sweep")
    raise RunnerError(
        f"{locked.name} cannot be rerun",
        f"missing or changed in {locked.folder}: {shown}",
        "launch it again:\n" + "\n".join(lines),
    )


def changed_script(locked: Locked) -> tuple[str, bool]:
    """(the path of the user's batch script if it has changed or is gone, else empty; whether the run has a copy).

    Raises RunnerError if there is neither the script nor a copy.
    """
    path = str(locked.tables["job"].get("batch", ""))
    has_copy = (locked.folder / "script" / Path(path).name).is_file()
    sha256 = _sha256(Path(path)) if path else ""
    if path and not sha256 and not has_copy:
        raise RunnerError(
            f"{locked.name} cannot be rerun",
            f"{path} no longer exists or cannot be read, and the run folder has no copy",
            "put the script back",
        )
    changed = bool(path) and sha256 != locked.tables["run"].get("script_sha256")
    return path if changed else "", has_copy


def losses(locked: Locked) -> tuple[str, ...]:
    """The parts that cannot be restored, one line each."""
    words = (
        *locked.tables.get("job", {}).get("command", ()),
        *locked.tables.get("job", {}).get("arguments", ()),
    )
    now = hub.revisions(words, locked.folder, locked.tables.get("job.env", {}))
    return tuple(
        f"{name}: the run used {before}, "
        + (
            f"the cache now has {now[name]}"
            if now.get(name, hub.NOT_HERE) != hub.NOT_HERE
            else "which the cache lacks"
        )
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


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


Table = Mapping[str, Any]


def need_image(locked: Locked, report: Report) -> None:
    """Raise RunnerError if the run's image is gone; it says how to get it back."""
    table, recipe = locked.tables.get("image", {}), locked.tables.get("recipe", {})
    reference, source = str(table.get("reference", "")), str(table.get("source", ""))
    digest = str(table.get("manifest") or "")
    if source.startswith("docker://") and digest and "@" not in source:
        source = f"{source}@{digest}"  # the tag may have moved
    command = f"runner import {shlex.quote(source)}"
    if not source:
        command = "put the file back, or launch again with another image"
    if recipe.get("name"):
        command = f"runner import {recipe['name']}"
        command += "   # if podman or docker no longer has the image: build it, and launch again"
    if recipe.get("revision"):
        command += f"; the recipe was at {recipe['revision']}"
    if not table.get("store_id"):
        if Path(reference).is_absolute() and not Path(reference).exists():
            what = f"{locked.name} needs the squashfs file {reference}"
            raise RunnerError(what, "it no longer exists", command)
        return
    row = sarus_store.find(reference, sarus_store.list_images())
    if row is None:
        why = "sarusctl images does not list it"
        raise RunnerError(f"the image {reference} is not in Sarus Suite's store", why, command)
    if row.id != table["store_id"]:
        report.warn(f"{reference} in the store is {row.id}, and the run used {table['store_id']}")
