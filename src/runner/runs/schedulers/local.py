"""No scheduler: the batch script runs on this machine, in its own process session."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.environments.environment import Attachment
from runner.errors import RunnerError
from runner.machine import files, process, sessions
from runner.machine.report import Report
from runner.runs.job import Job
from runner.runs.schedulers.scheduler import JobStatus, from_exit_code
from runner.runs.schedulers.template import render
from runner.site import Site

if TYPE_CHECKING:
    from runner.runs.run import Dependencies, Run

PROGRAMS: tuple[str, ...] = ()
BY_HAND = "bash job.sbatch >> job.log 2>&1"
STATE_SOURCE = "run.json"
PAUSES = (0.5, 0.5)
GRACE_SECONDS = 20.0  # between SIGTERM and SIGKILL, so that a job can save and exit


def script(job: Job, attachment: Attachment, site: Site) -> str:
    """The batch script; `cd RUN && bash job.sbatch` runs it. payload/processes.sh replaces srun."""
    step = (f"bash payload/processes.sh {job.tasks}",)
    return render(job, attachment, site, directives=(), step=step)


def version() -> dict[str, str]:
    """Empty, because there is no scheduler."""
    return {}


def check_options(options: Iterable[str], report: Report) -> None:
    """Nothing to check, because there are no options."""


def start(run: Run, waits: Dependencies, report: Report) -> Run:
    """Start the batch script on this machine, in its own session, and return the run with its process."""
    from runner.runs.run import WAITS  # slow to import, and a dry run has no run

    argv: tuple[str, ...] = ("bash", "job.sbatch")
    if waits.runs:
        files.write(run.folder / WAITS, " ".join(each.name for each in waits.runs) + "\n")
        argv = (
            "bash",
            "payload/after.sh",
        )  # and for each run: a kind, its process id and its folder
        for kind, others in (("ok", waits.succeeded), ("any", waits.ended)):
            for other in others:
                argv += (kind, other.job_id.removeprefix("local-"), str(other.folder))
    pid = process.detached(argv, run.log, cwd=run.folder)
    return replace(
        run.with_jobs(f"local-{pid}"), host=os.uname().nodename, process=sessions.identity(pid)
    )


def start_sweep(
    folder: Path, runs: Sequence[Run], waits: Dependencies, at_once: int | None, report: Report
) -> tuple[Run, ...]:
    """Start the runs. Each waits until the run `at_once` positions before it (default: 1) has ended, in any way.

    If one cannot be started, the others are ended.
    """
    started: list[Run] = []
    try:
        for number, run in enumerate(runs):
            before = (started[number - (at_once or 1)],) if number >= (at_once or 1) else ()
            started.append(start(run, waits._replace(ended=(*waits.ended, *before)), report))
    except BaseException:
        for run in reversed(started):  # those that wait first: they would start
            with suppress(RunnerError):  # the error that made it necessary is the one to see
                cancel([(run, ())], report)
        raise
    return tuple(started)


def start_chain(run: Run, links: int) -> Run:
    """The run, unchanged. checks.py rejects a chain, because without a scheduler there is no time limit."""
    return run


def statuses(runs: Sequence[Run]) -> Sequence[tuple[Run, JobStatus]]:
    """Each run with its status, from its processes and its folder."""
    return [(run, _status(run)) for run in runs]


def _status(run: Run) -> JobStatus:
    from runner.runs.run import (
        WAITS,
        is_cancelled,
        is_over,
    )  # slow to import, and a dry run has no run

    alive = is_alive(run)
    # read after the processes were checked, because they may just have ended
    code = run.newest.exit_code if run.newest else None
    if code is not None and is_over(run) and (not alive or _leads(run)):
        return from_exit_code(run, code)
    if code is None and run.host not in ("", os.uname().nodename):
        return JobStatus(
            "UNKNOWN",
            f"the run has no scheduler: run `runner status` on {run.host}",
            nodes=run.host,
        )
    if alive and not run.attempts and (waits := run.text(WAITS)):
        return JobStatus("PENDING", f"waits for {waits}", nodes=run.host)
    if alive:
        return JobStatus(
            "RUNNING", nodes=run.host, elapsed=run.newest.elapsed if run.newest else ""
        )
    if code is not None:
        return from_exit_code(run, code)
    if is_cancelled(run):
        return JobStatus("CANCELLED", run.cancel_reason, nodes=run.host)
    if why := run.text("not-started"):
        return JobStatus("CANCELLED", f"not started: {why}", nodes=run.host)
    return JobStatus(
        "LOST", "its processes have ended and wrote no exit code (killed?)", nodes=run.host
    )


def is_alive(run: Run) -> bool:
    """Whether a run's script, or a process that it started, still runs on this machine.

    The kernel does not reuse a session id while a process of the session exists.
    """
    if _by_hand(run):
        return _leads(run)
    now = sessions.identity(_pid(run))
    return bool(run.process) and (
        now == run.process or (not now and bool(sessions.members(_pid(run))))
    )


def _leads(run: Run) -> bool:
    """Whether the batch script itself still runs."""
    pid = _pid(run)
    try:
        return (
            Path(f"/proc/{pid}/cwd").samefile(run.folder)
            if _by_hand(run)
            else sessions.identity(pid) == run.process
        )
    except OSError:
        return False


def _by_hand(run: Run) -> bool:
    """Whether a user started the newest attempt with `bash job.sbatch` in the run folder."""
    return len(run.job_ids) > 1


def _pid(run: Run) -> int:
    """The process id in `local-PID`."""
    return int(run.job_id.removeprefix("local-"))


def work_folders() -> tuple[set[Path], str]:
    """No folders, because there is no queue."""
    return set(), ""


def explain_cancel(runs: Sequence[Run]) -> Iterator[str]:
    """The commands that end these runs."""
    for run in runs:
        if run.job_id:
            yield f"kill -TERM -- -{_pid(run)}"


def cancel(jobs: Sequence[tuple[Run, tuple[str, ...]]], report: Report) -> None:
    """End the processes of each run: SIGTERM, then SIGKILL."""
    for run, _ in jobs:
        if _by_hand(run):
            _end_by_hand(run, report)
            continue
        pid = _pid(run)
        report.detail(
            f"{run.name}: sending SIGTERM to its processes, and SIGKILL after {GRACE_SECONDS:.0f} s"
        )
        if not sessions.end(pid, GRACE_SECONDS):
            raise RunnerError(
                f"cannot end {run.name}",
                f"SIGKILL does not end the processes of session {pid}: they wait for a disk, or belong to another user",
                f"list the processes: ps -s {pid}",
            )


def _end_by_hand(run: Run, report: Report) -> None:
    """End a script that a user started. Its session is that of the user's shell, so signal only the script."""
    pid = _pid(run)
    report.detail(
        f"{run.name}: sending SIGTERM to process {pid}, and waiting {GRACE_SECONDS:.0f} s for its end"
    )
    deadline = time.monotonic() + GRACE_SECONDS
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGTERM)
    while _leads(run):
        if time.monotonic() > deadline:
            raise RunnerError(
                f"cannot end {run.name}",
                f"process {pid}, which you started yourself, has not ended {GRACE_SECONDS:.0f} s after SIGTERM",
                f"if it saves, wait: runner status {run.name}; "
                f"to end it at once, and lose what is not saved: kill -KILL {pid}",
            )
        time.sleep(0.1)
