"""The outcomes as the table of docs/reliability.md."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.faults.faults import FAULTS

HEAD = ("fault", "what happens", "completed / runs", "checkpoints lost",
        "steps repeated, maximum", "nodes still held", "detection, s", "to first step, s", "rungs", "same job",
        "given back although healthy", "account differs", "whole run, s", "remarks")  # fmt: skip


def table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where and when, and a line for each fault that was run."""
    names = [name for name in FAULTS if any(each["fault"] == name for each in found)]
    rows = [row(name, [each for each in found if each["fault"] == name]) for name in names]
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEAD, ("---",) * len(HEAD), *rows)]
    places = Counter(f"{each['machine']}; commit {each['commit']}; {each['date']}" for each in found)
    return [*(f"{place}; {count} runs" for place, count in sorted(places.items())), "", *lines]


def median(values: Iterable[float | None], digits: int = 1) -> str:
    """The median of the known values, as text; empty if there is none."""
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.{digits}f}" if known else ""


def row(name: str, runs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    completed = sum(bool(each["completed"]) for each in runs)
    hand = sum(bool(each["by_hand"]) for each in runs)
    otherwise = sorted({" ".join(each["causes"]) for each in runs if not each["as_expected"]})
    explained = sum(bool(each["stopped"]) and not each["completed"] for each in runs)
    rungs = Counter(rung for each in runs for rung in each["rungs"] if rung != "-")
    remarks = (
        f"{hand} of {len(runs)} resumed by hand" if hand else "",
        f"{explained} of {len(runs)} ended with an explanation" if explained else "",
        f"unexpected causes: {', '.join(cause or 'none' for cause in otherwise)}" if otherwise else "",
    )
    return (
        name.replace("_", " "),
        FAULTS[name].description,
        f"{completed} / {len(runs)}",
        str(sum(each["checkpoints_lost"] for each in runs) or "none"),
        str(max(each["steps_repeated"] for each in runs)),
        str(sum(each["nodes_held"] for each in runs) or "none"),
        median(each["detection"] for each in runs),
        median(each["to_first_step"] for each in runs),
        ", ".join(f"{rung.replace('_', ' ')} {count}" for rung, count in sorted(rungs.items())),
        f"{sum(bool(each['same_job']) for each in runs)} / {len(runs)}",
        str(sum(each["given_back"] for each in runs) or "never"),
        (str(sum(bool(each["misplaced"]) for each in runs) or "never") if FAULTS[name].account else "not compared"),
        median((each["seconds"] for each in runs), digits=0),
        "; ".join(filter(None, remarks)),
    )
