"""A cause: how to recognize it in a log, what it means, and how to fix it. causes/*.toml has all causes, by subject."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "causes"
CAUSE, EXCEPTION, SYMPTOM, SUMMARY, SLOW = "cause", "exception", "symptom", "summary", "slow"
PENDING, EXIT = "pending", "exit"
KINDS = (CAUSE, EXCEPTION, SYMPTOM, SUMMARY, SLOW, PENDING, EXIT)
IN_LOGS = (CAUSE, SYMPTOM, SUMMARY, SLOW)
_WRAPPED = re.compile(
    r"\w(?:Error|Exception|Failed): ((?:\w{1,40}\.){0,8}\w{1,60}(?:Error|Exception): .+)"
)
_SUBMIT = "cd RUN_FOLDER && sbatch job.sbatch"
"""how the tables say that a run is submitted again"""
# what a path contains means nothing, except in /dev/shm and for a missing HOME (`'/.cache'`)
_QUOTED_PATH = re.compile(r"(?<='/)(?!dev/|\.)[^']*(?=')")
_IN_ORDER = ((CAUSE,), (SYMPTOM, SUMMARY, SLOW))


@dataclass(frozen=True)
class Cause:
    """One row of the tables."""

    code: str
    """kebab-case; stable, because scripts may compare it"""
    subject: str
    """the name of its file: gpu, slurm, storage, ..."""
    says: str
    """the cause in one line"""
    explanation: str
    fix: str
    fix_own: str = ""
    """`fix` for a user's own batch script, which has neither an environment nor a recipe of runner"""
    kind: str = CAUSE
    """`cause` breaks a run by itself; `symptom` is what other processes report when something broke elsewhere;
    `summary` reports only that something ended (srun, torchrun, our own batch script); `slow` costs time only;
    `exception` is the class of a traceback that no row of the other kinds explains; `pending` is a reason that Slurm
    gives for waiting; `exit` is an exit code"""
    find: tuple[str, ...] = ()
    """the line contains one of these, letter by letter (this makes long logs fast); for `exception`, `pending` and
    `exit` it is the whole word"""
    states: tuple[str, ...] = ()
    """the states of Slurm that mean this"""
    match: str = ""
    """the line must also match this pattern, if it is given; its named groups fill placeholders of `fix` (PROGRAM,
    PATH2)"""
    stack: str = ""
    """a pattern for the line and the frames above it: where it matches, the line need not match `match`"""
    unless: str = ""
    """the line, without the paths that Python quotes, must not match this pattern"""
    yields: tuple[str, ...] = ()
    """codes that explain this one: if the log or the exit code indicates one of them, that one is the cause. `*`: any
    cause that the same rank printed within a few lines, because this one only wraps it"""
    phase: str = ""
    """`start`: it is about the start of a job or container. Once the program has run, it is not the cause"""
    restart: str = ""
    """`stop`: the same error comes again after a restart (payload/stops.awk)"""
    node: str = ""
    """for a cause with `restart`: the POSIX extended regular expression by which the batch script recognizes it"""
    message: str = ""
    """a real message, as its program printed it"""
    near_miss: str = ""
    """a line that looks similar and must not match"""
    source: str = ""
    """where the message was seen"""

    def fits(self, line: str, frames: Callable[[], str] = str) -> bool:
        """Whether a line of a log matches; `frames` gives the frames above it."""
        return (
            any(map(line.__contains__, self.find))
            and (not self.unless or re.search(self.unless, _QUOTED_PATH.sub("", line)) is None)
            and (
                (not self.match or re.search(self.match, line) is not None)
                or (bool(self.stack) and re.search(self.stack, f"{line}\n{frames()}") is not None)
            )
        )

    def placeholders(self, line: str) -> dict[str, str]:
        """The values for placeholders of `fix` from the line."""
        found = re.search(self.match, line) if self.match else None
        groups = found.groupdict() if found else {}
        return {name.rstrip("0123456789"): value for name, value in groups.items() if value}

    def for_own_script(self) -> Cause:
        """The cause with the fix for a user's own batch script. What a shell would run in ENV, its script runs."""
        return replace(
            self,
            fix=self.fix_own
            or re.sub(r"`runner shell ENV -- ([^`]*)`", r"`\1` in the script", self.fix),
        )

    def for_scheduler(self, by_hand: str, *, is_local: bool) -> Cause:
        """The cause with the command that submits this run again. Without a scheduler, there is no sacct."""
        clauses = [each for each in self.fix.split("; ") if not (is_local and "`sacct " in each)]
        return replace(self, fix="; ".join(clauses).replace(_SUBMIT, by_hand))

    def filled(self, values: Mapping[str, str]) -> Cause:
        """The cause with placeholders in the commands of `fix` (`runner logs RUN`) replaced by known values."""
        if not values:
            return self
        names = "|".join(map(re.escape, values))

        def command(found: re.Match[str]) -> str:
            return re.sub(
                rf"(?<![\w$/])({names})(?!\w)", lambda name: shlex.quote(values[name[1]]), found[0]
            )

        return replace(self, fix=re.sub(r"`[^`]*`", command, self.fix))


