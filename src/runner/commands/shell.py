"""shell: a prompt or a command in an environment or a run."""

from __future__ import annotations

import argparse
import os
import sys

from runner.commands.build import image_maker
from runner.commands.options import add_settings, settings

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from runner.commands.console import Console
    from runner.commands.options import Verbs


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    shell = subparsers.add_parser("shell", parents=[common], usage="runner shell [ENV|RUN] [options] [-- COMMAND…]")
    shell.add_argument("where", nargs="?", metavar="ENV|RUN", help="what to open (default: the project's environment)")
    add_settings(shell, shell=True)
    shell.add_argument("--build", action="store_true", help="build and import the image first if it is missing")
    shell.add_argument("--dry-run", action="store_true", help="print the command; run nothing")
    shell.set_defaults(run=open_shell)


def open_shell(args: argparse.Namespace, console: Console) -> int:
    """`runner shell`: run a prompt or a command, and return its exit code."""
    from runner.machine import process
    from runner.project import find_project
    from runner.runs import shell

    project = find_project()
    request = shell.ShellRequest(
        where=args.where, command=args.rest, site=args.site, engine=args.engine, given=settings(args),
        terminal=sys.stdin.isatty() and sys.stdout.isatty(),
    )  # fmt: skip
    make_image = image_maker(project, os.environ, console) if args.build else None
    with shell.prepared(request, project, os.environ, console, dry_run=args.dry_run, make_image=make_image) as call:
        if args.dry_run:
            console.answer(call.text)
            return 0
        return process.attached(call.argv, env=call.env, cwd=call.cwd)
