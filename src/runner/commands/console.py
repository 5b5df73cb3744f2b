"""What commands print: the answer on stdout, everything else on stderr, bars where stderr is a terminal."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # `typing` costs a fifth of the start-up of `runner --help`

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from runner.errors import RunnerError


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
        """Print the answer as JSON; of a list each item in a line of its own."""
        import json

        if isinstance(data, list) and data:  # a history is long, and the encoder that indents is slow
            self.answer("[\n" + ",\n".join(json.dumps(each, ensure_ascii=False, default=str) for each in data) + "\n]")
            return
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
        try:
            print(line, file=sys.stderr, flush=True)
        except UnicodeEncodeError:  # a word of the user's that is no text
            print(line.encode(errors="backslashreplace").decode(), file=sys.stderr, flush=True)
        except (OSError, ValueError):
            pass

    def bug(self, error: Exception, argv: Sequence[str]) -> int:
        """Keep the traceback of our own fault in a file and say where; returns exit code 3."""
        import tempfile
        import traceback

        with tempfile.NamedTemporaryFile(
            "w", prefix="runner-bug-", suffix=".log", delete=False, errors="backslashreplace"
        ) as log:
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

    def bar(self, what: str, total: int | None, unit: str = "bytes") -> AbstractContextManager[Callable[[int], None]]:
        """A live bar on a terminal, a line now and then elsewhere."""
        from runner.commands.bars import live_bar, plain_bar

        return live_bar(what, total, unit) if self.terminal else plain_bar(self, what, total, unit)
