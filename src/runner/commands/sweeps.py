"""`launch --sweep`: what is printed about a sweep."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from runner.commands.console import Console
    from runner.runs.launch import RunPlan
    from runner.runs.sweep import Sweep


def of(args: argparse.Namespace) -> Sweep | None:
    """The sweep that a command line of `launch` asks for."""
    from runner.errors import RunnerError
    from runner.runs.sweep import parse

    sweep = parse(args.sweep, args.at_once)
    if sweep is not None and args.wait:
        raise RunnerError(
            "--wait shows one run, and a sweep has many", "their output would mingle",
            "runner watch $(runner launch --sweep …)", exit_code=2,
        )  # fmt: skip
    if sweep is not None and args.chain:
        raise RunnerError(
            "--sweep and --chain do not go together", "a chain is of one run, and a sweep is one array job",
            "[restart] in the job file: each run of the sweep goes on by itself", exit_code=2,
        )  # fmt: skip
    return sweep


def explain(plan: RunPlan, sweep: Sweep, console: Console) -> RunPlan:
    """Say what the runs of a sweep would be; returns the plan of the first."""
    from runner.runs.sweep import ARRAY, array_script, with_values

    for number, values in enumerate(sweep.combinations):
        console.say(f"task {number}: " + ", ".join(f"{name} = {value}" for name, value in values.items()))
    first = with_values(plan, sweep.combinations[0])
    if plan.site.scheduler == "slurm":
        console.say(f"{ARRAY}:\n{array_script(first, len(sweep.combinations), sweep.at_once)}")
    console.say("on stdout the script of task 0:")
    return first


def launch(plan: RunPlan, sweep: Sweep, runs: Path, args: argparse.Namespace, console: Console) -> int:
    """Start the runs; print the sweep's name."""
    from runner.runs.sweep import submit_sweep

    name, made = submit_sweep(plan, sweep, runs, sys.argv[1:], console, args.tag)
    console.say(
        f"{name}: {len(made)} runs, {made[0].name} to {made[-1].name}, jobs {made[0].job_id} to {made[-1].job_id}"
    )
    console.say(f"its table: runner status {name}")
    if args.json:
        console.answer_json({"sweep": name, "runs": [
            {"run": run.name, "job_id": run.job_id, "parameters": run.parameters} for run in made]})  # fmt: skip
    else:
        console.answer(made[0].job_id.partition("_")[0] if args.parsable else name)
    return 0
