"""shell, logs, cancel; and what launch shares with them."""

from __future__ import annotations

import argparse
import os
import sys

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from pathlib import Path

    from runner.commands.console import Console
    from runner.runs.job import Overrides
    from runner.runs.run import Run
    from runner.runs.status import RunStatus

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    """Register the verbs."""
    _add_shell(subparsers, common)
    logs = subparsers.add_parser("logs", parents=[common], help="what a run has printed")
    logs.add_argument("run_word", metavar="RUN", nargs="?", default="last")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")
    logs.add_argument("--rank", metavar="N", help="these ranks alone: 3, or 0,3, or 0-7")
    logs.add_argument("--attempt", type=int, metavar="N", help="this attempt alone")
    logs.add_argument("-n", "--tail", type=int, metavar="N", help="the last N lines")
    logs.set_defaults(run=show_logs)
    cancel = subparsers.add_parser("cancel", parents=[common], help="end runs")
    cancel.add_argument("runs", nargs="+", metavar="RUN")
    cancel.add_argument("--dry-run", action="store_true", help="print what would be done")
    cancel.add_argument("--json", action="store_true", help="print JSON")
    cancel.set_defaults(run=cancel_runs)


def add_resources(parser: argparse.ArgumentParser) -> None:
    """The options that launch and shell have in common."""
    parser.add_argument("--engine", help="the container engine (default: the site's)")
    parser.add_argument("--gpus-per-node", type=int, metavar="N")
    parser.add_argument("--cpus-per-task", type=int, metavar="N")
    parser.add_argument("--memory", metavar="SIZE", help="per node: 450G")
    parser.add_argument("--time", metavar="LIMIT", help="MINUTES, HH:MM:SS or D-HH:MM:SS")
    parser.add_argument("--account")
    parser.add_argument("--partition")
    parser.add_argument("--srun", action="append", default=[], metavar="FLAG", help="any flag, as --srun=FLAG")


def _add_shell(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    shell = subparsers.add_parser(
        "shell",
        parents=[common],
        help="a prompt, or a command, in an environment or a run",
        usage="runner shell [ENV|RUN] [options] [-- COMMAND…]",
    )
    shell.add_argument("where", nargs="?", metavar="ENV|RUN", help="default: the project's environment")
    add_resources(shell)
    shell.add_argument("--build", action="store_true", help="build and import the image first where it is missing")
    shell.add_argument("--dry-run", action="store_true", help="print the command, run nothing")
    shell.set_defaults(run=open_shell)


def overrides(args: argparse.Namespace) -> Overrides:
    """What the command line says about the job."""
    from runner.runs.job import Overrides

    return Overrides(
        name=getattr(args, "name", None),
        launcher=getattr(args, "launcher", None),
        nodes=getattr(args, "nodes", None),
        gpus_per_node=args.gpus_per_node,
        tasks_per_node=getattr(args, "tasks_per_node", None),
        cpus_per_task=args.cpus_per_task,
        memory=args.memory,
        time=args.time,
        partition=args.partition,
        account=args.account,
        sbatch=tuple(getattr(args, "sbatch", ())),
        srun=tuple(args.srun),
        chain=getattr(args, "chain", None),
        preflight=getattr(args, "preflight", None),
    )


def say_end(status: RunStatus, console: Console) -> None:
    """How a run has ended."""
    code = "" if status.exit_code is None else f", exit code {status.exit_code}"
    console.say(f"{status.run.name}: {status.state}{code}{f' ({status.reason})' if status.reason else ''}")


def _runs_folder(args: argparse.Namespace) -> Path:
    from runner.detection import find_site
    from runner.project import find_project

    site, _ = find_site(args.site, os.environ)
    return site.runs(os.environ, find_project())


def show_logs(args: argparse.Namespace, console: Console) -> int:
    """`runner logs`: what a run, or some of its ranks, have printed."""
    from runner.commands.console import LogFilter
    from runner.runs import follow
    from runner.runs.follow import Following
    from runner.runs.logs import check_ranks, last_lines, merged, parse_ranks, without_times
    from runner.runs.run import find_run

    run = find_run(args.run_word, _runs_folder(args))
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
        console.say(f"attempt {', '.join(map(str, unknown))}: no times were kept, each rank's lines stand together")
    return 0


def _check_part(args: argparse.Namespace, run: Run) -> None:
    """Raise RunnerError for a part of the output that there is not."""
    from runner.errors import RunnerError

    if args.follow and (args.attempt is not None or args.tail is not None):
        raise RunnerError(
            "--follow shows the whole output as it comes", "--tail and --attempt choose a part of it",
            f"runner logs {run.name} -n {args.tail or 20}, then runner logs -f {run.name}", exit_code=2,
        )  # fmt: skip
    if args.tail is not None and args.tail < 1:
        raise RunnerError(f"--tail {args.tail} must be 1 or more", "it is a number of lines", "--tail 20", exit_code=2)
    known = [int(path.name) for path in run.attempts]
    if args.attempt is not None and args.attempt not in known:
        shown = ", ".join(map(str, known)) or "none has started"
        raise RunnerError(f"{run.name} has no attempt {args.attempt}", f"attempts: {shown}", f"runner logs {run.name}")


def cancel_runs(args: argparse.Namespace, console: Console) -> int:
    """`runner cancel`: end runs, and print which."""
    from runner.runs import cancel as cancelling
    from runner.runs.run import find_runs

    folder = _runs_folder(args)
    runs = [run for word in args.runs for run in find_runs(word, folder)]
    if args.dry_run:
        for line in cancelling.explain(runs):
            console.answer(line)
        return 0
    done = cancelling.cancel(runs, console)
    if args.json:
        console.answer_json([{"run": run.name, "job_id": run.job_id, "cancelled": was} for run, was in done])
    else:
        for run, was in done:
            console.say(f"{run.name}: " + ("cancelled" if was else "had ended already"))
            console.answer(run.name) if was else None
    return 0


def open_shell(args: argparse.Namespace, console: Console) -> int:
    """`runner shell`: the exit code of the prompt or command."""
    from runner.machine import process
    from runner.project import find_project
    from runner.runs import shell

    project = find_project()
    request = shell.ShellRequest(
        where=args.where, command=args.rest, site=args.site, engine=args.engine, overrides=overrides(args),
        terminal=sys.stdin.isatty() and sys.stdout.isatty(),
    )  # fmt: skip
    make_image = None
    if args.build:
        from runner.commands.images import image_maker

        make_image = image_maker(project, os.environ, console)
    with shell.prepared(
        request, project, os.environ, console, dry_run=args.dry_run, make_image=make_image
    ) as call:  # fmt: skip
        if args.dry_run:
            console.answer(call.text)
            return 0
        return process.attached(call.argv, env=call.env, cwd=call.cwd)
