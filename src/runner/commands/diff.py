"""diff: compare two launches."""

from __future__ import annotations

import argparse
import os

from runner.commands.console import Console
from runner.commands.options import Verbs, add_wide, runs_folder
from runner.errors import RunnerError

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from runner.project import Project
    from runner.runs.diff import Side
    from runner.runs.run import Run


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    diff = subparsers.add_parser("diff", parents=[common])
    diff.add_argument("left", metavar="RUN", help="name, job id, `last` or path")
    other = "the run to compare with, or `.` (default): what RUN's launch would be now"
    diff.add_argument("right", metavar="RUN|.", nargs="?", default=".", help=other)
    diff.add_argument("--json", action="store_true", help="print JSON")
    add_wide(diff)
    diff.set_defaults(run=show_difference)


def show_difference(args: argparse.Namespace, console: Console) -> int:
    """`runner diff`: print one line per difference. Exit code: 0 if there are none, 1 if there are some."""
    from runner.project import find_project
    from runner.runs.diff import compare, run_side, shown
    from runner.runs.run import find_run

    project = find_project()
    folder = runs_folder(args.site)
    run = find_run(args.left, folder)
    other = None if args.right == "." else find_run(args.right, folder)
    left, right = run_side(run), run_side(other) if other else _here(run, project, args)
    found = compare(left, right)
    if args.json:
        console.answer_json({"left": left.name, "right": right.name, "equal": not found.differences,
                             "differences": [vars(each) for each in found.differences],
                             "left_out": found.left_out})  # fmt: skip
        return 1 if found.differences else 0
    for line in found.left_out:
        console.say(f"not compared: {line}")
    if not found.differences:
        console.say(f"{left.name} and {right.name} are equal")
        return 0
    rows = [(each.kind, each.name, shown(each.left), shown(each.right)) for each in found.differences]
    console.table(("WHAT", "NAME", left.name, right.name), rows)
    if any(each.kind == "code" for each in found.differences):
        console.say(f"to see the changed lines: diff -ru {run.code} {other.code if other else project.root or '.'}")
    return 1


def _here(run: Run, project: Project, args: argparse.Namespace) -> Side:
    """The launch that the run's command line would produce now, with the current code, environment and site."""
    from runner.commands.launch import launch_request
    from runner.machine.report import Quiet
    from runner.runs.diff import side_of_plan
    from runner.runs.launch import prepare

    if "launch" not in run.command_line:
        raise RunnerError(
            f"runner does not know how {run.name} was launched",
            "the run's record contains no `runner launch` command",
            f"compare the run with another run: runner diff {run.name} OTHER",
        )
    launch = args.parse(run.command_line)
    launch.dry_run = True
    return side_of_plan(prepare(launch_request(launch), project, os.environ, Quiet()), run)
