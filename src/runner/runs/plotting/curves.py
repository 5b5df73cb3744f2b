"""A run's metrics over its steps, as curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from runner.errors import RunnerError, unknown
from runner.runs.state.metrics_file import records

# what the axis shows, and the key of metrics.jsonl that it is made of
AXES = {"step": "step", "tokens": "total_tokens", "hours": "time"}
_NO_METRICS = frozenset({"step", "total_steps", "attempt", "time"})


@dataclass(frozen=True)
class Curve:
    """One metric of one run."""

    run: str
    metric: str
    points: tuple[tuple[float, float], ...]
    """place on the axis and value, left to right; values that are no finite number are left out"""
    steps: tuple[int, ...] = ()
    """the step of each point"""
    left_out: int = 0
    """how many values were no finite number"""
    attempts: tuple[tuple[int, float], ...] = ()
    """each later attempt, and where its first point lies"""


@dataclass
class _Points:
    """A curve in the making."""

    rows: list[tuple[int, float, float, int]] = field(default_factory=list)
    """step, place, value, attempt"""

    def add(self, step: int, place: float, value: float, attempt: int) -> None:
        """A later attempt that begins again at a step makes what was written of it and of later steps void."""
        while self.rows and self.rows[-1][0] >= step:
            self.rows.pop()
        self.rows.append((step, place, value, attempt))


def read_curves(run: str, path: Path, metrics: Sequence[str], axis: str = "step") -> tuple[Curve, ...]:
    """One curve for each metric, in their order. Raises RunnerError for one that the run does not have."""
    points = {metric: _Points() for metric in metrics}
    known: set[str] = set()
    begun: float | None = None
    for entry in records(path):
        step = entry.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            continue
        known.update(name for name, value in entry.items() if _number(value) is not None)
        begun = _number(entry.get("time")) if begun is None else begun
        place = _place(entry, axis, begun)
        for metric, found in points.items():
            value = _number(entry.get(metric))
            if value is not None and place is not None:
                found.add(step, place, value, int(_number(entry.get("attempt")) or 1))
    if not known:
        raise RunnerError(f"{run} has no metrics yet", f"{path} holds no step", "wait for its first log step")
    for metric, found in points.items():
        if not found.rows:
            raise unknown(f"metric of {run}", metric, known - _NO_METRICS, "name one of them")
    return tuple(_curve(run, metric, found.rows) for metric, found in points.items())


def _place(entry: Mapping[str, Any], axis: str, begun: float | None) -> float | None:
    value = _number(entry.get(AXES[axis]))
    if axis != "hours" or value is None or begun is None:
        return value
    return (value - begun) / 3600


def _curve(run: str, metric: str, rows: Sequence[tuple[int, float, float, int]]) -> Curve:
    whole = [row for row in rows if math.isfinite(row[2])]
    starts = [(after[3], after[1]) for before, after in pairwise(rows) if after[3] > before[3]]
    return Curve(
        run,
        metric,
        tuple((place, value) for _, place, value, _ in whole),
        tuple(step for step, _, _, _ in whole),
        len(rows) - len(whole),
        tuple(starts),
    )


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