def _row(code: str, subject: str, row: dict[str, Any]) -> Cause:
    """The cause of one table. The tests check all tables."""
    for key, value in row.items():
        row[key] = tuple(value) if isinstance(value, list) else value.strip("\n")
    return Cause(code=code, subject=subject, **row)


@cache
def all_causes() -> tuple[Cause, ...]:
    """Every cause, in the order of file names and rows. The first one that matches a line applies."""
    files = sorted(FOLDER.glob("*.toml"))
    return tuple(
        _row(code, path.stem, row)
        for path in files
        for code, row in tomllib.loads(path.read_text()).items()
    )


@cache
def of_kind(*kinds: str) -> tuple[Cause, ...]:
    """The causes of the given kinds."""
    return tuple(cause for cause in all_causes() if cause.kind in kinds)


def by_word(kind: str, word: str) -> Cause | None:
    """The cause for a pending reason, an exit code or an exception class."""
    return next((cause for cause in of_kind(kind) if word in cause.find), None)


def by_state(state: str) -> Cause | None:
    """The cause for a state of Slurm."""
    return next((cause for cause in all_causes() if state in cause.states), None)


def cause_of(line: str, frames: Callable[[], str] = str) -> Cause | None:
    """The first cause that matches a log line; causes are tried before symptoms and summaries, and an exception that
    the line wraps in another one before that. None if none matches."""
    first = next(
        (cause for kinds in _IN_ORDER for cause in of_kind(*kinds) if cause.fits(line, frames)),
        None,
    )
    if first is None or "*" not in first.yields or (wrapped := _WRAPPED.search(line)) is None:
        return first
    inner = cause_of(wrapped[1])
    return inner if inner is not None and inner.kind == CAUSE else first


_STOPS = """\
# Made by `python -m bench.docs --write-reference` from runs/why/causes. Do not edit.
# Finds, at the end of the logs of a failed task, an error that comes again after each restart. Prints the code of the
# cause and the line, or nothing. `code` is the exit code of the task. A line with only the character 1 ends each log.
# An error does not count if another exception or 100 more lines follow it in the same log: the program has handled it.
$0 == "\\001" { end_of_log(); next }
{ number++ }
"""
_STOPS_END = """\
/ChildFailedError|SignalException|DistBackendError|DistNetworkError/ { next } # they follow an error of another process
/(^|[^A-Za-z])[A-Za-z_]*(Error|Exception): / { cause = "" }
END {
    end_of_log()
    if (!told && (code in codes)) print codes[code], "exit code " code
}
function found(name) {
    cause = name
    line = substr($0, RSTART, 300)
    at = number
}
function end_of_log() {
    if (cause && !told && number - at <= 100) {
        print cause, line
        told = 1
    }
    cause = ""
}
"""


def stops() -> str:
    """The text of payload/stops.awk: what a batch script must know to stop a run whose restart cannot help."""
    chosen = sorted(
        (cause for cause in all_causes() if cause.restart == "stop"), key=lambda cause: cause.code
    )
    codes = "; ".join(
        f'codes[{code}] = "{cause.code}"'
        for cause in chosen
        if cause.kind == EXIT
        for code in cause.find
    )
    rules = (
        f'match($0, /{cause.node}/) {{ found("{cause.code}"); next }}\n'
        for cause in chosen
        if cause.node
    )
    return f"{_STOPS}BEGIN {{ {codes} }}\n{''.join(rules)}{_STOPS_END}"
