"""cancel: end runs."""

import argparse

from runner.commands.console import Console
from runner.commands.options import Verbs, runs_folder
from runner.errors import RunnerError


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    cancel = subparsers.add_parser("cancel", parents=[common])
    cancel.add_argument("runs", nargs="*", metavar="RUN", help="a run or sweep: name, job id, `last` or path")
    cancel.add_argument("--dry-run", action="store_true", help="print what would be done; cancel nothing")
    cancel.add_argument("--json", action="store_true", help="print JSON")
    cancel.set_defaults(run=cancel_runs)


def cancel_runs(args: argparse.Namespace, console: Console) -> int:
    """`runner cancel`: end runs, and print which."""
    from runner.runs.cancel import cancel, explain
    from runner.runs.run import find_runs

    if not args.runs:
        raise RunnerError(
            "cancel: no run is given", "`runner cancel` ends only the runs that you name",
            "runner cancel last; runner status lists the names", exit_code=2,
        )  # fmt: skip
    folder = runs_folder(args.site)
    runs = [run for word in args.runs for run in find_runs(word, folder)]
    if args.dry_run:
        for line in explain(runs):
            console.answer(line)
        return 0
    done = cancel(runs, console)
    if args.json:
        console.answer_json([{"run": run.name, "job_id": run.job_id, "cancelled": was} for run, was in done])
    else:
        for run, was in done:
            console.say(f"{run.name}: " + ("cancelled" if was else "had already ended"))
            console.answer(run.name) if was else None
    return 0
