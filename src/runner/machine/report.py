"""What long work tells its caller while it goes on; the library never prints by itself."""

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
        """One line about something that will hurt later."""

    def bar(self, what: str, total: int | None, unit: str = "bytes") -> AbstractContextManager[Callable[[int], None]]:
        """A progress bar for `total` units (None: unknown); the yielded function advances it by a count."""


class Quiet:
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
