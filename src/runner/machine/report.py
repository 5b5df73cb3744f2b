"""The interface through which long operations report messages and progress. Library code never prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Report(Protocol):
    """Receives messages and progress. `commands/console.py` shows them on stderr; tests collect them."""

    def say(self, line: str) -> None:
        """A message for every user."""

    def detail(self, line: str) -> None:
        """A message that is shown only with -v."""

    def warn(self, line: str) -> None:
        """A message about a problem that does not stop the operation."""

    def passing(self, line: str) -> None:
        """Show the newest output line of a running step. The next line replaces it; an empty line removes it."""
        if line:
            self.detail(line)

    def bar(self, what: str, total: int | None) -> AbstractContextManager[Callable[[int], None]]:
        """A progress bar for `total` bytes (None: unknown); the yielded function advances it by a count."""


class Quiet(Report):
    """A report that stores its messages and shows nothing."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    detail = say

    def warn(self, line: str) -> None:
        self.lines.append(f"warning: {line}")

    @contextmanager
    def bar(self, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        self.lines.append(what)
        yield lambda count: None
