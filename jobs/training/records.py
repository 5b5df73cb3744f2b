"""metrics.jsonl: one JSON object per line, for all attempts of a run; and other files of lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def append(path: Path, entry: dict[str, Any]) -> None:
    """Add one line in one write, so that a reader never sees half of it."""
    append_line(path, json.dumps(entry))


def append_line(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield all records in the order of the file; a line cut by a full disk or a killed job is skipped."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            yield entry


def read(path: Path) -> list[dict[str, Any]]:
    """Return the training entries in the order of their steps.

    When a later attempt repeats a step, earlier entries of that and later steps no longer count.
    """
    entries: list[dict[str, Any]] = []
    for entry in lines(path):
        if "loss" in entry and isinstance(entry.get("step"), int):
            while entries and entries[-1]["step"] >= entry["step"]:
                entries.pop()
            entries.append(entry)
    return entries


def headers(path: Path) -> list[dict[str, Any]]:
    """Return the header of each attempt."""
    return [entry["header"] for entry in lines(path) if isinstance(entry.get("header"), dict)]


def summarise(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return steps, first_loss, last_loss, tokens_per_second, MFU and seconds of training, over all attempts."""
    if not entries:
        nothing = dict.fromkeys(("first_loss", "last_loss", "tokens_per_second"))
        return {"steps": 0, **nothing, "seconds": 0.0, "tokens": 0}
    seconds = sum(entry["tokens"] / entry["tokens_per_second"] for entry in entries if entry["tokens_per_second"])
    tokens = sum(entry["tokens"] for entry in entries)
    found = {
        "steps": entries[-1]["step"],
        "first_loss": entries[0]["loss"],
        "last_loss": entries[-1]["loss"],
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1) if seconds else None,
        "seconds": round(seconds, 3),
        "attempts": max(entry["attempt"] for entry in entries),
    }
    # by time, as tokens_per_second: of two entries with as many tokens, the slower one counts for longer
    measured = [entry for entry in entries if entry.get("mfu") is not None and entry["tokens_per_second"]]
    if measured:
        times = [entry["tokens"] / entry["tokens_per_second"] for entry in measured]
        done = sum(entry["mfu"] * time for entry, time in zip(measured, times, strict=True))
        found["mfu"] = round(done / sum(times), 4) if sum(times) else None
    return found
