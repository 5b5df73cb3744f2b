"""launch."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from runner.commands.console import Console, LogFilter, say_end
from runner.commands.options import settings
from runner.errors import RunnerError
from runner.project import Project, find_project
from runner.runs.budget import estimate
from runner.runs.launch import prepare
from runner.runs.plan import Request, Row, RunPlan

TYPE_CHECKING = False  # not typing's: importing it costs a millisecond
if TYPE_CHECKING:
    from typing import Any

    from runner.runs.run import Run
    from runner.runs.schedulers.scheduler import Forecast
    from runner.runs.sweep import Sweep


def launch_request(args: argparse.Namespace) -> Request:
    """The request that the command line of `launch` makes."""
    return Request(
        job=args.job,
        env=args.env,
        script=args.script,
        words=args.rest,
        site=args.site,
        engine=args.engine,
        given=settings(args),
        dry_run=args.dry_run,
        from_snapshot=args.from_snapshot,
        after=tuple(args.after),
        after_any=tuple(args.after_any),
    )


def launch_run(args: argparse.Namespace, console: Console) -> int:
    """`runner launch`: print the run's name, or, with --dry-run, the batch script."""
    project = find_project()
    if args.ask and not args.dry_run:
        what = "--ask is given without --dry-run"
        raise RunnerError(
            what,
            "--ask only asks Slurm about the job, and never submits it",
            "runner launch … --dry-run --ask",
            exit_code=2,
        )
    sweep = None
    if args.sweep or args.at_once is not None:
        from runner.runs.sweep import parse  # slow, and most launches have no sweep

        sweep = parse(args.sweep, args.at_once)
    make_image = None
    if args.build and not args.dry_run:
        from runner.commands.build import image_maker

        make_image = image_maker(project, os.environ, console)
    plan = prepare(launch_request(args), project, os.environ, console, make_image)
    tasks = _array_tasks(plan, args)
    if args.ask:
        for note in plan.notes:
            console.warn(note)
        return _forecast(plan, args, console)
    if args.dry_run:
        if sweep is not None:
            plan = _explain_sweep(plan, sweep, console)
        for line in explain(plan, os.environ, project):
            console.say(line)
        for note in plan.notes:
            console.warn(note)
        sys.stdout.flush()
        # bytes, so that no newline is added or changed
        sys.stdout.buffer.write(plan.script.encode(errors="surrogateescape"))
        sys.stdout.buffer.flush()
        _test_submission(plan, console)
        return 0
    runs = plan.site.runs(os.environ, project)
    for note in plan.notes:
        console.warn(note)
    if not _confirmed(
        plan, console, yes=args.yes, runs=len(sweep.combinations) if sweep else len(tasks) or 1
    ):
        return 1
    if sweep is not None or tasks:
        return _launch_sweep(plan, sweep, tasks, runs, args, console)
    from runner.runs.submit import submit

    run = submit(plan, runs, args.typed, console, args.tag)
    console.say(f"{run.name}: job {run.job_id}, in {run.folder}")
    if not args.wait:
        console.say(f"next: runner logs -f {run.name}")
    if args.json:
        from runner.runs.status import ask

        console.answer_json(ask([run])[0].record())
    else:
        console.answer(run.job_id if args.parsable else run.name)
    sys.stdout.flush()  # a caller that waits for the name must not wait for the job
    return _wait(run, console) if args.wait else 0


def _test_submission(plan: RunPlan, console: Console) -> None:
    """Raise RunnerError for a user's own batch script that this cluster's Slurm would reject."""
    forecast = _ask(plan) if plan.tried else None
    if forecast is not None and forecast.start:
        console.say(f"estimated start: {forecast.start}")
    elif forecast is not None and forecast.accepted is None:
        console.warn(
            f"Slurm was not asked whether it accepts the job: {forecast.why.splitlines()[-1]}"
        )
    elif forecast is not None and not forecast.accepted:
        from runner.runs.schedulers import slurm

        raise slurm.refused(forecast.why)


def _ask(plan: RunPlan) -> Forecast | None:
    """What this machine's Slurm says about the job, which is not submitted; None without sbatch."""
    if not shutil.which("sbatch"):
        return None
    from runner.runs.schedulers import slurm

    return slurm.ask(*plan.trial())


