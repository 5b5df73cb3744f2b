"""From a plan and a sweep to its runs: each folder written whole, then one array job. Nothing half-made stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from runner.machine import files, folders, sessions
from runner.machine.report import Report
from runner.runs.asking import dependencies
from runner.runs.asking.dependencies import Waits
from runner.runs.launch import RunPlan
from runner.runs.run import SUBMITTED, Run, save
from runner.runs.secrets import write_record
from runner.runs.submitting import submission
from runner.runs.submitting.sweep import ARRAY, Sweep, array_script, with_values


def submit(
    plan: RunPlan, sweep: Sweep, runs: Path, command_line: Sequence[str], report: Report, tags: Sequence[str] = ()
) -> tuple[str, tuple[Run, ...]]:
    """Make the runs and start them; returns the sweep's name and its runs. On any failure all is removed."""
    plan = submission.checked(plan, runs, report)
    waits = dependencies.open_ones(plan.waits)
    folder = folders.take_numbered(runs, f"{plan.job.name[:50]}-sweep")
    made: list[Run] = []
    submitted = False
    try:
        for number, values in enumerate(sweep.combinations):
            one = with_values(plan, values)
            run = submission.made(one, runs, command_line, report, tags, sweep=folder.name, parameters=values)
            made.append(run)
            files.link(folder / str(number), f"../{run.name}")
        write_record(folder / ARRAY, array_script(plan, len(made), sweep.at_once))
        with sessions.uninterrupted():
            started = _start_local(made, waits, sweep.at_once or 1) if plan.site.scheduler == "local" else _sbatch(
                folder, made, waits, report
            )  # fmt: skip
            submitted = True
            for run in started:
                save(run)
        return folder.name, started
    except BaseException:
        if not submitted:
            for run in made:
                folders.remove(run.folder)
            folders.remove(folder)
        raise


def _sbatch(folder: Path, made: Sequence[Run], waits: Waits, report: Report) -> tuple[Run, ...]:
    job_id = submission.sbatch(folder, waits, report, ARRAY)
    report.detail(f"array job {job_id}")
    return tuple(replace(run, job_ids=(f"{job_id}_{n}",), state=SUBMITTED) for n, run in enumerate(made))


def _start_local(made: Sequence[Run], waits: Waits, at_once: int) -> tuple[Run, ...]:
    """Without a scheduler each waits for the one that came `at_once` places before it, however that ends."""
    started: list[Run] = []
    for number, run in enumerate(made):
        before = (started[number - at_once],) if number >= at_once else ()
        started.append(submission.start_local(run, replace(waits, anyhow=(*waits.anyhow, *before))))
    return tuple(started)
