"""rerun: the same launch again."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from runner.commands.console import Console
from runner.commands.options import runs_folder
from runner.errors import RunnerError
from runner.machine import folders
from runner.project import Project, find_project
from runner.runs import rerun
from runner.runs.budget import budget_of
from runner.runs.rerun import Locked, code_from_git
from runner.runs.run import Run


def run_again(args: argparse.Namespace, console: Console) -> int:
    """`runner rerun`: print the new run's name."""
    project = find_project()
    runs = runs_folder(args.site)
    locked = rerun.find(args.lock, runs)
    for line in rerun.losses(locked):
        console.warn(f"changed since the run: {line}")
    rerun.need_image(locked, project, os.environ, console, dry_run=args.dry_run)
    whole = rerun.is_whole(locked)
    if not whole and locked.tables["job"].get("batch"):
        why = f"missing or changed in its run folder: {', '.join(locked.changed_files) or 'code/'}"
        fix = "launch the script again, with the command line that `runner history` prints"
        raise RunnerError(f"{locked.name} cannot be rerun", why, fix)
    state = (
        "complete"
        if whole
        else "incomplete, so runner launches the run again from its git commit and command line"
    )
    console.say(f"{locked.name}: the run folder is {state}")
    if args.dry_run:
        for name in () if whole else locked.changed_files:
            console.say(f"missing or changed: {name}")
        return 0
    changed, has_copy = rerun.changed_script(locked) if whole else ("", False)
    if changed and has_copy:
        console.say(
            f"{changed} has changed since the launch; submitting the copy in the run folder"
        )
    elif changed:
        console.warn(
            f"{changed} has changed since the launch; submitting it as it is now, because the run folder has no copy"
        )
    run = (
        rerun.same_bytes(locked, runs, console, args.tag)
        if whole
        else _anew(locked, project, runs, args, console)
    )
    console.say(f"{run.name}: job {run.job_id}, in {run.folder}")
    console.answer(run.job_id if args.parsable else run.name)
    return 0


def _anew(
    locked: Locked, project: Project, runs: Path, args: argparse.Namespace, console: Console
) -> Run:
    """Launch the lock's command line again, with the code of its commit."""
    from runner.commands.launch import launch_request
    from runner.runs.launch import prepare
    from runner.runs.secrets import HIDDEN
    from runner.runs.submit import submit

    words = [str(word) for word in locked.tables["run"]["command_line"]]
    if "launch" not in words or any(HIDDEN in word for word in words):
        why = "the run's arguments contained a secret, and lock.toml never stores secrets"
        if "launch" not in words:
            why = "lock.toml does not contain the run's command line"
        raise RunnerError(
            f"{locked.name} cannot be rerun", why, "start a new run with `runner launch`"
        )
    with folders.temporary("runner-rerun-") as folder:
        code = locked.tables.get("code", {})
        root = folder / "code"
        root.mkdir()
        here = project
        if locked.tables["run"]["project"]:
            source = next(
                (
                    path
                    for path in (project.root, Path(code.get("root", "")))
                    if path and path.is_dir()
                ),
                None,
            )
            diff = locked.folder / "code.diff"
            for line in code_from_git(code, source or project.start, root, diff):
                console.warn(f"cannot restore {line}")
            here = replace(project, root=root, start=root)
        launch = args.parse(words)
        launch.dry_run, launch.after, launch.after_any = False, [], []
        plan = prepare(launch_request(launch), here, os.environ, console)
        values = locked.tables.get("sweep", {})
        if values:
            from runner.runs.sweep import with_values

            plan = with_values(plan, values)
        plan = replace(plan, budget=budget_of(project, plan.site))  # not that of the old code
        run = submit(plan, runs, words, console, args.tag)
    for name in rerun.differences(locked, run):
        console.warn(
            f"{name} differs from the original run; to compare: runner diff {locked.name} {run.name}"
        )
    return run
