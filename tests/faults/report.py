"""The outcomes as the table of docs/reliability.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.faults.faults import FAULTS

HEAD = ("fault", "what happens", "completed / runs", "checkpoints lost",
        "steps repeated, maximum", "nodes still held", "median seconds",
        "remarks")  # fmt: skip


def table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where and when, and a line for each fault that was run."""
    names = [name for name in FAULTS if any(each["fault"] == name for each in found)]
    rows = [row(name, [each for each in found if each["fault"] == name]) for name in names]
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEAD, ("---",) * len(HEAD), *rows)]
    places = sorted({f"{each['machine']}; {each['date']}" for each in found})
    return [*places, "", *lines]


def row(name: str, runs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    completed = sum(bool(each["completed"]) for each in runs)
    hand = sum(bool(each["by_hand"]) for each in runs)
    otherwise = sorted({" ".join(each["causes"]) for each in runs if not each["as_expected"]})
    remarks = (
        f"{hand} of {len(runs)} resumed by hand" if hand else "",
        f"unexpected causes: {', '.join(cause or 'none' for cause in otherwise)}" if otherwise else "",
    )
    seconds = sorted(float(each["seconds"]) for each in runs)
    return (
        name.replace("_", " "),
        FAULTS[name].description,
        f"{completed} / {len(runs)}",
        str(sum(each["checkpoints_lost"] for each in runs) or "none"),
        str(max(each["steps_repeated"] for each in runs)),
        str(sum(each["nodes_held"] for each in runs) or "none"),
        f"{seconds[len(seconds) // 2]:.0f}",
        "; ".join(filter(None, remarks)),
    )
