"""Failures from public threads: `why` gives the cause of all those that its patterns were written for.

Each row of why/threads/*.jsonl is a failure: the link to the thread, the cause, other causes that are right too, and
the lines that matter of what was pasted. why/README.md says how each file was collected. consequences.jsonl holds logs
written by hand, in which other lines than the cause look like one. The table of what `why` gives for each thread:

    python -m tests.runs.test_why_threads [seen|aside|aside-2026|aside-2026b|aside-2026c|aside-2026d|corrected]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from runner.runs.why.cause import EXCEPTION, SUMMARY, SYMPTOM
from runner.runs.why.explain import explain_logs

FOLDER = Path(__file__).parent / "why" / "threads"


def rows(path: Path) -> list[dict[str, Any]]:
    # not splitlines(): a log may hold a line separator of Unicode
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def failures(name: str) -> list[dict[str, Any]]:
    return rows(FOLDER / f"{name}.jsonl")


def given(failure: dict[str, Any], folder: Path) -> tuple[str, str]:
    """The cause that `why` gives, and how good it is: right, wrong, generic (the class of an exception, a symptom) or
    none."""
    log = folder / "job.log"
    log.write_text(failure["log"])
    cause = explain_logs([log]).cause
    code = cause.code if cause else "-"
    wanted = "-" if failure["cause"] == "none" else failure["cause"]
    plain = ("python-exception",) if failure["cause"] == "none" else ()  # the row that says no more than the traceback
    if code in (wanted, *plain, *failure.get("also", ())):
        return code, "right"
    if cause is None:
        return code, "none"
    return code, "generic" if cause.kind in (EXCEPTION, SYMPTOM, SUMMARY) and wanted != "-" else "wrong"


def test_a_failure_that_the_patterns_were_written_for_gives_its_cause(tmp_path: Path) -> None:
    seen = [(failure["link"], failure["cause"], given(failure, tmp_path)) for failure in failures("seen")]
    assert len(seen) >= 541
    assert not [(link, wanted, found) for link, wanted, found in seen if found != (wanted, "right")]


def test_no_consequence_warning_or_handled_error_is_taken_for_the_cause(tmp_path: Path) -> None:
    wrong = []
    for failure in rows(FOLDER.parent / "consequences.jsonl"):
        log = tmp_path / "job.log"
        log.write_text(failure["log"])
        cause = explain_logs([log]).cause
        if (cause.code if cause else "-") != failure["cause"]:
            wrong.append((failure["what"], failure["cause"], cause and cause.code))
    assert not wrong


def test_failures_that_no_pattern_was_written_for_are_explained_as_often_as_they_were(tmp_path: Path) -> None:
    """The level when they were collected. Anyone who writes patterns because of them collects a new set."""
    hows = Counter(given(failure, tmp_path)[1] for failure in failures("aside"))
    assert hows.total() >= 106
    assert hows["right"] >= 0.85 * hows.total() and hows["wrong"] <= 0.02 * hows.total(), hows


def test_newer_failures_are_explained_as_often_as_they_were(tmp_path: Path) -> None:
    """The level of the first run; see why/README.md."""
    hows = Counter(given(failure, tmp_path)[1] for failure in failures("aside-2026"))
    assert hows.total() >= 49
    assert hows["right"] >= 0.85 * hows.total() and hows["wrong"] <= 0.05 * hows.total(), hows


@pytest.mark.parametrize(("name", "count"), [("aside-2026b", 57), ("aside-2026c", 51), ("aside-2026d", 60)])
def test_failures_that_were_labelled_before_the_program_ran_are_explained(
    name: str, count: int, tmp_path: Path
) -> None:
    """The level after the last correction; see why/README.md for the first runs."""
    hows = Counter(given(failure, tmp_path)[1] for failure in failures(name))
    assert hows.total() >= count
    assert hows["right"] >= 0.9 * hows.total() and hows["wrong"] <= 1, hows


def test_failures_of_earlier_measurements_are_explained(tmp_path: Path) -> None:
    hows = Counter(given(failure, tmp_path)[1] for failure in failures("corrected"))
    assert hows.total() >= 271
    assert hows["right"] >= 0.95 * hows.total() and hows["wrong"] <= 0.01 * hows.total(), hows


def main(names: list[str]) -> None:
    """Print what `why` gives for each failure, and the counts."""
    for name in names:
        counts: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as folder:
            for failure in failures(name):
                code, how = given(failure, Path(folder))
                counts[how] += 1
                print(f"{how:8} {failure['cause']:26} {code:26} {failure['link']}")
        print(f"{name}: {counts.total()}: " + ", ".join(f"{how} {count}" for how, count in counts.most_common()))


if __name__ == "__main__":
    main(sys.argv[1:] or ["seen", "aside", "aside-2026"])
