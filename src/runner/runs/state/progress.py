"""How far a run has come, from the end of its metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from runner.runs.state.metrics_file import newest

_TAIL_BYTES = 1 << 16
_PACE_ENTRIES = 50  # log steps that the estimate looks back on

NAMES = ("step", "total_steps", "loss", "tokens_per_second", "estimated_end")


@dataclass(frozen=True)
class Progress:
    """The newest entry of a run's metrics."""

    step: int
    total_steps: int | None = None
    """None where the job does not tell"""
    loss: float | None = None
    tokens_per_second: float | None = None
    end: float | None = None
    """when the last step will be done at the pace of the newest steps, Unix seconds; None where that is not known"""

    @property
    def steps_text(self) -> str:
        """`30/60`, or `30` where the job does not tell how many there will be."""
        return f"{self.step}/{self.total_steps}" if self.total_steps else str(self.step)

    def record(self, *, running: bool) -> dict[str, object]:
        """What --json prints; a loss that is no number stands as text, which JSON can hold."""
        loss = self.loss if self.loss is None or math.isfinite(self.loss) else str(self.loss)
        end = datetime.fromtimestamp(self.end).astimezone().isoformat("T", "seconds") if running and self.end else None
        return dict(zip(NAMES, (self.step, self.total_steps, loss, self.tokens_per_second, end), strict=True))


def read(metrics: Path) -> Progress | None:
    """The progress that a metrics.jsonl tells; None where there is none yet."""
    entries = [
        entry for entry in newest(metrics, _TAIL_BYTES) if _number(entry, "step") is not None and "loss" in entry
    ]
    if not entries:
        return None
    last = entries[-1]
    step, total = int(last["step"]), _number(last, "total_steps")
    return Progress(
        step,
        int(total) if total else None,
        _number(last, "loss"),
        _number(last, "tokens_per_second"),
        _end(entries, total),
    )


def _end(entries: Sequence[Mapping[str, Any]], total: float | None) -> float | None:
    """When the last step will be done; a pace is taken within one attempt only, since waiting is no training."""
    last = entries[-1]
    mine = [entry for entry in entries[-_PACE_ENTRIES:] if entry.get("attempt") == last.get("attempt")]
    begun, now = _number(mine[0], "time"), _number(last, "time")
    steps = last["step"] - mine[0]["step"]
    if total is None or begun is None or now is None or steps <= 0 or now < begun:
        return None
    return float(now + max(total - last["step"], 0) * (now - begun) / steps)


def _number(entry: Mapping[str, Any], name: str) -> float | None:
    value: object = entry.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
