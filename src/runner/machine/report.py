"""How long work reports lines and progress to its caller; the library itself never prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Report(Protocol):
    """Where lines and progress go. `commands/console.py` shows them on stderr; tests collect them."""

    def say(self, line: str) -> None:
        """One line that every user should see."""

    def detail(self, line: str) -> None:
        """One line that is shown with -v."""

    def warn(self, line: str) -> None:
        """One line about a problem that does not stop the work."""

    def passing(self, line: str) -> None:
        """The newest output line of a running step; the next one replaces it, an empty one removes it."""
        if line:
            self.detail(line)

    def bar(self, what: str, total: int | None, unit: str = "bytes") -> AbstractContextManager[Callable[[int], None]]:
        """A progress bar for `total` units (None: unknown); the yielded function advances it by a count."""


class Quiet(Report):
    """A report that keeps its lines and shows nothing."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def detail(self, line: str) -> None:
        self.lines.append(line)

    def warn(self, line: str) -> None:
        self.lines.append(f"warning: {line}")

    @contextmanager
    def bar(self, what: str, total: int | None, unit: str = "bytes") -> Iterator[Callable[[int], None]]:
        self.lines.append(what)
        yield lambda count: None
