"""Ending runs: scancel for those of Slurm, the process session for those of this machine."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from runner.errors import RunnerError
from runner.machine import files, process, sessions
from runner.machine.report import Report
from runner.runs.run import CANCELLED, STOP, Run, save, with_newest_job
from runner.runs.schedulers import slurm
from runner.runs.status import ask, by_hand, leads, local_pid

GRACE_SECONDS = 20.0  # between SIGTERM and SIGKILL, so that a job can save and end


def explain(runs: Sequence[Run]) -> Iterator[str]:
    """The commands that `cancel` would run."""
    runs = [with_newest_job(run) for run in runs]
    job_ids = tuple(job_id for run in runs if run.scheduler == "slurm" for job_id in run.job_ids)
    if job_ids:
        yield " ".join(slurm.cancel(job_ids))
    for run in runs:
        if run.scheduler == "local" and run.job_id:
            yield f"kill -TERM -- -{local_pid(run)}"


def cancel(runs: Sequence[Run], report: Report) -> tuple[tuple[Run, bool], ...]:
    """End those of the runs that are not over; returns each run and whether it was ended by us.

    A run is marked before its processes get a signal, so that `status` and `watch` know why it ends.
    """
    done: dict[str, bool] = {}
    found = [status for status in ask(runs) if status.active or status.state == "UNKNOWN"]
    active = [status.run for status in found]
    for run in active:
        if run.scheduler == "local" and run.host not in ("", platform.node()):
            raise RunnerError(
                f"cannot end {run.name} from this machine",
                f"it is running without a scheduler on {run.host}",
                f"on {run.host}: runner cancel {run.name}",
            )
    for run in active:
        save(replace(run, state=CANCELLED))
        files.write(run.folder / STOP, "runner cancel\n")  # no attempt follows, whatever the job file allows
    job_ids = tuple(
        job_id for status in found if status.run.scheduler == "slurm" for job_id in status.live or (status.run.job_id,)
    )
    if job_ids:
        process.run(slurm.cancel(job_ids), timeout_seconds=120)
    for run in active:
        if run.scheduler == "local":
            _end_local(run, report)
        done[run.name] = True
    return tuple((run, done.get(run.name, False)) for run in runs)


def _end_local(run: Run, report: Report) -> None:
    if by_hand(run):
        _end_by_hand(run, report)
        return
    report.detail(f"{run.name}: ending its processes, {GRACE_SECONDS:.0f} s at most")
    if not sessions.end(local_pid(run), GRACE_SECONDS):
        raise RunnerError(
            f"cannot end {run.name}",
            f"processes of session {local_pid(run)} survive SIGKILL: they wait for a disk, or belong to another user",
            f"list the processes: ps -s {local_pid(run)}",
        )


def _end_by_hand(run: Run, report: Report) -> None:
    """End a script started by hand: its session is the shell's, so only the script itself gets the signal."""
    pid = local_pid(run)
    report.detail(f"{run.name}: ending process {pid}, {GRACE_SECONDS:.0f} s at most")
    deadline = time.monotonic() + GRACE_SECONDS
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGTERM)
    while leads(run):
        if time.monotonic() > deadline:
            raise RunnerError(
                f"cannot end {run.name}",
                f"process {pid}, which you started yourself, ignores SIGTERM or belongs to another user",
                f"kill -KILL {pid}",
            )
        time.sleep(0.1)
