"""What `env check --fix` does: the changes that findings carry, put into the text of their file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.environments.lint.finding import Finding
from runner.environments.rewriting import rewrite
from runner.errors import RunnerError


def by_file(findings: Sequence[Finding]) -> dict[Path, list[Finding]]:
    """The findings that say what mends them, under their file."""
    found: dict[Path, list[Finding]] = {}
    for one in findings:
        if one.changes and one.place is not None:
            found.setdefault(one.place.path, []).append(one)
    return found


def mended(text: str, path: Path, findings: Sequence[Finding]) -> tuple[str, tuple[Finding, ...]]:
    """The text with one change for each key path, comments and order kept; the findings that this mends.

    Others of the same key wait for the next look at the file. A change that cannot be written is left to the user.
    """
    touched: set[tuple[str, ...]] = set()
    done: list[Finding] = []
    for one in findings:
        keys = {change.keys for change in one.changes}
        if keys & touched:
            continue
        try:
            text = rewrite(text, one.changes, path)
        except RunnerError:
            continue
        touched |= keys
        done.append(one)
    return text, tuple(done)
