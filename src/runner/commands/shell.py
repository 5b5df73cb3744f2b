"""shell: a prompt or a command in an environment or a run."""

import argparse
import os
import sys
from pathlib import Path

from runner.commands.console import Console
from runner.commands.options import settings
from runner.machine import process
from runner.project import find_project
from runner.runs import shell


def open_shell(args: argparse.Namespace, console: Console) -> int:
    """`runner shell`: run a prompt or a command, and return its exit code."""
    project = find_project()
    request = shell.ShellRequest(
        where=args.where,
        command=args.rest,
        site=args.site,
        given=settings(args),
        engine=args.engine or ("sandbox" if args.trace else None),
        terminal=sys.stdin.isatty() and sys.stdout.isatty(),
        without_scheduler=args.here,
    )
    make_image = None
    if args.build:
        from runner.commands.build import image_maker

        make_image = image_maker(project, os.environ, console)
    with shell.prepared(
        request, project, os.environ, console, dry_run=args.dry_run, make_image=make_image
    ) as call:
        if args.dry_run:
            console.answer(call.text)
            return 0
        log = call.cwd / ".trace"
        env = {**call.env, "RUNNER_TRACE": str(log)} if args.trace else call.env
        code = process.attached(call.argv, env=env, cwd=call.cwd)
        if args.trace:
            from runner.images.importer.hot import write_trace

            count = write_trace(Path(args.trace), log)
            console.say(
                f"{args.trace}: {count:,} files; to use it: runner import IMAGE --trace {args.trace}"
            )
        return code
