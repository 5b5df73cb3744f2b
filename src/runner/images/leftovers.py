"""What killed imports left: recognised by the lock that nobody holds any more, and removed."""

from __future__ import annotations

import re
from pathlib import Path

from runner.errors import RunnerError
from runner.machine import files
from runner.machine.report import Report

_PARTIAL = re.compile(r"\.(?P<target>.+)\.(?P<pid>\d+)\.partial")
_ENDS = (".sqsh", ".json", ".layers")


def clear_leftovers(target: Path, report: Report) -> None:
    """Remove unfinished files beside `target` whose makers are gone.

    Only what carries our mark is looked at. The caller holds the lock of `target`; a left-over of another target
    counts as such when that one's lock is free.
    """
    for path in sorted(target.parent.glob(".*.partial")):
        found = _PARTIAL.fullmatch(path.name)
        if found and found["target"].endswith((*_ENDS, target.name)):
            owner = target.parent / found["target"]
            if is_stale(owner.with_suffix(".sqsh") if owner.suffix in _ENDS else owner, target):
                report.say(f"removing {path.name}, left by an import that was killed")
                path.unlink(missing_ok=True)


def is_stale(owner: Path, held: Path) -> bool:
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