def _forecast(plan: RunPlan, args: argparse.Namespace, console: Console) -> int:
    """`--dry-run --ask`: print whether the cluster would accept the job, and when it would start."""
    from runner.runs.schedulers.scheduler import Forecast

    forecast = Forecast(True, "now") if plan.site.is_local else _ask(plan)
    forecast = forecast or Forecast(None, why="there is no sbatch on this machine")
    start, _, nodes = forecast.start.partition(" on ")
    row = {
        "site": plan.site.name,
        "accepted": forecast.accepted,
        "start": start or None,
        "nodes": nodes or None,
        "why": forecast.why or None,
    }
    if args.json:
        console.answer_json(row)
    else:
        console.table(("SITE", *FORECAST), [(plan.site.name, *forecast_cells(row))], wrap=True)
    return 0 if forecast.accepted else 1


FORECAST = ("ACCEPTED", "START", "NODES", "WHY")


def forecast_cells(row: Mapping[str, Any] | None) -> tuple[str, str, str, str]:
    """The cells below FORECAST of what `launch --dry-run --ask --json` prints; None: it printed nothing."""
    row = row or {}
    accepted = {True: "yes", False: "no"}.get(row.get("accepted"), "no answer")  # type: ignore[arg-type]
    return (
        accepted,
        row.get("start") or "-",
        row.get("nodes") or "-",
        " ".join((row.get("why") or "").split()),
    )


def _confirmed(plan: RunPlan, console: Console, *, yes: bool, runs: int) -> bool:
    """Whether the user accepts the cost. Raises RunnerError if there is no terminal to ask on."""
    cost, limit = estimate(plan.job), plan.site.confirm_gpu_hours
    if cost is None:
        return True
    console.say(f"cost of this launch: {cost.text(runs)}")
    most = cost.most * runs
    if yes or limit is None or most <= limit:
        return True
    what = f"this launch may take {most:,.0f} GPU hours; site {plan.site.name} requires confirmation above {limit:,}"
    return console.confirm(
        what,
        "confirm with --yes, or ask for fewer nodes, less time or fewer restarts",
    )


def _wait(run: Run, console: Console) -> int:
    """Show the output on stderr until the run has ended, and return its exit code. Ctrl-C does not cancel the job."""
    from runner.runs.follow import Following, Tail, follow, result_code
    from runner.runs.schedulers.slurm_commands import SUBMIT

    printable = LogFilter()

    def show(data: bytes) -> None:
        sys.stderr.buffer.write(printable(data))
        sys.stderr.buffer.flush()

    try:
        own = (
            run.folder / SUBMIT
        ).is_file()  # a user's own batch script may have a file for errors too
        status = follow(run, Following(run) if own else Tail(run.log), show, console)
    except KeyboardInterrupt:
        console.say(
            f"\n{run.name} keeps running; output: runner logs -f {run.name}; to end: runner cancel {run.name}"
        )
        raise
    say_end(status, console)
    return result_code(status)


_FILES_SHOWN = 12


def explain(plan: RunPlan, environ: Mapping[str, str], project: Project) -> Iterator[str]:
    """The lines for stderr: the submit command, and the origin of every value."""
    try:
        runs = str(plan.site.runs(environ, project))
    except RunnerError:  # the path contains a variable that is defined only on the site
        runs = str(plan.site.run_folder)
    yield from plan.by_hand(runs)
    if (cost := estimate(plan.job)) is not None:
        yield f"cost: {cost.text(len(plan.array_tasks) or 1)}"
    yield f"{plan.rows_title}, and where each comes from:"
    yield from _columns([row._replace(source=_short(row.source, project)) for row in plan.rows()])
    yield from _code(plan)


def _short(source: str, project: Project) -> str:
    """The source with paths relative to the project, and `shipped:` for the files that come with runner."""
    if project.root is not None:
        source = source.replace(f"{project.root}/", "")
    return source.replace(f"{project.shipped}/", "shipped:")


def _columns(rows: Sequence[Row]) -> Iterator[str]:
    first = max((len(name) for name, _, _ in rows), default=0)
    second = min(48, max((len(value) for _, value, _ in rows), default=0))
    for name, value, source in rows:
        yield f"  {name:<{first}}  {value:<{second}}  {source}".rstrip()


