"""Read a run's metrics.jsonl: its curves, its progress and its speed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from runner.errors import RunnerError, unknown

# axis -> the key in metrics.jsonl
AXES = {"step": "step", "tokens": "total_tokens", "hours": "time"}
_NO_METRICS = frozenset({"step", "total_steps", "attempt", "time"})


@dataclass(frozen=True)
class Curve:
    """One metric of one run."""

    run: str
    metric: str
    points: tuple[tuple[float, float], ...]
    """(position on the axis, value), left to right; values that are not finite are left out"""
    steps: tuple[int, ...] = ()
    """the step of each point"""
    left_out: int = 0
    """the number of values that were not finite"""
    attempts: tuple[tuple[int, float], ...] = ()
    """(number, position of its first point) of each attempt except the first"""


def read_curves(
    run: str,
    path: Path,
    metrics: Sequence[str],
    axis: str = "step",
    damaged: list[bytes] | None = None,
) -> tuple[Curve, ...]:
    """One curve per metric, in the given order. Raises RunnerError for an axis or metric that does not exist.

    `damaged` receives the lines that cannot be read; with it, metrics that the run does not have are left out.
    """
    if axis not in AXES:
        raise unknown("axis", axis, AXES)
    # (step, position, value, attempt) of each point
    points: dict[str, list[tuple[int, float, float, int]]] = {metric: [] for metric in metrics}
    known: set[str] = set()
    begun: float | None = None
    for entry in records(path, damaged):
        step = entry.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            continue
        known.update(name for name, value in entry.items() if _number(value) is not None)
        begun = _number(entry.get("time")) if begun is None else begun
        place = _number(entry.get(AXES[axis]))
        if axis == "hours" and place is not None and begun is not None:
            place = (place - begun) / 3600
        for metric, rows in points.items():
            value = _number(entry.get(metric))
            if value is not None and place is not None:
                # if an attempt repeats a step, the earlier points of this and later steps are removed
                while rows and rows[-1][0] >= step:
                    rows.pop()
                rows.append((step, place, value, int(_number(entry.get("attempt")) or 1)))
    if damaged is not None:
        points = {metric: rows for metric, rows in points.items() if rows}
    elif not known:
        raise RunnerError(
            f"{run} has no metrics yet",
            f"{path} contains no training step",
            "wait until the run logs its first step",
        )
    for metric, rows in points.items():
        if not rows:
            raise unknown(f"metric of {run}", metric, known - _NO_METRICS, "use one of these names")
    return tuple(_curve(run, metric, rows) for metric, rows in points.items())


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
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return (
        value if isinstance(value, float) or abs(value) < 1 << 1000 else None
    )  # others do not fit into a float


_TAIL_BYTES = 1 << 16
_PACE_ENTRIES = 50  # the number of log entries from which the speed is estimated

NAMES = ("step", "total_steps", "loss", "tokens_per_second", "estimated_end")


@dataclass(frozen=True)
class Progress:
    """The newest entry of a run's metrics."""

    step: int
    total_steps: int | None = None
    """None if the job does not report it"""
    loss: float | None = None
    tokens_per_second: float | None = None
    end: float | None = None
    """the estimated time of the last step, Unix seconds, at the speed of the newest steps; None if it is not known"""

    @property
    def steps_text(self) -> str:
        """`30/60`, or `30` if the job does not report the total."""
        return f"{self.step}/{self.total_steps}" if self.total_steps else str(self.step)

    def record(self, *, running: bool) -> dict[str, object]:
        """The data for --json. A NaN or infinite loss is text, because JSON has no such numbers."""
        loss = self.loss if self.loss is None or math.isfinite(self.loss) else str(self.loss)
        end = (
            datetime.fromtimestamp(self.end).astimezone().isoformat("T", "seconds")
            if running and self.end
            else None
        )
        return dict(
            zip(
                NAMES, (self.step, self.total_steps, loss, self.tokens_per_second, end), strict=True
            )
        )


def read_progress(metrics: Path) -> Progress | None:
    """The progress in a metrics.jsonl; None if there is none yet."""
    entries = [
        entry
        for entry in newest_records(metrics, _TAIL_BYTES)
        if _number(entry.get("step")) is not None and "loss" in entry
    ]
    if not entries:
        return None
    last = entries[-1]
    step, total = int(last["step"]), _number(last.get("total_steps"))
    return Progress(
        step,
        int(total) if total else None,
        _newest(entries, "loss"),
        _newest(entries, "tokens_per_second"),
        _end(entries, total),
    )


