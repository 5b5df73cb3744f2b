"""launch, shell, logs, cancel."""

from __future__ import annotations

import argparse
import os
import sys

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from pathlib import Path

    from runner.commands.console import Console
    from runner.project import Project
    from runner.runs.job import Overrides
    from runner.runs.launch import MakeImage, Request, RunPlan
    from runner.runs.run import Run
    from runner.runs.status import RunStatus

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    """Register the verbs."""
    _add_launch(subparsers, common)
    _add_shell(subparsers, common)
    logs = subparsers.add_parser("logs", parents=[common], help="what a run has printed")
    logs.add_argument("run_word", metavar="RUN", nargs="?", default="last")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")
    logs.add_argument("--rank", metavar="N", help="these ranks alone: 3, or 0,3, or 0-7")
    logs.set_defaults(run=show_logs)
    cancel = subparsers.add_parser("cancel", parents=[common], help="end runs")
    cancel.add_argument("runs", nargs="+", metavar="RUN")
    cancel.add_argument("--dry-run", action="store_true", help="print what would be done")
    cancel.add_argument("--json", action="store_true", help="print JSON")
    cancel.set_defaults(run=cancel_runs)


def _add_resources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", help="the container engine (default: the site's)")
    parser.add_argument("--gpus-per-node", type=int, metavar="N")
    parser.add_argument("--cpus-per-task", type=int, metavar="N")
    parser.add_argument("--memory", metavar="SIZE", help="per node: 450G")
    parser.add_argument("--time", metavar="LIMIT", help="MINUTES, HH:MM:SS or D-HH:MM:SS")
    parser.add_argument("--account")
    parser.add_argument("--partition")
    parser.add_argument("--srun", action="append", default=[], metavar="FLAG", help="any flag, as --srun=FLAG")


def _add_launch(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    launch = subparsers.add_parser(
        "launch",
        parents=[common],
        help="start a script or a command in an environment",
        usage="runner launch [JOB] [--env ENV] [--script SCRIPT] [options] [-- ARGS… | -- COMMAND…]",
    )
    launch.add_argument("job", nargs="?", metavar="JOB", help="a job file: a name in jobs/, or a path")
    launch.add_argument("--env", metavar="ENV", help="the environment: a name in edf/, or a path to an EDF")
    launch.add_argument("--script", metavar="SCRIPT", help="a name in jobs/, or a path to a .py or .sh file")
    launch.add_argument("--name", help="the job's name (default: the script's)")
    launch.add_argument("--launcher", help="torchrun, srun, accelerate or none")
    launch.add_argument("--nodes", type=int, metavar="N")
    launch.add_argument("--tasks-per-node", type=int, metavar="N", help="processes per node")
    _add_resources(launch)
    launch.add_argument("--sbatch", action="append", default=[], metavar="FLAG", help="any flag, as --sbatch=FLAG")
    launch.add_argument("--chain", type=int, metavar="N", help="submit N jobs, each of which goes on after the last")
    launch.add_argument(
        "--no-preflight", dest="preflight", action="store_const", const=False, help="do not try the nodes first"
    )
    launch.add_argument("--yes", action="store_true", help="do not ask, however many GPU hours it may take")
    launch.add_argument("--build", action="store_true", help="build and import the image first where it is missing")
    launch.add_argument("--wait", action="store_true", help="show the output, and pass the job's exit code on")
    launch.add_argument("--parsable", action="store_true", help="print the scheduler's job id")
    launch.add_argument("--json", action="store_true", help="print JSON")
    launch.add_argument("--dry-run", action="store_true", help="print the batch script, submit nothing")
    launch.set_defaults(run=launch_run)


def _add_shell(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    shell = subparsers.add_parser(
        "shell",
        parents=[common],
        help="a prompt, or a command, in an environment or a run",
        usage="runner shell [ENV|RUN] [options] [-- COMMAND…]",
    )
    shell.add_argument("where", nargs="?", metavar="ENV|RUN", help="default: the project's environment")
    _add_resources(shell)
    shell.add_argument("--dry-run", action="store_true", help="print the command, run nothing")
    shell.set_defaults(run=open_shell)


def _overrides(args: argparse.Namespace) -> Overrides:
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
        overrides=_overrides(args),
        dry_run=args.dry_run,
    )


def launch_run(args: argparse.Namespace, console: Console) -> int:
    """`runner launch`: print the run's name, or with --dry-run the batch script."""
    from runner.project import find_project
    from runner.runs.launch import prepare

    project = find_project()
    make_image = _make_image(project, console) if args.build and not args.dry_run else None
    plan = prepare(launch_request(args), project, os.environ, console, make_image)
    if args.dry_run:
        return _explain(plan, project, console)
    runs = plan.site.runs(os.environ, project)
    for note in plan.notes:
        console.warn(note)
    if not _confirmed(plan, console, yes=args.yes):
        return 1
    from runner.runs.submission import submit

    run = submit(plan, runs, sys.argv[1:], console)
    console.say(f"{run.name}: job {run.job_id}, in {run.folder}")
    if not args.wait:
        console.say(f"follow it with: runner logs -f {run.name}")
    if args.json:
        from runner.runs.status import ask

        console.answer_json(ask([run])[0].record())
    else:
        console.answer(run.job_id if args.parsable else run.name)
    sys.stdout.flush()  # a caller that waits for the name must not wait for the job
    return _wait(run, console) if args.wait else 0


def _confirmed(plan: RunPlan, console: Console, *, yes: bool) -> bool:
    """Whether the launch may cost what it may cost. Raises RunnerError where nobody can be asked."""
    from runner.errors import RunnerError
    from runner.runs.estimate import estimate

    cost, limit = estimate(plan.job), plan.site.confirm_gpu_hours
    if cost is None:
        return True
    console.say(f"this launch: {cost.text}")
    if yes or limit is None or cost.most <= limit:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise RunnerError(
            f"this launch may take {cost.most:,.0f} GPU hours",
            f"the site {plan.site.name} asks above {limit:,}, and there is no terminal to ask on",
            "--yes, fewer nodes, less time, or gpu_hours in the job file's [restart]",
        )
    console.say(f"that is more than {limit:,}: submit it? [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _make_image(project: Project, console: Console) -> MakeImage:
    from runner.runs.making import image_maker

    return image_maker(project, os.environ, console)


def _explain(plan: RunPlan, project: Project, console: Console) -> int:
    """The batch script on stdout; on stderr how it would be submitted, and where every value comes from."""
    from runner.runs.explanation import explain

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
    from runner.runs.output import One, follow, result_code

    def show(data: bytes) -> None:
        sys.stderr.buffer.write(data)
        sys.stderr.buffer.flush()

    try:
        status = follow(run, One(run.log), show, console)
    except KeyboardInterrupt:
        console.say(f"\n{run.name} goes on without us: runner logs -f {run.name}; runner cancel {run.name}")
        raise
    _say_end(status, console)
    return result_code(status)


def _say_end(status: RunStatus, console: Console) -> None:
    code = "" if status.exit_code is None else f", exit code {status.exit_code}"
    console.say(f"{status.run.name}: {status.state}{code}{f' ({status.reason})' if status.reason else ''}")


def _runs_folder(args: argparse.Namespace) -> Path:
    from runner.detection import find_site
    from runner.project import find_project

    site, _ = find_site(args.site, os.environ)
    return site.runs(os.environ, find_project())


def show_logs(args: argparse.Namespace, console: Console) -> int:
    """`runner logs`: what a run, or some of its ranks, have printed."""
    from runner.runs import history, output
    from runner.runs.logs.following import Following
    from runner.runs.logs.merged import merged, without_times
    from runner.runs.logs.streams import check_ranks, parse_ranks

    run = history.find_run(args.run_word, _runs_folder(args))
    ranks = parse_ranks(args.rank) if args.rank else ()

    def show(data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    if args.follow:
        _say_end(output.follow(run, Following(run, ranks), show, console), console)
        return 0
    if ranks:
        check_ranks(run, ranks)
    shown = False
    for data in merged(run, ranks):
        show(data)
        shown = True
    if not shown:
        console.say(f"{run.name} has printed nothing yet ({run.log})")
    elif not ranks and (unknown := without_times(run)):
        console.say(f"attempt {', '.join(map(str, unknown))}: no times were kept, each rank's lines stand together")
    return 0


def cancel_runs(args: argparse.Namespace, console: Console) -> int:
    """`runner cancel`: end runs, and print which."""
    from runner.runs import cancelling, history

    folder = _runs_folder(args)
    runs = [history.find_run(word, folder) for word in args.runs]
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
        where=args.where, command=args.rest, site=args.site, engine=args.engine, overrides=_overrides(args),
        terminal=sys.stdin.isatty() and sys.stdout.isatty(),
    )  # fmt: skip
    with shell.prepared(request, project, os.environ, console, dry_run=args.dry_run) as call:
        if args.dry_run:
            console.answer(call.text)
            return 0
        return process.attached(call.argv, env=call.env, cwd=call.cwd)
