"""A run's metrics.jsonl, as `training/records.py` of the jobs writes it: a line of JSON per logged step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def newest(path: Path, size_bytes: int) -> list[dict[str, Any]]:
    """The entries in the last `size_bytes` of the file; a line that is cut at either end is passed over."""
    try:
        with path.open("rb") as file:
            file.seek(max(file.seek(0, 2) - size_bytes, 0))
            lines = file.read(size_bytes).split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found


def records(path: Path) -> Iterator[dict[str, Any]]:
    """All entries, oldest first, one at a time: a long run's file is never in memory as a whole."""
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue
                if isinstance(entry, dict):
                    yield entry
    except OSError:
        return