def _code(plan: RunPlan) -> Iterator[str]:
    taken = plan.snapshot
    size = (
        f"{taken.size_bytes / 1e6:.1f} MB"
        if taken.size_bytes >= 100_000
        else f"{taken.size_bytes} bytes"
    )
    where = f" of {plan.program.main}" if plan.program.main else ""
    yield f"code snapshot{where}: {len(taken.files)} files, {size}"
    if taken.git is not None:
        state = "clean"
        if taken.git.dirty:
            state = (
                f"{len(taken.git.modified)} modified and {len(taken.git.untracked)} untracked files"
            )
        yield f"  commit {taken.git.commit or '(none yet)'}, {state}"
    if taken.git is None:
        folders = Counter(
            name.partition("/")[0] + "/" if "/" in name else "at the top" for name in taken.files
        )
        if folders:
            yield "  " + ", ".join(
                f"{count} {name}" for name, count in folders.most_common(_FILES_SHOWN)
            )
        return
    marks = {name: "modified" for name in taken.git.modified} | {
        name: "untracked" for name in taken.git.untracked
    }
    changed = [name for name in taken.files if name in marks]
    for name in changed[:_FILES_SHOWN]:
        yield f"  {name} ({marks[name]})"
    if len(changed) > _FILES_SHOWN:
        yield f"  and {len(changed) - _FILES_SHOWN} more"


def _explain_sweep(plan: RunPlan, sweep: Sweep, console: Console) -> RunPlan:
    """Print the runs that a sweep would have, and return the plan of the first one."""
    from runner.runs.sweep import ARRAY, new_notes, with_values

    plans = [with_values(plan, values) for values in sweep.combinations]
    for number, values in enumerate(sweep.combinations):
        console.say(
            f"task {number}: " + ", ".join(f"{name} = {value}" for name, value in values.items())
        )
    first = replace(plans[0], notes=(*plan.notes, *new_notes(plan, plans)))
    if not plan.site.is_local:
        text = first.array_script(ARRAY, len(sweep.combinations), sweep.at_once)
        console.say(f"{ARRAY}:\n{text}")
    console.say("the batch script of the sweep's task 0 follows on stdout:")
    return first


def _array_tasks(plan: RunPlan, args: argparse.Namespace) -> tuple[int, ...]:
    """The tasks of a batch script that is an array; empty for all other jobs."""
    tasks = plan.array_tasks
    if args.chain and (args.sweep or tasks):
        what = f"--chain does not work with {'--sweep' if args.sweep else 'an array'}"
        raise RunnerError(
            what,
            "a chain belongs to a single run",
            "use --restart, or [restart] in the job file",
            exit_code=2,
        )
    if args.sweep and tasks:
        origin = next(row.source for row in plan.rows() if row.name == "--array")
        what = f"{origin}: --sweep does not work with an array"
        raise RunnerError(
            what,
            "each task of an array is a run already",
            "leave out --sweep or --array",
            exit_code=2,
        )
    return tasks


def _launch_sweep(
    plan: RunPlan,
    sweep: Sweep | None,
    tasks: tuple[int, ...],
    runs: Path,
    args: argparse.Namespace,
    console: Console,
) -> int:
    """Start the runs; print the name of the sweep or array. With --wait, return the highest exit code."""
    from runner.runs.sweep import submit_sweep

    name, made = submit_sweep(plan, sweep, runs, args.typed, console, args.tag, tasks)
    console.say(
        f"{name}: {len(made)} runs, {made[0].name} to {made[-1].name}, jobs {made[0].job_id} to {made[-1].job_id}"
    )
    console.say(f"next: runner status {name}")
    if args.json:
        console.answer_json(
            {
                "sweep": name,
                "runs": [
                    {"run": run.name, "job_id": run.job_id, "parameters": run.parameters}
                    for run in made
                ],
            }
        )
    else:
        console.answer(made[0].job_id.partition("_")[0] if args.parsable else name)
    sys.stdout.flush()
    if not args.wait:
        return 0
    from runner.runs.follow import result_code
    from runner.runs.run import reloaded
    from runner.runs.status import watch

    last = watch(lambda: tuple(map(reloaded, made)))
    for status in last:
        say_end(status, console)
    return max(map(result_code, last))
