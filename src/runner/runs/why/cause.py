"""A cause: what it looks like in a log, what it means, what to do. All of them are data: causes/*.toml, by subject."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from runner.errors import RunnerError

FOLDER = Path(__file__).parent / "causes"
CAUSE, EXCEPTION, SYMPTOM, SLOW = "cause", "exception", "symptom", "slow"
PENDING, EXIT = "pending", "exit"
KINDS = (CAUSE, EXCEPTION, SYMPTOM, SLOW, PENDING, EXIT)


@dataclass(frozen=True)
class Cause:
    """One row of the tables."""

    code: str
    """kebab-case, stable: scripts may compare it"""
    subject: str
    """the name of its file: gpu, slurm, storage, ..."""
    says: str
    """the cause in one line"""
    explanation: str
    fix: str
    kind: str = CAUSE
    """`cause` breaks a run by itself; `symptom` is what others say when something broke before; `slow` costs time only;
    `exception` is the class of a traceback that no row of the other kinds knows; `pending` a reason that Slurm gives
    for waiting; `exit` an exit code"""
    find: tuple[str, ...] = ()
    """the line holds one of these, letter by letter: the sieve that is fast on long logs; of the last three kinds the
    whole word"""
    states: tuple[str, ...] = ()
    """the states of Slurm that mean this"""
    match: str = ""
    """and, where given, this pattern (compiled at its first use)"""
    unless: str = ""
    """and not this"""
    yields: tuple[str, ...] = ()
    """codes that explain this one: where they are said too, they are the cause"""
    message: str = ""
    """a real message, as its program printed it"""
    near_miss: str = ""
    """a line that looks like it and is not"""
    source: str = ""
    """where the message was seen"""

    def fits(self, line: str) -> bool:
        """Whether a line of a log says this."""
        return (
            any(word in line for word in self.find)
            and (not self.match or re.search(self.match, line) is not None)
            and (not self.unless or re.search(self.unless, line) is None)
        )


_TEXTS = ("says", "explanation", "fix", "kind", "match", "unless", "message", "near_miss", "source")
_LISTS = ("find", "states", "yields")


def read_table(text: str, subject: str) -> tuple[Cause, ...]:
    """The causes of one file. Raises RunnerError for a row that is not whole."""
    return tuple(_row(code, subject, row) for code, row in tomllib.loads(text).items())


def _row(code: str, subject: str, row: Mapping[str, object]) -> Cause:
    missing = {"says", "explanation", "fix", "find"} - set(row)
    unknown = set(row) - {*_TEXTS, *_LISTS}
    lists = {key: value for key in _LISTS if isinstance(value := row.get(key, []), list)}
    if missing or unknown or len(lists) < len(_LISTS) or row.get("kind", CAUSE) not in KINDS:
        raise RunnerError(
            f"the cause {code!r} of {subject!r} is not whole",
            f"missing: {sorted(missing)}, unknown: {sorted(unknown)}",
            "mend its table in causes/",
        )
    texts = {key: str(row[key]).strip() for key in _TEXTS if key in row}
    tuples = {key: tuple(map(str, value)) for key, value in lists.items()}
    return Cause(code=code, subject=subject, **texts, **tuples)  # type: ignore[arg-type]


@cache
def all_causes() -> tuple[Cause, ...]:
    """Every cause, in the order of the files' names and rows: of two that fit one line, the former is meant."""
    found: list[Cause] = []
    for path in sorted(FOLDER.glob("*.toml")):
        found += read_table(path.read_text(), path.stem)
    return tuple(found)


@cache
def of_kind(*kinds: str) -> tuple[Cause, ...]:
    """The causes of some kinds."""
    return tuple(cause for cause in all_causes() if cause.kind in kinds)


def by_word(kind: str, word: str) -> Cause | None:
    """The cause of a reason, an exit code or an exception's class."""
    return next((cause for cause in of_kind(kind) if word in cause.find), None)


def by_state(state: str) -> Cause | None:
    """The cause that a state of Slurm tells by itself."""
    return next((cause for cause in all_causes() if state in cause.states), None)


def cause_of(line: str) -> Cause | None:
    """The first cause whose words a line of a log says; None where it says nothing that we know."""
    return next((cause for cause in of_kind(CAUSE, SYMPTOM, SLOW) if cause.fits(line)), None)
