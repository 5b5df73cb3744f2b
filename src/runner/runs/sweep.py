"""`launch --sweep NAME=VALUE,VALUE`: one launch that creates a run for each combination of values, as one array job.

Each combination is a separate run with its own folder, checkpoints, lock and metrics, so that every command (logs, why,
diff, cancel, rerun) works as for any other run. The sweep itself is a folder with the script of the array and a link to
each run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from runner.errors import RunnerError
from runner.machine import files, folders, sessions
from runner.machine.report import Report
from runner.runs import after, budget, snapshot, submit
from runner.runs.plan import RunPlan
from runner.runs.run import Run, save
from runner.runs.schedulers.scheduler import scheduler_of
from runner.runs.secrets import write_record

ARRAY = "array.sbatch"
ARRAY_TASK = "SLURM_ARRAY_TASK_ID"
"""the parameter of a run that is a task of the user's own array"""
MOST = 1000
"""the largest number of runs in a sweep; Slurm's own limit, MaxArraySize, is 1001 by default"""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Sweep:
    """The parameters that vary, and their values."""

    axes: Mapping[str, tuple[str, ...]]
    at_once: int | None = None
    """how many may run at the same time; None: no limit"""

    @property
    def combinations(self) -> tuple[dict[str, str], ...]:
        """All combinations of values; the last parameter varies fastest."""
        return tuple(
            dict(zip(self.axes, values, strict=True))
            for values in itertools.product(*self.axes.values())
        )


def parse(words: Sequence[str], at_once: int | None) -> Sweep | None:
    """Parse the values of --sweep; None if there are none. Raises RunnerError for invalid text."""
    axes: dict[str, tuple[str, ...]] = {}
    for word in words:
        name, equals, text = word.partition("=")
        values = tuple(text.split(","))
        if not equals or not _NAME.fullmatch(name) or "" in values:
            raise RunnerError(
                f"cannot read --sweep {word!r}",
                "a sweep must be NAME=VALUE,VALUE: a name, `=`, and values separated by commas",
                "--sweep learning_rate=1e-5,2e-5 --sweep seed=1,2,3",
                exit_code=2,
            )
        if name in axes or len(set(values)) != len(values):
            raise RunnerError(
                f"--sweep {word!r} repeats {'a name' if name in axes else 'a value'}",
                "a sweep runs each combination of values only once",
                f"give {name} once, with all its values"
                if name in axes
                else "leave out the repeated value",
                exit_code=2,
            )
        axes[name] = values
    if at_once is not None and (at_once < 1 or not axes):
        raise RunnerError(
            f"--at-once {at_once} cannot be used here",
            "--at-once needs --sweep, and its value must be 1 or more",
            "--sweep NAME=VALUE,VALUE --at-once 2",
            exit_code=2,
        )
    sweep = Sweep(axes, at_once) if axes else None
    if sweep and len(sweep.combinations) > MOST:
        raise RunnerError(
            f"the sweep has too many combinations: {len(sweep.combinations)}",
            f"a sweep can have at most {MOST} runs",
            "sweep over fewer values at a time",
        )
    return sweep


def with_values(plan: RunPlan, values: Mapping[str, str]) -> RunPlan:
    """The plan for one combination: `{name}` in the command is replaced.

    Without such a placeholder, the value becomes `--name VALUE`, or a variable of a user's own batch script.
    """
    from runner.runs.megatron import NOT_SWEPT  # few sweeps need it

    for name in values if plan.job.check_arguments else ():
        if name in NOT_SWEPT:
            raise RunnerError(
                f"--sweep does not work with {name}",
                f"runner turns --{name} into Megatron's arguments once, not for each run of a sweep",
                f"launch each value by itself: runner launch … -- --{name} …",
            )
    job, others = plan.job, dict(values)
    for name, value in values.items():
        place = f"{{{name}}}"
        if any(place in word for word in (*job.command, *job.arguments)):
            job = job.filled(place, value)
            del others[name]
    return plan.with_values(job, others)


def new_notes(plan: RunPlan, plans: Iterable[RunPlan]) -> tuple[str, ...]:
    """The notes of a sweep's runs that the plan without their values does not have."""
    found = dict.fromkeys(note for one in plans for note in one.notes)
    return tuple(note for note in found if note not in plan.notes)


def submit_sweep(
    plan: RunPlan,
    sweep: Sweep | None,
    runs: Path,
    command_line: Sequence[str],
    report: Report,
    tags: Sequence[str] = (),
    tasks: Sequence[int] = (),
) -> tuple[str, tuple[Run, ...]]:
    """Create and start the runs; returns the name of the sweep and its runs. On any failure, everything is removed.

    Without a sweep, the plan's batch script is an array itself: each of its `tasks` is a run.
    """
    plan = submit.checked(plan, runs, report)
    waits = after.still_pending(plan.waits)
    plans = {str(task): (plan, {ARRAY_TASK: str(task)}) for task in tasks}
    for number, values in enumerate(sweep.combinations if sweep else ()):
        plans[str(number)] = (with_values(plan, values), values)
    for note in new_notes(plan, [one for one, _ in plans.values()]):
        report.warn(note)
    at_once = sweep.at_once if sweep else None
    budget.check(plan.budget, runs, plan.most_gpu_hours, len(plans), at_once)
    folder = folders.take_numbered(runs, f"{plan.job.name[:50]}-{'sweep' if sweep else 'array'}")
    made: list[Run] = []
    with ExitStack() as undo:
        undo.callback(folders.remove, folder)
        for link, (one, values) in plans.items():
            run = submit.made(
                one, runs, command_line, report, tags, sweep=folder.name, parameters=values
            )
            undo.callback(folders.remove, run.folder)
            made.append(run)
            files.link(folder / link, f"../{run.name}")
        if sweep:
            write_record(folder / ARRAY, plan.array_script(ARRAY, len(made), at_once))
        else:
            folders.fill(folder, plan.files)
            if plan.in_snapshot:  # all tasks run in the same folder
                snapshot.store_files(plan.snapshot, folder, shared=False)
        with sessions.uninterrupted():
            started = scheduler_of(plan.site.scheduler).start_sweep(
                folder, made, waits, at_once, report
            )
            undo.pop_all()
            for run in started:
                save(run)
    return folder.name, started
