"""Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]
