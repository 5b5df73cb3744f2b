"""history: the launches that there were, from their folders alone."""

from __future__ import annotations

import argparse
import os

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from runner.commands.console import Console

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    """Register the verb."""
    from runner.runs.past import STATES

    history = subparsers.add_parser("history", parents=[common], help="the launches that there were")
    history.add_argument("job", nargs="?", default="", metavar="JOB", help="runs of this job only; a pattern: 'sft*'")
    history.add_argument("--env", default="", metavar="ENV", help="those in this environment; a pattern")
    history.add_argument(
        "--script", default="", metavar="SCRIPT", help="those of this script (path or name); a pattern"
    )
    history.add_argument("--state", action="append", default=[], type=str.upper, choices=STATES, help="may be repeated")
    history.add_argument("--since", metavar="WHEN", help="30m, 12h, 7d, 2w, or a date")
    history.add_argument("--json", action="store_true", help="print JSON")
    history.set_defaults(run=show_history)


def show_history(args: argparse.Namespace, console: Console) -> int:
    """`runner history`: one line per launch, oldest first."""
    from datetime import datetime

    from runner.detection import find_site
    from runner.project import find_project
    from runner.runs.history import list_runs
    from runner.runs.past import Wanted, find, parse_since

    now = datetime.now().astimezone()
    site, _ = find_site(args.site, os.environ)
    folder = site.runs(os.environ, find_project())
    wanted = Wanted(
        env=args.env,
        script=args.script,
        job=args.job,
        site=site.name if args.site else "",
        states=tuple(args.state),
        since=parse_since(args.since, now) if args.since else None,
    )
    found = list(find(list_runs(folder), wanted))
    if args.json:
        console.answer_json([each.record() for each in found])
    elif not found:
        console.say(f"no such runs in {folder}")
    else:
        rows = [
            (each.run.name, each.run.created[:16].replace("T", " "), each.state,
             "" if each.exit_code is None else str(each.exit_code), each.run.environment, each.program[:60],
             each.run.site, each.run.job_id)
            for each in found
        ]  # fmt: skip
        console.table(("RUN", "CREATED", "STATE", "EXIT", "ENV", "SCRIPT", "SITE", "JOB ID"), rows)
    return 0
