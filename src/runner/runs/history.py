"""Past launches, read from their folders (fast even for ten thousand) and, for unfinished runs, from `status`."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from runner.errors import RunnerError
from runner.machine import files
from runner.runs.attempt import Attempt
from runner.runs.run import CANCELLED, PREPARING, Run, is_cancelled, is_over
from runner.runs.schedulers.scheduler import ACTIVE

if TYPE_CHECKING:
    from runner.runs.status import RunStatus

STATES = (
    "PREPARING",
    "PENDING",
    "RUNNING",
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "PREEMPTED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "LOST",
    "UNKNOWN",
    *sorted(ACTIVE - {"PENDING", "RUNNING"}),
)
"""the states of `runner status`"""
_REMEMBERED_SECONDS = (
    900  # for this long after a job's end, Slurm may know more than the run folder (MinJobAge)
)
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@dataclass(frozen=True)
class Launch:
    """A launch, as its folder describes it."""

    run: Run
    state: str
    """one of STATES; PENDING or RUNNING if the folder contains no exit code"""
    exit_code: int | None
    """of the newest attempt"""
    attempts: int
    script: str
    """the script's path in the project; empty for a command, or if the lock is missing"""
    command: tuple[str, ...]
    settled: bool = True
    """whether the folder completely describes how the run ended"""

    @property
    def program(self) -> str:
        """The script, or else the command as typed in a shell."""
        return self.script or shlex.join(self.command)

    def record(self) -> dict[str, object]:
        """What --json prints."""
        run = self.run
        return {
            "run": run.name,
            "job": run.job,
            "environment": run.environment,
            "script": self.script,
            "command": list(self.command),
            "site": run.site,
            "state": self.state,
            "exit_code": self.exit_code,
            "created": run.created,
            "attempts": self.attempts,
            "job_ids": list(run.job_ids),
            "image": run.image,
            "tags": list(run.tags),
            "sweep": run.sweep,
            "parameters": dict(run.parameters),
            "after": list(run.after),
            "nodes": run.nodes,
            "rungs": list(run.rungs),
            "folder": str(run.folder),
        }


@dataclass(frozen=True)
class Filters:
    """Which launches to show. An empty value matches all. Words may be patterns: `*`, `?`, `[...]`."""

    env: str = ""
    script: str = ""
    """the script's path, file name or stem, or the first word of the command"""
    job: str = ""
    """the name of the job of the run or its sweep"""
    tags: tuple[str, ...] = ()
    """the run must have all of these"""
    site: str = ""
    states: tuple[str, ...] = ()
    since: datetime | None = None

    def passes_record(self, run: Run) -> bool:
        """Whether run.json matches. If it does not, no other file of the folder needs to be read."""
        return (
            _matches(self.env, run.environment)
            and (_matches(self.job, run.job) or self.job == run.sweep)
            and all(any(_matches(tag, own) for own in run.tags) for tag in self.tags)
            and self.site in ("", run.site)
            and (self.since is None or (run.launched or 0) >= self.since.timestamp())
        )

    def passes(self, launch: Launch) -> bool:
        """Whether the state and the script match."""
        return (not self.states or launch.state in self.states) and (
            not self.script or self._is_script(launch)
        )

    def _is_script(self, launch: Launch) -> bool:
        path = PurePosixPath(launch.script or (launch.command[0] if launch.command else ""))
        return any(_matches(self.script, name) for name in (str(path), path.name, path.stem))


def find(runs: Sequence[Run], filters: Filters) -> Iterator[Launch]:
    """The launches that match the filters, in the given order."""
    found = [look(run) for run in runs if filters.passes_record(run)]
    now: dict[str, RunStatus] = {}
    # the scheduler, or this machine, may know more about these than the run folder
    if unsettled := [launch.run for launch in found if not launch.settled]:
        from runner.runs.status import ask

        now = {status.run.name: status for status in ask(unsettled)}
    for launch in found:
        status = now.get(launch.run.name)
        launch = (
            replace(launch, state=status.state, exit_code=status.exit_code) if status else launch
        )
        if filters.passes(launch):
            yield launch


def look(run: Run) -> Launch:
    """Read a launch from its run folder."""
    attempts = run.attempts
    newest = attempts[-1] if attempts else None
    code = newest.exit_code if newest else None
    script, command = _program(f"{run.folder}/lock.toml")
    state = _state(run, newest, code)
    forgotten = (
        newest and time.time() - (newest.time("exit_code") or 0.0) > _REMEMBERED_SECONDS
    )  # by the scheduler
    settled = state in ("PREPARING", "COMPLETED") or bool(
        forgotten and code is not None and is_over(run)
    )
    return Launch(run, state, code, len(attempts), script, command, settled)


def _state(run: Run, newest: Attempt | None, code: int | None) -> str:
    if run.state == PREPARING or not run.job_ids:
        return "PREPARING"
    if (
        is_cancelled(run)
        if run.state == CANCELLED
        else newest is not None and newest.cause == "cancelled"
    ):
        return "CANCELLED"  # whatever its exit code: a program that saved on the signal ends with 0
    if code is not None:
        return "FAILED" if code else "COMPLETED"
    return "RUNNING" if newest else "PENDING"


_PROGRAM = re.compile(
    r"^\[job\]\n(?:(?!\[).*\n)*?(script|batch|command) = (.*\n(?:    .*\n)*)", re.MULTILINE
)


def _program(lock: str) -> tuple[str, tuple[str, ...]]:
    """The script, or the command, from the table [job] of a lock.

    Does not use tomllib, which would take seconds for ten thousand locks. In a lock (lock.py writes it), strings and
    lists of strings are JSON, except for the comma after the last item.
    """
    try:
        found = _PROGRAM.search(files.content(lock).decode())
        value = json.loads(re.sub(r",\s*\Z", "]", found[2])) if found else ""
        return (value, ()) if isinstance(value, str) else ("", tuple(map(str, value)))
    except (OSError, ValueError, TypeError):
        return "", ()


def _matches(pattern: str, text: str) -> bool:
    return not pattern or pattern == text or fnmatchcase(text, pattern)


def parse_since(text: str, now: datetime, option: str = "--since") -> datetime:
    """The moment that `7d`, `12h`, `2026-11-01` or `2026-11-01T08:30` means. Raises RunnerError otherwise."""
    found = re.fullmatch(r"(\d{1,6})([mhdw])", text)
    try:
        if found:
            return now - timedelta(**{_UNITS[found[2]]: int(found[1])})
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise RunnerError(
            f"{option} {text!r} is not a time",
            "it must be an age (30m, 12h, 7d, 2w) or a date (2026-11-01, 2026-11-01T08:30)",
            f"{option} 7d",
            exit_code=2,
        ) from None
