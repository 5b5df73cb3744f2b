"""What a run's metrics say: whether it moves, and whether it moves as fast as it did."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from runner.runs.state.metrics_file import newest

_TAIL_BYTES = 4 << 20
_WINDOW = 20  # records that are compared
_SLOWER = 0.7  # of the speed that it had
_STUCK_SECONDS = 300.0


@dataclass(frozen=True)
class Pace:
    """What the metrics of a run tell."""

    step: int
    note: str = ""
    """what is wrong with the pace, or nothing"""
    stuck: bool = False


def pace(path: Path, now: float | None = None, *, running: bool = True) -> Pace | None:
    """The pace that metrics.jsonl tells; None where there is none yet."""
    records = newest(path, _TAIL_BYTES)
    steps = [
        each for each in records if isinstance(each.get("step"), int) and isinstance(each.get("time"), int | float)
    ]
    if not steps:
        return None
    last = steps[-1]
    since = max((time.time() if now is None else now) - float(last["time"]), 0.0)
    usual = _usual_pause(steps)
    if running and since > max(_STUCK_SECONDS, 10 * usual):
        note = f"no step since {since:.0f} s; a step's record came every {usual:.1f} s before"
        return Pace(int(last["step"]), note, stuck=True)
    return Pace(int(last["step"]), _slower(steps))


def _usual_pause(steps: Sequence[Mapping[str, Any]]) -> float:
    times = [float(each["time"]) for each in steps[-200:]]
    pauses = [after - before for before, after in pairwise(times) if after > before]
    return statistics.median(pauses) if pauses else 0.0


def _slower(steps: Sequence[Mapping[str, Any]]) -> str:
    """What to say when the newest records are slower than the best stretch of as many before."""
    rates = [(int(each["step"]), float(rate)) for each in steps
             if isinstance(rate := each.get("tokens_per_second"), int | float) and rate > 0]  # fmt: skip
    if len(rates) < 3 * _WINDOW:
        return ""
    now = statistics.median(rate for _, rate in rates[-_WINDOW:])
    blocks = [rates[at : at + _WINDOW] for at in range(0, len(rates) - _WINDOW, _WINDOW)]
    best = max(statistics.median(rate for _, rate in block) for block in blocks)
    if now >= _SLOWER * best:
        return ""
    return f"{now:,.0f} tokens/s now, {best:,.0f} in its best stretch: {now / best:.0%}"
