"""What killed imports left: recognised by the lock that nobody holds any more, and removed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from runner.errors import RunnerError
from runner.images.oci.store import Store
from runner.machine import files
from runner.machine.report import Report

LABEL = "runner.import.target"
_PARTIAL = re.compile(r"\.(?P<target>.+)\.(?P<pid>\d+)\.partial")
_ENDS = (".sqsh", ".json", ".layers")


def clear_leftovers(folder: Path, report: Report, held: Path | None = None) -> None:
    """Remove unfinished files in an image folder whose makers are gone.

    Only what carries our mark is looked at. The caller may hold the lock of `held`; a left-over of another target
    counts as such when that one's lock is free.
    """
    own = (held.name,) if held else ()
    for path in sorted(folder.glob(".*.partial")):
        found = _PARTIAL.fullmatch(path.name)
        if found and found["target"].endswith((*_ENDS, *own)):
            owner = folder / found["target"]
            if is_stale(owner.with_suffix(".sqsh") if owner.suffix in _ENDS else owner, held):
                report.say(f"removing {path.name}, left by an import that was killed")
                path.unlink(missing_ok=True)


def clear_containers(target: Path, store: Store, report: Report) -> None:
    """Remove containers of imports whose makers are gone; only imports by an engine's export make any."""
    name, _ = container_of(target)
    store.remove(name)
    try:
        containers = store.containers(LABEL)
    except RunnerError:
        report.detail("another import is at work: what others may have left is not looked for")
        return
    for container in containers:
        if is_stale(Path(container.labels.get(LABEL, "")), target):
            report.say(f"removing container {container.id[:12]}, left by an import that was killed")
            store.remove(container.id)


def container_of(target: Path) -> tuple[str, Mapping[str, str]]:
    """Name and labels of the container that an import to `target` makes; the lock of `target` makes it ours alone."""
    return f"runner-import-{hashlib.sha256(str(target).encode()).hexdigest()[:12]}", {LABEL: str(target)}


def is_stale(owner: Path, held: Path | None) -> bool:
    """Whether the import that works on `owner` is gone: its lock is ours, free, or lies in a folder that is gone."""
    if owner == held:
        return True
    if not owner.name or not owner.parent.is_dir():
        return bool(owner.name)
    try:
        with files.locked(owner, timeout_seconds=0):
            return True
    except (RunnerError, OSError):
        return False
