"""watch: the status of runs, shown again whenever it changes."""

from __future__ import annotations

import argparse
import sys

from runner.commands.status import add_runs, chosen_runs, table

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from runner.commands.console import Console
    from runner.runs.status import RunStatus

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_CLEAR = "\x1b[H\x1b[J"  # to the top left, and clear everything below


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    """Register the verb."""
    watch = subparsers.add_parser("watch", parents=[common], help="the status again and again, until all have ended")
    add_runs(watch)
    watch.set_defaults(run=watch_status)


def watch_status(args: argparse.Namespace, console: Console) -> int:
    """`runner watch`: the table in place on a terminal; elsewhere a new one whenever something has changed."""
    from runner.runs.status import watch

    runs = chosen_runs(args, console)
    live = sys.stdout.isatty()
    before: list[object] = []

    def show(found: tuple[RunStatus, ...]) -> None:
        header, rows = table(found)
        moved = [(each.state, each.reason, each.attempt, each.progress) for each in found]
        if live:
            sys.stdout.write(_CLEAR)
        elif moved == before:
            return
        before[:] = moved
        console.table(header, rows)
        sys.stdout.flush()

    if runs:
        watch(runs, show)
    return 0
