"""Read a run's metrics: its curves, its progress and its speed. runs/progress.py finds where they are."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from runner.errors import RunnerError, unknown
from runner.project import page

# axis -> the key in metrics.jsonl
AXES = {"step": "step", "tokens": "total_tokens", "hours": "time"}
_NO_METRICS = frozenset({"step", "total_steps", "attempt", "time"})


class Part(NamedTuple):
    """A part of the metrics."""

    path: Path | None = None
    """a file with a JSON object in each line; None: there is none"""
    size_bytes: int | None = None
    """how much of the file counts; None: all"""
    entries: tuple[Mapping[str, Any], ...] = ()
    """the entries after those of the file"""


@dataclass(frozen=True)
class Metrics:
    """The metrics of a run."""

    source: str
    """where they come from, for messages: `…/metrics.jsonl`, or `the log`"""
    parts: tuple[Part, ...]
    """in the order of the entries"""

    @classmethod
    def of_file(cls, path: Path) -> Metrics:
        """Those of a file such as metrics.jsonl, which need not exist."""
        return cls(str(path), (Part(path),))

    @property
    def name(self) -> str:
        return self.source.rpartition("/")[2]

    @property
    def error(self) -> str:
        """Why a file cannot be read, in the system's words; empty if all can."""
        for part in self.parts:
            try:
                if part.path is not None:
                    part.path.open("rb").close()
            except OSError as error:
                return error.strerror or str(error)
        return ""


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
    source: Metrics,
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
    for entry in records(source, damaged):
        step = entry.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            continue
        known.update(name for name, value in entry.items() if _number(value) is not None)
        begun = _finite(entry.get("time")) if begun is None else begun
        place = _finite(entry.get(AXES[axis]))
        if axis == "hours" and place is not None and begun is not None:
            place = (place - begun) / 3600
        for metric, rows in points.items():
            value = _number(entry.get(metric))
            if value is not None and place is not None:
                # if an attempt repeats a step, the earlier points of this and later steps are removed
                while rows and rows[-1][0] >= step:
                    rows.pop()
                rows.append((step, place, value, int(_finite(entry.get("attempt")) or 1)))
    if damaged is not None:
        points = {metric: rows for metric, rows in points.items() if rows}
    elif not known:
        raise RunnerError(
            f"{run} has no metrics",
            f"{source.source} contains no training step",
            f"if it has just started, wait for its first step; if `runner logs {run}` shows steps, "
            f"describe your trainer: {page('trainers')}",
        )
    for metric, rows in points.items():
        if not rows:
            raise unknown(
                f"metric in {run}:", metric, known - _NO_METRICS, "use one of these names"
            )
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


def _finite(value: object) -> float | None:
    number = _number(value)
    return number if number is not None and math.isfinite(number) else None


_TAIL_BYTES = 1 << 16
_ENTRY_BYTES = 150  # of a usual entry
_PACE_ENTRIES = 50  # the number of log entries from which the speed is estimated
_LATEST_END = 4_102_444_800  # the year 2100; datetime cannot represent every number of seconds

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


def read_progress(metrics: Metrics) -> Progress | None:
    """The progress of a run; None if there is none yet."""
    entries = [
        entry
        for entry in newest_records(metrics, _TAIL_BYTES)
        if _finite(entry.get("step")) is not None and "loss" in entry
    ]
    if not entries:
        return None
    last = entries[-1]
    step, total = int(last["step"]), _finite(last.get("total_steps"))
    return Progress(
        step,
        int(total) if total else None,
        _newest(entries, "loss", _number),
        _newest(entries, "tokens_per_second", _finite),
        _end(entries, total),
    )


def _newest(
    entries: Sequence[Mapping[str, Any]], name: str, number: Callable[[object], float | None]
) -> float | None:
    """The newest value. An entry that was read from a log may have a step and no loss."""
    return next(
        (value for entry in reversed(entries) if (value := number(entry.get(name))) is not None),
        None,
    )


def _end(entries: Sequence[Mapping[str, Any]], total: float | None) -> float | None:
    """The estimated time of the last step. The speed is measured within one attempt: waiting is not training."""
    last = entries[-1]
    mine = [
        entry for entry in entries[-_PACE_ENTRIES:] if entry.get("attempt") == last.get("attempt")
    ]
    begun, now = _finite(mine[0].get("time")), _finite(last.get("time"))
    steps = last["step"] - mine[0]["step"]
    if total is None or begun is None or now is None or steps <= 0 or now < begun:
        return None
    end = float(now + max(total - last["step"], 0) * (now - begun) / steps)
    return end if 0 <= end < _LATEST_END else None


def newest_records(metrics: Metrics, size_bytes: int) -> list[dict[str, Any]]:
    """The entries in the last `size_bytes` of the metrics. Incomplete lines at either end are skipped."""
    found: list[list[dict[str, Any]]] = []
    for part in reversed(metrics.parts):
        if size_bytes <= 0:
            break
        newest = [dict(entry) for entry in part.entries]
        size_bytes -= _ENTRY_BYTES * len(newest)
        tail = _tail(part, size_bytes)
        size_bytes -= len(tail)
        found.append([*_parsed(tail.split(b"\n")), *newest])
    return [entry for entries in reversed(found) for entry in entries]


def _tail(part: Part, size_bytes: int) -> bytes:
    """The last bytes of the file of a part, at most so many."""
    try:
        if part.path is None or size_bytes <= 0:
            return b""
        with part.path.open("rb") as file:
            end = file.seek(0, 2)
            if part.size_bytes is not None:
                end = min(end, part.size_bytes)
            begin = file.seek(max(end - size_bytes, 0))
            return file.read(end - begin)
    except OSError:
        return b""


def _parsed(lines: Iterable[bytes], damaged: list[bytes] | None = None) -> Iterator[dict[str, Any]]:
    for line in lines:
        with suppress(ValueError, RecursionError):
            if isinstance(entry := json.loads(line), dict):
                yield entry
                continue
        if damaged is not None and line.strip():
            damaged.append(line)


def records(metrics: Metrics, damaged: list[bytes] | None = None) -> Iterator[Mapping[str, Any]]:
    """All entries, oldest first, one at a time, because the file of a long run can be large. `damaged`: other lines."""
    for part in metrics.parts:
        with suppress(OSError):
            if part.path is not None:
                with part.path.open("rb") as file:
                    yield from _parsed(_lines_until(file, part.size_bytes), damaged)
        yield from part.entries


def _lines_until(file: BinaryIO, size_bytes: int | None) -> Iterator[bytes]:
    for line in file:
        if size_bytes is not None:
            size_bytes -= len(line)
            if size_bytes < 0:
                break
        yield line


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


def pace(metrics: Metrics, now: float | None = None, *, running: bool = True) -> Pace | None:
    """The speed of a run; None if it is not known yet."""
    records = newest_records(metrics, _PACE_TAIL_BYTES)
    steps = [
        each
        for each in records
        if isinstance(each.get("step"), int) and _finite(each.get("time")) is not None
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
        note = f"no step for {since:.0f} s; before, one was logged every {usual:.1f} s"
        return Pace(note, stuck=True)
    return Pace(_slower(steps))


def _slower(steps: Sequence[Mapping[str, Any]]) -> str:
    """A warning if the newest records are slower than the fastest earlier window of the same length; else empty."""
    import statistics

    name, unit = next(
        ((name, unit) for name, unit in _RATES if any(_finite(each.get(name)) for each in steps)),
        ("", ""),
    )
    rates = [rate for each in steps if (rate := _finite(each.get(name)) or 0) > 0]
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
