"""plot: the curves of runs, in the terminal or as a PNG."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from runner.commands.console import Console, columns
from runner.commands.options import runs_folder
from runner.errors import RunnerError
from runner.runs.metrics import Curve, Metrics, read_curves
from runner.runs.plot import Style
from runner.runs.progress import metrics_of
from runner.runs.run import find_run


def plot_runs(args: argparse.Namespace, console: Console) -> int:
    """`runner plot`: draw one plot per metric, with all runs."""
    curves = _curves(args, console)
    for curve in curves:
        if curve.left_out:
            console.warn(
                f"{curve.run}: leaving out {curve.left_out} values of {curve.metric} that are not finite numbers"
            )
    if args.json:
        console.answer_json([_record(curve, args.axis) for curve in curves])
    elif args.png:
        from runner.runs.plot import write_png

        title = ", ".join(dict.fromkeys(curve.run for curve in curves))
        console.answer(str(write_png(curves, args.axis, title, Path(args.png))))
    else:
        from runner.runs.plot import draw

        metrics = tuple(dict.fromkeys(curve.metric for curve in curves))
        for number, metric in enumerate(metrics):
            lines = draw(
                [curve for curve in curves if curve.metric == metric],
                args.axis,
                _style(len(metrics)),
            )
            console.answer("\n".join(["", *lines] if number else lines), exact=True)
    return 0


def _curves(args: argparse.Namespace, console: Console) -> list[Curve]:
    """The curves of all runs; one that lacks the metric is skipped with a warning, unless it is the only one."""
    metrics = tuple(dict.fromkeys(word.strip() for word in args.metric.split(",") if word.strip()))
    if not metrics:
        raise RunnerError(
            "no metric is given",
            f"the value of --metric is {args.metric!r}",
            "--metric loss",
            exit_code=2,
        )
    found: list[Curve] = []
    failed: list[RunnerError] = []
    for name, source in _named(args):
        try:
            found += [
                curve for curve in read_curves(name, source, metrics, args.axis) if curve.points
            ]
        except RunnerError as refusal:
            failed.append(refusal)
    if not found:
        nothing = (
            "there is nothing to plot",
            "none of the values is a finite number",
            "look at metrics.jsonl in the run folder",
        )
        raise failed[0] if failed else RunnerError(*nothing)
    for error in failed:
        console.warn(f"left out: {error.what}: {error.why}")
    return found


def _named(args: argparse.Namespace) -> list[tuple[str, Metrics]]:
    """(name, metrics) of each run. A folder with the metrics of a job that ran without runner works too."""
    folder = runs_folder(args.site)
    found = []
    for word in dict.fromkeys(args.runs or ["last"]):
        by_hand = Path(word).expanduser()
        if "/" in word and (by_hand / "metrics.jsonl").is_file():
            found.append((by_hand.resolve().name, Metrics.of_file(by_hand / "metrics.jsonl")))
            continue
        run = find_run(word, folder)
        found.append((run.name, metrics_of(run)))
    return found


def _style(pictures: int) -> Style:
    """What stdout can show: its size if it is a terminal, colours unless NO_COLOR is set, braille if it is UTF-8."""
    from runner.runs.plot import Style

    terminal = sys.stdout.isatty()
    rows = os.get_terminal_size(1).lines if terminal else 24
    encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
    height = min(max((rows - 2) // pictures - 5, 8), 20)
    return Style(
        width=max(columns(), 30),
        height=height,
        colour=terminal and not os.environ.get("NO_COLOR"),
        unicode=encoding.startswith("utf"),
    )


def _record(curve: Curve, axis: str) -> dict[str, object]:
    return {
        "run": curve.run,
        "metric": curve.metric,
        "axis": axis,
        "points": [list(point) for point in curve.points],
        "attempts": [{"attempt": number, axis: place} for number, place in curve.attempts],
        "not_finite": curve.left_out,
    }
