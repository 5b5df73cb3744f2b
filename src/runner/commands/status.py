"""status: a table of runs. watch: the same, shown again whenever it changes."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime

from runner.commands.console import Console
from runner.commands.options import runs_folder
from runner.runs.progress import unread
from runner.runs.run import Run, find_runs, list_runs
from runner.runs.status import RunStatus, ask, watch

_NEWEST = 20
_CLEAR = "\x1b[H\x1b[J"  # to the top left, and clear everything below


def chosen_runs(args: argparse.Namespace, console: Console) -> list[Run]:
    """The named runs, or else the newest ones. Prints a hint if there are none."""
    folder = runs_folder(args.site)
    if args.runs:
        return [run for word in args.runs for run in find_runs(word, folder)]
    runs = list_runs(folder)
    if not runs:
        console.say(f"no runs in {folder}; start one with `runner launch`")
    return list(runs if args.all else runs[-_NEWEST:])


def show_status(args: argparse.Namespace, console: Console) -> int:
    """`runner status`: one line per run."""
    found = ask(chosen_runs(args, console))
    if args.json:
        console.answer_json([each.record() for each in found])
    elif found:
        console.table(*table(found))
        newest = found[-1].run.name
        for line in budget_lines(args):
            console.say(line)
        if found[-1].progress is None and (name := unread(found[-1].run)):
            console.say(
                f"{newest}: runner has found no step of the trainer {name} in the log; "
                "at the next launch, do not set `trainer`: runner then recognizes the trainer by itself"
            )
        if found[-1].active:
            console.say(f"to see the output: runner logs -f {newest}")
        elif found[-1].state not in ("COMPLETED", "CANCELLED", "PREPARING"):
            console.say(f"to find the cause: runner why {newest}")
    return 0


def budget_lines(args: argparse.Namespace) -> Sequence[str]:
    """What is left of the budget; empty without one."""
    from runner.detection import find_site
    from runner.project import find_project
    from runner.runs.budget import lines

    return lines(find_project(), find_site(args.site, os.environ)[0], runs_folder(args.site))


def watch_status(args: argparse.Namespace, console: Console) -> int:
    """`runner watch`: update the table in place on a terminal; elsewhere, print a new table after each change."""
    live = sys.stdout.isatty()
    before: list[object] = []

    def show(found: tuple[RunStatus, ...]) -> None:
        header, rows = table(found)
        moved: list[object] = [
            (each.run.name, each.state, each.reason, each.attempt, each.progress) for each in found
        ]
        if live:
            sys.stdout.write(_CLEAR)
        elif moved == before:
            return
        before[:] = moved
        console.table(header, rows)
        sys.stdout.flush()

    if chosen_runs(args, console):
        watch(
            lambda: chosen_runs(args, console), show
        )  # runs that are launched meanwhile appear too
    return 0


def table(found: Sequence[RunStatus]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(header, rows) of the table. Columns about training are left out if they are empty."""
    columns = [
        ("RUN", [each.run.name for each in found]),
        ("JOB ID", [each.job_id or each.run.job_id for each in found]),
        ("ATTEMPT", [str(each.attempt or "") for each in found]),
        ("STATE", [each.state for each in found]),
        ("AGE", [age(each.run.launched) for each in found]),
        ("EXIT", ["" if each.exit_code is None else str(each.exit_code) for each in found]),
        *parameter_columns([each.run for each in found]),
        *_training(found),
        *_gpu_hours(found),
        ("ELAPSED", [each.elapsed for each in found]),
        ("LEFT", [each.time_left if each.state != "PENDING" else "" for each in found]),
        ("NODES", [each.nodes for each in found]),
        ("REASON", [each.reason for each in found]),
    ]
    return tuple(name for name, _ in columns), list(
        zip(*(cells for _, cells in columns), strict=True)
    )


def age(created: float | None) -> str:
    """How long ago something was created: `45s`, `12m`, `7h`, `3d`; empty if that is not known."""
    if created is None:
        return ""
    seconds = int(time.time() - created)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{max(seconds, 0)}s"


def parameter_columns(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """One column for each parameter that a sweep varies."""
    names = dict.fromkeys(name for run in runs for name in run.parameters)
    return [(name, [run.parameters.get(name, "") for run in runs]) for name in names]


def _training(found: Sequence[RunStatus]) -> list[tuple[str, list[str]]]:
    shown = [_progress(each) for each in found]
    columns = zip(("STEP", "LOSS", "TOKENS/S", "END"), zip(*shown, strict=True), strict=True)
    return [(name, list(cells)) for name, cells in columns if any(cells)]


def _gpu_hours(found: Sequence[RunStatus]) -> list[tuple[str, list[str]]]:
    """A column with the GPU hours used, and the limit if the job file sets one."""
    cells = ["" if each.gpu_hours is None else f"{each.gpu_hours:.2f}" for each in found]
    limits = [f"/{each.run.gpu_hours}" if each.run.gpu_hours else "" for each in found]
    return (
        [("GPU HOURS", [cell + limit for cell, limit in zip(cells, limits, strict=True)])]
        if any(cells)
        else []
    )


def _progress(status: RunStatus) -> tuple[str, str, str, str]:
    progress = status.progress
    if progress is None:
        return "", "", "", ""
    loss = "" if progress.loss is None else f"{progress.loss:.4f}"
    rate = "" if progress.tokens_per_second is None else f"{progress.tokens_per_second:,.0f}"
    ending = status.state == "RUNNING" and progress.end
    return (
        progress.steps_text,
        loss,
        rate,
        datetime.fromtimestamp(ending).strftime("%m-%d %H:%M") if ending else "",
    )
