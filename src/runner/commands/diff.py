"""diff: compare two launches."""

from __future__ import annotations

import argparse

from runner.commands.console import Console
from runner.commands.options import runs_folder
from runner.project import find_project
from runner.runs.diff import compare, run_side, shown, side_now
from runner.runs.run import find_run


def show_difference(args: argparse.Namespace, console: Console) -> int:
    """`runner diff`: print one line per difference. Exit code: 0 if there are none, 1 if there are some."""
    from runner.commands.launch import launch_request

    project = find_project()
    folder = runs_folder(args.site)
    run = find_run(args.left, folder)
    other = None if args.right == "." else find_run(args.right, folder)
    left = run_side(run)
    right = (
        run_side(other)
        if other
        else side_now(run, lambda words: launch_request(args.parse(words)), project)
    )
    found = compare(left, right)
    if args.json:
        console.answer_json(
            {
                "left": left.name,
                "right": right.name,
                "equal": not found.differences,
                "differences": [vars(each) for each in found.differences],
                "left_out": found.left_out,
            }
        )
        return 1 if found.differences else 0
    for line in found.left_out:
        console.say(f"not compared: {line}")
    if not found.differences:
        console.say(f"{left.name} and {right.name} are equal")
        return 0
    rows = [
        (each.kind, each.name, shown(each.left), shown(each.right)) for each in found.differences
    ]
    console.table(("WHAT", "NAME", left.name, right.name), rows)
    if any(each.kind == "code" for each in found.differences):
        console.say(
            f"to see the changed lines: diff -ru {run.code} {other.code if other else project.root or '.'}"
        )
    return 1
