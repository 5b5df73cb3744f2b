"""Which evidence is the cause: the first that breaks a run by itself, not the one that is repeated most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.runs.why.cause import CAUSE, EXCEPTION, SLOW, SUMMARY, SYMPTOM
from runner.runs.why.evidence import Evidence, Reading

_SAME_STORY_LINES = 60  # a library often says the reason some lines before or after the exception


@dataclass(frozen=True)
class Verdict:
    """The cause, what followed from it, and what only cost time."""

    first: Evidence | None
    """a cause, an exception or a symptom"""
    summary: Evidence | None
    """a line that reports only that something ended: the answer where nothing else is known"""
    followed: tuple[tuple[Evidence, int], ...]
    """the first evidence of each other code, and its number of lines"""
    slow: tuple[Evidence, ...]


def judge(readings: Sequence[Reading]) -> Verdict:
    """The verdict over all logs of an attempt."""
    everything = sorted((each for reading in readings for each in reading.evidence), key=lambda each: each.order)
    fatal = [each for each in everything if not each.survived]
    broken = [each for each in fatal if each.cause.kind in (CAUSE, EXCEPTION)]
    symptoms = [each for each in fatal if each.cause.kind == SYMPTOM]
    summaries = [each for each in fatal if each.cause.kind == SUMMARY]
    first = _reason(broken[0], broken) if broken else _reason(symptoms[0], symptoms) if symptoms else None
    summary = summaries[0] if summaries else None
    others = [*broken, *symptoms, *summaries]
    return Verdict(first, summary, _followed(first, others), _once(everything, SLOW))


def _reason(first: Evidence, broken: Sequence[Evidence]) -> Evidence:
    """What explains the first: a cause that it yields to, or, for an exception that only its class explains, a cause
    that the same rank printed close to it."""
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
        if first is not None and each.cause.code == first.cause.code:
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
