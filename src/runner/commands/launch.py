"""launch."""

from __future__ import annotations

import argparse
import os
import sys

from runner.commands.options import add_job
from runner.commands.runs import add_resources, overrides, say_end

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from runner.commands.console import Console
    from runner.project import Project
    from runner.runs.launch import MakeImage, Request, RunPlan
    from runner.runs.run import Run

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    """Register the verb."""
    launch = subparsers.add_parser(
        "launch",
        parents=[common],
        help="start a script or a command in an environment",
        usage="runner launch [JOB] [--env ENV] [--script SCRIPT] [options] [-- ARGS… | -- COMMAND…]",
    )
    add_job(launch)
    launch.add_argument("--name", help="the job's name (default: the script's)")
    launch.add_argument("--launcher", help="torchrun, srun, accelerate or none")
    launch.add_argument("--nodes", type=int, metavar="N")
    launch.add_argument("--tasks-per-node", type=int, metavar="N", help="processes per node")
    add_resources(launch)
    launch.add_argument("--sbatch", action="append", default=[], metavar="FLAG", help="any flag, as --sbatch=FLAG")
    launch.add_argument("--chain", type=int, metavar="N", help="submit N jobs, each of which goes on after the last")
    launch.add_argument(
        "--no-preflight", dest="preflight", action="store_const", const=False, help="do not try the nodes first"
    )
    launch.add_argument("--yes", action="store_true", help="do not ask, however many GPU hours it may take")
    launch.add_argument("--tag", action="append", default=[], help="a word to find the run by; may be repeated")
    launch.add_argument(
        "--sweep", action="append", default=[], metavar="NAME=V,V", help="a run for each combination of values"
    )
    launch.add_argument("--at-once", type=int, metavar="N", help="how many runs of a sweep may run at the same time")
    launch.add_argument("--after", action="append", default=[], metavar="RUN", help="start when RUN has ended with 0")
    launch.add_argument(
        "--after-any", action="append", default=[], metavar="RUN", help="start when RUN has ended, however"
    )
    launch.add_argument("--build", action="store_true", help="build and import the image first where it is missing")
    launch.add_argument("--wait", action="store_true", help="show the output, and pass the job's exit code on")
    launch.add_argument("--parsable", action="store_true", help="print the scheduler's job id")
    launch.add_argument("--json", action="store_true", help="print JSON")
    launch.add_argument("--dry-run", action="store_true", help="print the batch script, submit nothing")
    launch.set_defaults(run=launch_run)


def launch_request(args: argparse.Namespace) -> Request:
    """What a command line of `launch` asks for."""
    from runner.runs.launch import Request

    return Request(
        job=args.job,
        env=args.env,
        script=args.script,
        words=args.rest,
        site=args.site,
        engine=args.engine,
        overrides=overrides(args),
        dry_run=args.dry_run,
        after=tuple(args.after),
        after_any=tuple(args.after_any),
    )


def launch_run(args: argparse.Namespace, console: Console) -> int:
    """`runner launch`: print the run's name, or with --dry-run the batch script."""
    from runner.commands import sweeps
    from runner.project import find_project
    from runner.runs.launch import prepare

    project = find_project()
    sweep = sweeps.of(args)
    make_image = _make_image(project, console) if args.build and not args.dry_run else None
    plan = prepare(launch_request(args), project, os.environ, console, make_image)
    if args.dry_run:
        if sweep is not None:
            plan = sweeps.explain(plan, sweep, console)
        return _explain(plan, project, console)
    runs = plan.site.runs(os.environ, project)
    for note in plan.notes:
        console.warn(note)
    if not _confirmed(plan, console, yes=args.yes, runs=len(sweep.combinations) if sweep else 1):
        return 1
    if sweep is not None:
        return sweeps.launch(plan, sweep, runs, args, console)
    from runner.runs.submitting.submission import submit

    run = submit(plan, runs, sys.argv[1:], console, args.tag)
    console.say(f"{run.name}: job {run.job_id}, in {run.folder}")
    if not args.wait:
        console.say(f"follow it with: runner logs -f {run.name}")
    if args.json:
        from runner.runs.state.status import ask

        console.answer_json(ask([run])[0].record())
    else:
        console.answer(run.job_id if args.parsable else run.name)
    sys.stdout.flush()  # a caller that waits for the name must not wait for the job
    return _wait(run, console) if args.wait else 0


def _confirmed(plan: RunPlan, console: Console, *, yes: bool, runs: int) -> bool:
    """Whether the launch may cost what it may cost. Raises RunnerError where nobody can be asked."""
    from runner.errors import RunnerError
    from runner.runs.checking.estimate import estimate

    cost, limit = estimate(plan.job), plan.site.confirm_gpu_hours
    if cost is None:
        return True
    console.say(f"this launch: {cost.text}{f', {runs} times' if runs > 1 else ''}")
    most = cost.most * runs
    if yes or limit is None or most <= limit:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise RunnerError(
            f"this launch may take {most:,.0f} GPU hours",
            f"the site {plan.site.name} asks above {limit:,}, and there is no terminal to ask on",
            "--yes, fewer nodes, less time, or gpu_hours in the job file's [restart]",
        )
    console.say(f"that is more than {limit:,}: submit it? [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _make_image(project: Project, console: Console) -> MakeImage:
    from runner.runs.submitting.image_making import image_maker

    return image_maker(project, os.environ, console)


def _explain(plan: RunPlan, project: Project, console: Console) -> int:
    """The batch script on stdout; on stderr how it would be submitted, and where every value comes from."""
    from runner.runs.submitting.explanation import explain

    for line in explain(plan, os.environ, project):
        console.say(line)
    for note in plan.notes:
        console.warn(note)
    sys.stdout.flush()
    sys.stdout.buffer.write(plan.script.encode())  # the very bytes: no line end is added or changed
    sys.stdout.buffer.flush()
    return 0


def _wait(run: Run, console: Console) -> int:
    """Show the output on stderr until the run has ended; its exit code. Ctrl-C leaves the job alone."""
    from runner.commands.console import LogFilter
    from runner.runs.logs.output import One, follow, result_code

    printable = LogFilter()

    def show(data: bytes) -> None:
        sys.stderr.buffer.write(printable(data))
        sys.stderr.buffer.flush()

    try:
        status = follow(run, One(run.log), show, console)
    except KeyboardInterrupt:
        console.say(f"\n{run.name} goes on without us: runner logs -f {run.name}; runner cancel {run.name}")
        raise
    say_end(status, console)
    return result_code(status)
