"""What commands print: the answer on stdout, everything else on stderr, bars where stderr is a terminal."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from runner.errors import RunnerError

_BAR_EVERY_SECONDS = 5.0  # how often a plain line is printed where there is no terminal


class Console:
    """The Report of the command line."""

    def __init__(self, *, verbose: bool = False) -> None:
        self.verbose = verbose
        self.terminal = sys.stderr.isatty()
        self.colour = self.terminal and not os.environ.get("NO_COLOR")

    def answer(self, text: str) -> None:
        """Print the answer: the only thing that ever stands on stdout."""
        sys.stdout.write(text if text.endswith("\n") or not text else text + "\n")

    def answer_json(self, data: object) -> None:
        """Print the answer as JSON."""
        import json

        self.answer(json.dumps(data, indent=2, ensure_ascii=False, default=str))

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print the answer as columns, each as wide as its widest cell."""
        lines = [tuple(header), *(tuple(row) for row in rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        for line in lines:
            self.answer("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())

    def say(self, line: str) -> None:
        """One line that every user should see."""
        self.error_line(line)

    def detail(self, line: str) -> None:
        """One line that is shown with -v."""
        if self.verbose:
            self.error_line(line)

    def warn(self, line: str) -> None:
        """One line about something that will hurt later."""
        self.error_line(f"{self._paint('warning:', '33')} {line}")

    def error(self, error: RunnerError) -> None:
        """A RunnerError in its three parts."""
        text = str(error)
        self.error_line(text.replace("runner:", self._paint("runner:", "31"), 1))

    def error_line(self, line: str) -> None:
        """A line on stderr; a closed stderr is no reason to fail."""
        with suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)

    def bug(self, error: Exception, argv: Sequence[str]) -> int:
        """Keep the traceback of our own fault in a file and say where; returns exit code 3."""
        import tempfile
        import traceback

        with tempfile.NamedTemporaryFile("w", prefix="runner-bug-", suffix=".log", delete=False) as log:
            log.write(f"runner {' '.join(argv)}\n\n")
            traceback.print_exception(error, file=log)
        if self.verbose:
            traceback.print_exception(error)
        self.error_line(
            f"runner: this is a fault in runner itself: {type(error).__name__}: {error}\n"
            f"  because: it was not foreseen; the traceback is kept in {log.name}\n"
            "  try:     report it with that file; -v shows the traceback"
        )
        return 3

    def _paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text

    @contextmanager
    def bar(self, what: str, total: int | None, unit: str = "bytes") -> Iterator[Callable[[int], None]]:
        """A live bar on a terminal, a line now and then elsewhere."""
        if self.terminal:
            with self._live_bar(what, total, unit) as advance:
                yield advance
        else:
            yield self._plain_bar(what, total, unit)

    @contextmanager
    def _live_bar(self, what: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        from rich.console import Console as RichConsole
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        counts = (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(),)
        columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn())
        with Progress(*columns, console=RichConsole(stderr=True)) as progress:
            task = progress.add_task(what, total=total)
            yield lambda count: progress.advance(task, count)

    def _plain_bar(self, what: str, total: int | None, unit: str) -> Callable[[int], None]:
        self.error_line(what)
        state = {"done": 0, "said": time.monotonic()}

        def advance(count: int) -> None:
            state["done"] += count
            if time.monotonic() - state["said"] >= _BAR_EVERY_SECONDS:
                state["said"] = time.monotonic()
                done = int(state["done"])
                share = f" of {_amount(total, unit)} ({100 * done // total} %)" if total else ""
                self.error_line(f"  {what}: {_amount(done, unit)}{share}")

        return advance


def _amount(count: int, unit: str) -> str:
    return f"{count / 1e6:,.0f} MB" if unit == "bytes" else f"{count} {unit}"
