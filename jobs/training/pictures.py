"""Curves as a PNG. A job draws its loss with it; as a program it reads the curves from stdin:

    python pictures.py FILE.png < picture.json

{"title", "axis", "panels": [{"metric", "curves": [CURVE, ...]}, ...]}, where a CURVE is
{"name", "points": [[place, value], ...], "starts": [[attempt, place], ...]}. A panel can also be
{"label", "bars": [{"name", "parts": [[name, value], ...]}, ...]}: stacked bars, one below the other.
Needs matplotlib, and nothing else of this project.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

INK, FAINT, GRID = "#1f2933", "#9aa5b1", "#e4e7eb"
# One colour per curve, and a paler one for its single values. Safe for colour-blind readers.
COLOURS = ("#0b63b0", "#d1640a", "#15803d", "#a21caf", "#b91c1c", "#57534e")
PALE = ("#9cc3e6", "#f3c29b", "#9fd3b0", "#e0a8e6", "#eba5a5", "#c9c5c1")
LABELS = {
    "loss": "training loss (nats per token)", "eval_loss": "evaluation loss (nats per token)",
    "tokens_per_second": "tokens per second", "tokens_per_second_per_process": "tokens per second, each process",
    "mfu": "model FLOPs utilisation", "learning_rate": "learning rate", "grad_norm": "norm of the gradient",
    "memory_bytes": "peak memory (bytes)", "data_wait_seconds": "waiting for data (s)", "tokens": "tokens trained on",
    "hours": "hours since the first entry", "checkpoint_seconds": "seconds to save", "step_seconds": "seconds per step",
    "bytes": "message size (bytes)", "bus": "bus bandwidth (GB/s)",
}  # fmt: skip
MANY = 12  # from this number of points on, a smooth line is drawn over the single values


def available() -> bool:
    """Return whether matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    return True


def draw(picture: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: one panel below the other, the curves of all runs in each."""
    from matplotlib.figure import Figure

    panels = picture["panels"]
    height = sum(1.8 + 0.3 * len(panel["bars"]) if "bars" in panel else 3.3 for panel in panels)
    figure = Figure(figsize=(8, 1.2 + height), dpi=150, layout="constrained", facecolor="white")
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)
    for (axes,), panel in zip(rows, panels, strict=True):
        if "bars" in panel:
            _bars(axes, panel)
        else:
            _panel(axes, panel, picture["axis"])
    rows[0][0].set_title(picture["title"], loc="left", color=INK, fontsize=12, fontweight="bold", pad=12)
    if "bars" not in panels[-1]:
        rows[-1][0].set_xlabel(LABELS.get(picture["axis"], picture["axis"]), color=INK)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        figure.savefig(partial, format="png")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def draw_loss(entries: Sequence[Mapping[str, Any]], path: Path, title: str) -> bool:
    """Draw the loss over the steps; return False without matplotlib or without entries."""
    if not entries or not available():
        return False
    starts = [
        (after["attempt"], before["step"])
        for before, after in pairwise(entries)
        if after["attempt"] != before["attempt"]
    ]
    curve = {"name": title, "points": [(entry["step"], entry["loss"]) for entry in entries], "starts": starts}
    draw({"title": title, "axis": "step", "panels": [{"metric": "loss", "curves": [curve]}]}, path)
    return True


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean around each value, a tenth of the curve wide; narrower near the ends: it never lags."""
    half = max(1, len(values) // 20)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    smoothed = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)
        smoothed.append((sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1))
    return smoothed


def _panel(axes: Any, panel: Mapping[str, Any], axis: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

    curves = panel["curves"]
    for index, curve in enumerate(curves):
        _curve(axes, curve, index, alone=len(curves) == 1)
    many = any(len(curve["points"]) >= MANY for curve in curves)
    if len(curves) > 1 or many:
        axes.legend(frameon=False, labelcolor=INK)
    axes.set_ylabel(LABELS.get(panel["metric"], panel["metric"].replace("_", " ")), color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=axis == "step"))
    if axis == "bytes":
        axes.set_xscale("log", base=2)
    if panel["metric"] == "mfu":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif max(abs(value) for curve in curves for _, value in curve["points"]) >= 10_000:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK)
    axes.margins(x=0.05, y=0.12)


def _bars(axes: Any, panel: Mapping[str, Any]) -> None:
    """Draw stacked bars. The first part is green, the others have the colours of a map for up to twenty classes."""
    from matplotlib import colormaps

    bars = panel["bars"]
    names = list(dict.fromkeys(name for bar in bars for name, value in bar["parts"] if value))
    rows = range(len(bars))
    lefts = [0.0] * len(bars)
    for index, name in enumerate(names):
        widths = [dict(bar["parts"]).get(name, 0.0) for bar in bars]
        colour = COLOURS[2] if index == 0 else colormaps["tab20"](index % 20)
        axes.barh(rows, widths, left=lefts, color=colour, label=name)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.set_yticks(rows, [bar["name"] for bar in bars])
    axes.invert_yaxis()
    axes.set_xlabel(panel["label"], color=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=INK, left=False)
    axes.legend(frameon=False, labelcolor=INK, ncols=3, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.25))


def _curve(axes: Any, curve: Mapping[str, Any], index: int, alone: bool) -> None:
    """Draw the single values, a smooth line over many of them, and the ends of a curve that is alone."""
    places = [place for place, _ in curve["points"]]
    values = [value for _, value in curve["points"]]
    colour, pale = COLOURS[index % len(COLOURS)], PALE[index % len(PALE)]
    name = None if alone else curve["name"]
    if len(values) >= MANY:
        axes.plot(places, values, color=pale, linewidth=1.0, zorder=1.5, label="each log step" if alone else None)
        axes.plot(places, smooth(values), color=colour, linewidth=2.2, label=name or "smoothed")
    else:
        axes.plot(places, values, color=colour, linewidth=2, marker="o" if len(values) == 1 else None, label=name)
    for number, place in curve["starts"]:
        axes.axvline(place, color=FAINT if alone else pale, linewidth=1, linestyle=(0, (4, 3)))
        if alone:
            axes.annotate(
                f"attempt {number}", (place, 1), xycoords=("data", "axes fraction"),
                xytext=(4, -10), textcoords="offset points", color=FAINT, fontsize=8,
            )  # fmt: skip
    if alone:
        axes.scatter([places[0], places[-1]], [values[0], values[-1]], color=colour, s=22, zorder=3)
        for place, value, offset in ((places[0], values[0], (7, 5)), (places[-1], values[-1], (7, -3))):
            axes.annotate(f"{value:.4g}", (place, value), xytext=offset, textcoords="offset points", color=INK)


def main(argv: Sequence[str]) -> int:
    if not available():
        sys.stderr.write("this Python has no matplotlib\n")
        return 1
    draw(json.load(sys.stdin), Path(argv[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