def _newest(entries: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The newest value. An entry that was read from a log may have a step and no loss."""
    return next(
        (value for entry in reversed(entries) if (value := _number(entry.get(name))) is not None),
        None,
    )


def _end(entries: Sequence[Mapping[str, Any]], total: float | None) -> float | None:
    """The estimated time of the last step. The speed is measured within one attempt: waiting is not training."""
    last = entries[-1]
    mine = [
        entry for entry in entries[-_PACE_ENTRIES:] if entry.get("attempt") == last.get("attempt")
    ]
    begun, now = _number(mine[0].get("time")), _number(last.get("time"))
    steps = last["step"] - mine[0]["step"]
    if total is None or begun is None or now is None or steps <= 0 or now < begun:
        return None
    return float(now + max(total - last["step"], 0) * (now - begun) / steps)


def newest_records(path: Path, size_bytes: int) -> list[dict[str, Any]]:
    """The entries in the last `size_bytes` of the file. Incomplete lines at either end are skipped."""
    try:
        with path.open("rb") as file:
            file.seek(max(file.seek(0, 2) - size_bytes, 0))
            lines = file.read(size_bytes).split(b"\n")
    except OSError:
        return []
    return list(_parsed(lines))


def _parsed(lines: Iterable[bytes], damaged: list[bytes] | None = None) -> Iterator[dict[str, Any]]:
    for line in lines:
        with suppress(ValueError, RecursionError):
            if isinstance(entry := json.loads(line), dict):
                yield entry
                continue
        if damaged is not None and line.strip():
            damaged.append(line)


def records(path: Path, damaged: list[bytes] | None = None) -> Iterator[dict[str, Any]]:
    """All entries, oldest first, one at a time, because the file of a long run can be large. `damaged`: other lines."""
    with suppress(OSError), path.open("rb") as file:
        yield from _parsed(file, damaged)


_PACE_TAIL_BYTES = 4 << 20
_WINDOW = 20  # the number of records to compare
_SLOWER = 0.7  # relative to the earlier speed
_STUCK_SECONDS = 300.0
# a trainer whose log is read may report only one of these
_RATES = (
    ("tokens_per_second", "tokens/s"),
    ("samples_per_second", "samples/s"),
    ("step_seconds", "s"),
)


@dataclass(frozen=True)
class Pace:
    """The speed of a run, from its metrics."""

    note: str = ""
    """what is wrong with the speed; empty if nothing is"""
    stuck: bool = False


def pace(path: Path, now: float | None = None, *, running: bool = True) -> Pace | None:
    """The speed in metrics.jsonl; None if there is none yet."""
    records = newest_records(path, _PACE_TAIL_BYTES)
    steps = [
        each
        for each in records
        if isinstance(each.get("step"), int) and isinstance(each.get("time"), int | float)
    ]
    if not steps:
        return None
    import statistics  # slow to import

    times = [float(each["time"]) for each in steps]
    since = max((time.time() if now is None else now) - times[-1], 0.0)
    usual = statistics.median(
        [after - before for before, after in pairwise(times[-200:]) if after > before] or [0.0]
    )
    if running and since > max(_STUCK_SECONDS, 10 * usual):
        note = f"no step for {since:.0f} s; earlier steps took {usual:.1f} s"
        return Pace(note, stuck=True)
    return Pace(_slower(steps))


def _slower(steps: Sequence[Mapping[str, Any]]) -> str:
    """A warning if the newest records are slower than the fastest earlier window of the same length; else empty."""
    import statistics

    name, unit = next(
        ((name, unit) for name, unit in _RATES if any(_number(each.get(name)) for each in steps)),
        ("", ""),
    )
    rates = [rate for each in steps if (rate := _number(each.get(name)) or 0) > 0]
    if len(rates) < 3 * _WINDOW:
        return ""
    if unit == "s":
        rates = [1 / seconds for seconds in rates]
    now = statistics.median(rates[-_WINDOW:])
    blocks = [rates[at : at + _WINDOW] for at in range(0, len(rates) - _WINDOW, _WINDOW)]
    best = max(statistics.median(block) for block in blocks)
    if now >= _SLOWER * best:
        return ""
    if unit == "s":
        return (
            f"{1 / now:,.3g} s per step now, {now / best:.0%} of the best speed ({1 / best:,.3g} s)"
        )
    return f"{now:,.0f} {unit} now, {now / best:.0%} of the best speed ({best:,.0f})"
