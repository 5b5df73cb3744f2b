"""history: past launches, newest last."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime

from runner.commands.console import Console
from runner.commands.options import Verbs, add_verb, runs_folder
from runner.commands.status import parameter_columns
from runner.runs import metrics
from runner.runs.history import STATES, Filters, Launch, find, parse_since
from runner.runs.progress import metrics_of
from runner.runs.run import Run, list_runs


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    history = add_verb(subparsers, common, "history", "history:show_history")
    state = "only runs in this state, as `runner status` shows it; can be repeated"
    history.add_argument(
        "--state",
        action="append",
        default=[],
        type=str.upper,
        choices=STATES,
        metavar="STATE",
        help=state,
    )


def show_history(args: argparse.Namespace, console: Console) -> int:
    """`runner history`: one line per launch, oldest first."""
    now = datetime.now().astimezone()
    folder = runs_folder(args.site)
    filters = Filters(
        env=args.env,
        script=args.script,
        job=args.job,
        tags=tuple(args.tag),
        site=args.site or "",
        states=tuple(args.state),
        since=parse_since(args.since, now) if args.since else None,
    )
    found = list(find(list_runs(folder), filters))
    if args.json:
        console.answer_json([each.record() for each in found])
    elif not found:
        filtered = any(vars(filters).values())
        console.say(
            f"no runs in {folder}"
            + (" match the filters" if filtered else "; start one with `runner launch`")
        )
    else:
        columns = [
            column for column in _columns(found) if column[0] not in _OPTIONAL or any(column[1])
        ]
        console.table(
            [name for name, _ in columns], list(zip(*(cells for _, cells in columns), strict=True))
        )
    return 0


_OPTIONAL = {"TAGS", "SWEEP"}


def _columns(found: Sequence[Launch]) -> list[tuple[str, list[str]]]:
    runs = [each.run for each in found]
    return [
        ("RUN", [run.name for run in runs]),
        ("CREATED", [run.created[:16].replace("T", " ") for run in runs]),
        ("STATE", [each.state for each in found]),
        ("EXIT", ["" if each.exit_code is None else str(each.exit_code) for each in found]),
        ("TAGS", [",".join(run.tags) for run in runs]),
        ("SWEEP", [run.sweep for run in runs]),
        *parameter_columns(runs),
        *_results(runs),
        ("ENV", [run.environment for run in runs]),
        ("SCRIPT", [each.program[:60] for each in found]),
        ("SITE", [run.site for run in runs]),
        ("JOB ID", [run.job_id for run in runs]),
    ]


def _results(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Columns with steps and losses, only for a single sweep: reading the metrics of all runs would be slow."""
    if not runs[0].sweep or {run.sweep for run in runs} != {runs[0].sweep}:
        return []
    read = [metrics.read_progress(metrics_of(run)) for run in runs]
    steps = [each.steps_text if each else "" for each in read]
    losses = ["" if each is None or each.loss is None else f"{each.loss:.4f}" for each in read]
    return [("STEP", steps), ("LOSS", losses)] if any(steps) else []
