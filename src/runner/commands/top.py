"""top: what the nodes of a running run use."""

from __future__ import annotations

import argparse

from runner.commands.console import Console
from runner.commands.options import runs_folder
from runner.errors import RunnerError
from runner.machine import files
from runner.runs.attempt import NodeUsage
from runner.runs.run import find_run
from runner.runs.status import RunStatus, ask


def show_top(args: argparse.Namespace, console: Console) -> int:
    """`runner top`: one line per node, from the newest sample of each."""
    status = ask([find_run(args.run_word or "last", runs_folder(args.site))])[0]
    attempt = status.run.newest
    found: tuple[NodeUsage, ...] = ()
    if attempt is not None and attempt.exit_code is None and status.may_be_active:
        with files.explained(f"read {attempt.folder}/usage"):
            found = attempt.usage
    if not found:
        raise _no_samples(status)
    if args.json:
        nodes = [each.record() for each in found]
        console.answer_json({"run": status.run.name, "attempt": status.attempt, "nodes": nodes})
        return 0
    gpus = any(each.gpus or each.gpu_error for each in found)
    header = ("NODE", *(("GPU %", "GPU MEMORY") if gpus else ()), "CPU %", "MEMORY", "AGE")
    console.table(header, [_row(each, gpus=gpus) for each in found])
    if len(found) < status.run.nodes:
        console.say(f"nodes with samples: {len(found)}; requested: {status.run.nodes}")
    return 0


def _row(usage: NodeUsage, *, gpus: bool) -> tuple[str, ...]:
    memory = _memory(usage.memory_used_mib, usage.memory_total_mib)
    fullest = max(usage.gpus, key=lambda gpu: gpu.memory_used_mib or 0, default=None)
    cells = (
        usage.gpu_error or " ".join(_text(gpu.percent) for gpu in usage.gpus),
        _memory(fullest.memory_used_mib, fullest.memory_total_mib) if fullest else "",
    )
    return (
        usage.node,
        *(cells if gpus else ()),
        _text(usage.cpu_percent),
        f"{memory} (job)" if usage.memory_of == "job" else memory,
        f"{usage.age_seconds}s",
    )


def _text(number: int | None) -> str:
    return "?" if number is None else str(number)


def _memory(used: int | None, total: int | None) -> str:
    return "?" if used is None or total is None else f"{used / 1024:.1f}/{total / 1024:.1f} GiB"


def _no_samples(status: RunStatus) -> RunnerError:
    """The error that says why there is nothing to show."""

    run, attempt = status.run, status.run.newest
    what = f"{run.name} is not running"
    why = f"its state is {status.state}" + (f": {status.reason}" if status.reason else "")
    fix = f"runner why {run.name}"
    if status.active and (attempt is None or attempt.exit_code is not None):
        what = f"{run.name} {'waits for its next attempt' if attempt else 'has not started'}"
        fix = f"runner watch {run.name}"
    elif status.active and attempt and attempt.outputs:
        what = f"{run.name} has no usage samples"
        why = "your own batch script starts the tasks, and runner samples only the tasks that runner itself starts"
        fix = f"srun --jobid={attempt.job_id} --overlap --nodes=1 --pty top"
    elif status.active and attempt:
        what = f"{run.name} has no usage samples yet"
        why = f"attempt {attempt.number} has run for {attempt.elapsed}, and no node has sent a sample:"
        why += " the program has not started, or the image lacks sleep, date or mv"
        fix = f"runner logs -f {run.name}"
    return RunnerError(what, why, fix)
