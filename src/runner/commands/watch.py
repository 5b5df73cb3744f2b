"""watch: show the status of runs, and show it again whenever it changes."""

from __future__ import annotations

import argparse
import sys

from runner.commands.status import add_runs, chosen_runs, table

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from runner.commands.console import Console
    from runner.commands.options import Verbs
    from runner.runs.status import RunStatus

_CLEAR = "\x1b[H\x1b[J"  # to the top left, and clear everything below


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    watch = subparsers.add_parser("watch", parents=[common])
    add_runs(watch)
    watch.set_defaults(run=watch_status)


def watch_status(args: argparse.Namespace, console: Console) -> int:
    """`runner watch`: update the table in place on a terminal; elsewhere, print a new table after each change."""
    from runner.runs.status import watch

    live = sys.stdout.isatty()
    before: list[object] = []

    def show(found: tuple[RunStatus, ...]) -> None:
        header, rows = table(found)
        moved: list[object] = [(each.run.name, each.state, each.reason, each.attempt, each.progress) for each in found]
        if live:
            sys.stdout.write(_CLEAR)
        elif moved == before:
            return
        before[:] = moved
        console.table(header, rows)
        sys.stdout.flush()

    if chosen_runs(args, console):
        watch(lambda: chosen_runs(args, console), show)  # runs that are launched meanwhile appear too
    return 0
