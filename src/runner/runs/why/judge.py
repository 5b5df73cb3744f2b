"""Which of all that the logs say is the cause: the first that breaks a run by itself, not the loudest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.runs.why.cause import CAUSE, EXCEPTION, SLOW, SYMPTOM
from runner.runs.why.evidence import Evidence, Reading

_SAME_STORY_LINES = 60  # a library often says the reason some lines before or after the exception


@dataclass(frozen=True)
class Verdict:
    """The cause, what followed from it, and what only cost time."""

    first: Evidence | None
    followed: tuple[tuple[Evidence, int], ...]
    """the first evidence of each other code, and how many lines say it"""
    slow: tuple[Evidence, ...]


def judge(readings: Sequence[Reading]) -> Verdict:
    """The verdict over all logs of an attempt."""
    everything = sorted((each for reading in readings for each in reading.evidence), key=lambda each: each.order)
    broken = [each for each in everything if each.cause.kind in (CAUSE, EXCEPTION) and not each.survived]
    symptoms = [each for each in everything if each.cause.kind == SYMPTOM and not each.survived]
    first = _reason(broken[0], broken) if broken else symptoms[0] if symptoms else None
    return Verdict(first, _followed(first, [*broken, *symptoms]), _once(everything, SLOW))


def _reason(first: Evidence, broken: Sequence[Evidence]) -> Evidence:
    """What explains the first: a cause that it yields to, or, for an exception that we do not know, one that the same
    rank says close to it."""
    for each in broken:
        if each.cause.code in first.cause.yields:
            return each
    if first.cause.kind != EXCEPTION:
        return first
    for each in broken:
        near = each.path == first.path and abs(each.number - first.number) <= _SAME_STORY_LINES
        if each.cause.kind == CAUSE and near and each.rank in (first.rank, None):
            return each
    return first


def _followed(first: Evidence | None, others: Sequence[Evidence]) -> tuple[tuple[Evidence, int], ...]:
    counted: dict[str, tuple[Evidence, int]] = {}
    for each in others:
        if first is None or each.cause.code == first.cause.code:
            continue
        known, count = counted.get(each.cause.code, (each, 0))
        counted[each.cause.code] = (known, count + 1)
    return tuple(counted.values())


def _once(everything: Sequence[Evidence], kind: str) -> tuple[Evidence, ...]:
    found: dict[str, Evidence] = {}
    for each in everything:
        if each.cause.kind == kind:
            found.setdefault(each.cause.code, each)
    return tuple(found.values())
