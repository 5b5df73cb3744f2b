"""cancel: end runs."""

import argparse

from runner.commands.console import Console
from runner.commands.options import runs_folder
from runner.errors import RunnerError
from runner.runs.cancel import cancel, explain
from runner.runs.run import find_runs


def cancel_runs(args: argparse.Namespace, console: Console) -> int:
    """`runner cancel`: end runs, and print which."""
    if not args.runs:
        raise RunnerError(
            "cancel: no run is given",
            "`runner cancel` ends only the runs that you name",
            "runner cancel last; runner status lists the names",
            exit_code=2,
        )
    folder = runs_folder(args.site)
    runs = [run for word in args.runs for run in find_runs(word, folder)]
    if args.dry_run:
        for line in explain(runs):
            console.answer(line)
        return 0
    done = cancel(runs, console)
    if args.json:
        console.answer_json(
            [{"run": run.name, "job_id": run.job_id, "cancelled": was} for run, was in done]
        )
    else:
        for run, was in done:
            console.say(f"{run.name}: " + ("cancelled" if was else "had already ended"))
            console.answer(run.name) if was else None
    return 0
