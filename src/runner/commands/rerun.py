"""rerun: the same launch again."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from runner.commands.console import Console
from runner.commands.options import runs_folder
from runner.detection import find_site
from runner.project import find_project
from runner.runs import rerun
from runner.runs.budget import budget_of, check
from runner.runs.run import load


def run_again(args: argparse.Namespace, console: Console) -> int:
    """`runner rerun`: print the new run's name."""
    runs = runs_folder(args.site)
    locked = rerun.find(args.lock, runs)
    rerun.refuse_incomplete(locked)
    changed, has_copy = rerun.changed_script(locked)
    rerun.need_image(locked, console)
    for line in rerun.losses(locked):
        console.warn(f"changed since the run: {line}")
    console.say(
        f"{locked.name} can be rerun: its run folder has all files of its launch, unchanged"
    )
    if args.dry_run:
        return 0
    project = find_project()
    budget = budget_of(project, find_site(args.site, os.environ)[0])
    check(budget, runs, load(locked.folder).most_gpu_hours)
    if changed and has_copy:
        what = "has changed since the launch" if Path(changed).exists() else "no longer exists"
        console.say(f"{changed} {what}; submitting the copy in the run folder")
    elif changed:
        console.warn(
            f"{changed} has changed since the launch; submitting it as it is now, because the run folder has no copy"
        )
    run = rerun.same_bytes(locked, runs, console, args.tag)
    console.say(f"{run.name}: job {run.job_id}, in {run.folder}")
    console.answer(run.job_id if args.parsable else run.name)
    return 0
