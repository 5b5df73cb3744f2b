"""logs: what a run has printed."""

from __future__ import annotations

import argparse
import sys

from runner.commands.console import Console, LogFilter, say_end
from runner.commands.options import runs_folder
from runner.errors import RunnerError
from runner.runs import follow
from runner.runs.follow import Following
from runner.runs.logs import check_ranks, last_lines, merged, parse_ranks, without_times
from runner.runs.run import Run, find_run


def show_logs(args: argparse.Namespace, console: Console) -> int:
    """`runner logs`: print the output of a run, or of some of its ranks."""
    run = find_run(args.run_word, runs_folder(args.site))
    ranks = parse_ranks(args.rank) if args.rank else ()

    printable = LogFilter()

    def show(data: bytes) -> None:
        sys.stdout.buffer.write(printable(data))
        sys.stdout.buffer.flush()

    _check_part(args, run)
    if args.follow:
        status = follow.follow(run, Following(run, ranks), show, console)
        show(b"\n" if printable.rest else b"")
        say_end(status, console)
        return 0
    if ranks:
        check_ranks(run, ranks)
    shown = False
    pieces = merged(run, ranks, args.attempt, args.tail)
    for data in pieces if args.tail is None else (last_lines(pieces, args.tail),):
        show(data)
        shown = True
    show(b"\n" if printable.rest else b"")
    if not shown:
        part = args.attempt is not None or ranks
        nothing = "has printed nothing in this part" if part else "has printed nothing yet"
        console.say(f"{run.name} {nothing} ({run.log})")
    elif (
        args.tail is None and args.attempt is None and not ranks and (unknown := without_times(run))
    ):
        which = "attempt" if len(unknown) == 1 else "attempts"
        console.say(
            f"{which} {', '.join(map(str, unknown))} recorded no times, so the output is grouped by rank "
            "and not merged by time"
        )
    return 0


def _check_part(args: argparse.Namespace, run: Run) -> None:
    """Raise RunnerError for options that exclude each other."""
    if args.follow and (args.attempt is not None or args.tail is not None):
        raise RunnerError(
            "--follow does not work with --tail or --attempt",
            "--follow shows the whole output of all attempts",
            f"runner logs {run.name} --attempt {args.attempt}"
            if args.attempt is not None
            else f"runner logs {run.name} -n {args.tail}, then runner logs -f {run.name}",
            exit_code=2,
        )
    if args.tail is not None and args.tail < 1:
        raise RunnerError(
            f"--tail {args.tail} must be 1 or more",
            "--tail is the number of lines to print",
            "--tail 20",
            exit_code=2,
        )
