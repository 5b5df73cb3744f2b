"""logs: what a run has printed."""

from __future__ import annotations

import argparse
import sys

from runner.commands.console import Console, say_end
from runner.commands.options import Verbs, runs_folder
from runner.errors import RunnerError

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from runner.runs.run import Run


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    logs = subparsers.add_parser("logs", parents=[common])
    logs.add_argument(
        "run_word", metavar="RUN", nargs="?", default="last", help="name, job id, `last` or path (default: last)"
    )
    logs.add_argument("-f", "--follow", action="store_true", help="follow the output until the run has ended")
    logs.add_argument("--rank", metavar="N", help="only these ranks: 3, or 0,3, or 0-7")
    logs.add_argument("--attempt", type=int, metavar="N", help="only this attempt")
    logs.add_argument("-n", "--tail", type=int, metavar="N", help="print only the last N lines")
    logs.set_defaults(run=show_logs)


def show_logs(args: argparse.Namespace, console: Console) -> int:
    """`runner logs`: print the output of a run, or of some of its ranks."""
    from runner.commands.console import LogFilter
    from runner.runs import follow
    from runner.runs.follow import Following
    from runner.runs.logs import check_ranks, last_lines, merged, parse_ranks, without_times
    from runner.runs.run import find_run

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
        console.say(f"{run.name} has printed nothing yet ({run.log})")
    elif args.tail is None and args.attempt is None and not ranks and (unknown := without_times(run)):
        console.say(f"attempt {', '.join(map(str, unknown))}: no times were recorded, so the output is grouped by rank")
    return 0


def _check_part(args: argparse.Namespace, run: Run) -> None:
    """Raise RunnerError for options that exclude each other, or an attempt that does not exist."""
    if args.follow and (args.attempt is not None or args.tail is not None):
        raise RunnerError(
            "--follow does not work with --tail or --attempt", "--follow always shows the whole output",
            f"runner logs {run.name} -n {args.tail or 20}, then runner logs -f {run.name}", exit_code=2,
        )  # fmt: skip
    if args.tail is not None and args.tail < 1:
        raise RunnerError(
            f"--tail {args.tail} must be 1 or more", "--tail is the number of lines to print", "--tail 20", exit_code=2
        )
    known = [each.number for each in run.attempts]
    if args.attempt is not None and args.attempt not in known:
        shown = ", ".join(map(str, known)) or "none has started"
        raise RunnerError(f"{run.name} has no attempt {args.attempt}", f"attempts: {shown}", f"runner logs {run.name}")
