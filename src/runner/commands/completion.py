"""completion: the script that completes words in a shell."""

from __future__ import annotations

import argparse

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from runner.commands.console import Console

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    """Register the verb."""
    completion = subparsers.add_parser("completion", parents=[common], help="print the completion script of a shell")
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    completion.set_defaults(run=print_completion)


def print_completion(args: argparse.Namespace, console: Console) -> int:
    """`runner completion SHELL`: the script."""
    import shtab

    console.answer(shtab.complete(args.full_parser(), shell=args.shell))
    return 0
