"""A picture of the loss over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

INK, FAINT, LINE, TREND = "#1f2933", "#9aa5b1", "#9cc3e6", "#0b63b0"


def draw(entries: Sequence[dict[str, Any]], path: Path, title: str) -> bool:
    """Write a PNG; False where matplotlib is absent or there is nothing to draw."""
    if not entries:
        return False
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = [entry["step"] for entry in entries]
    losses = [entry["loss"] for entry in entries]
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    many = len(steps) >= 12
    axes.plot(steps, losses, color=LINE if many else TREND, linewidth=1.2 if many else 2, label="each log step")
    if many:
        axes.plot(steps, smooth(losses), color=TREND, linewidth=2.2, label="smoothed")
        axes.legend(frameon=False, labelcolor=INK)
    _starts(axes, entries)
    _ends(axes, steps, losses)
    axes.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold", pad=12)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("training loss (nats per token)", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK)
    axes.margins(x=0.05, y=0.12)
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format="png")
    partial.replace(path)
    return True


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean around each value, a tenth of the curve wide; narrower near the ends: it never lags."""
    half = max(1, len(values) // 20)
    smoothed = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)
        window = values[index - reach : index + reach + 1]
        smoothed.append(sum(window) / len(window))
    return smoothed


def _starts(axes: Any, entries: Sequence[dict[str, Any]]) -> None:
    """Mark the step at which each later attempt took over."""
    for before, after in pairwise(entries):
        if after["attempt"] != before["attempt"]:
            axes.axvline(before["step"], color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
            axes.annotate(
                f"attempt {after['attempt']}", (before["step"], 1), xycoords=("data", "axes fraction"),
                xytext=(4, -10), textcoords="offset points", color=FAINT, fontsize=8,
            )  # fmt: skip


def _ends(axes: Any, steps: Sequence[int], losses: Sequence[float]) -> None:
    """Write the first and the last loss at their points."""
    axes.scatter([steps[0], steps[-1]], [losses[0], losses[-1]], color=TREND, s=22, zorder=3)
    for step, loss, offset in ((steps[0], losses[0], (7, 5)), (steps[-1], losses[-1], (7, -3))):
        axes.annotate(f"{loss:.2f}", (step, loss), xytext=offset, textcoords="offset points", color=INK)
