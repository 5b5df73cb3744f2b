"""Output of commands: the answer on stdout, everything else on stderr, progress bars if stderr is a terminal."""

from __future__ import annotations

import os
import sys

from runner.errors import RunnerError

TYPE_CHECKING = False  # `typing` costs a fifth of the start-up of `runner --help`

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from typing import Any

    from runner.runs.status import RunStatus


# Control characters that move the cursor, rename the window, access the clipboard or reorder text: C0, C1, bidi.
_BIDI = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_CONTROLS = {n: f"\\x{n:02x}" for n in (*range(32), *range(127, 160)) if n not in (9, 10)}
_CONTROLS |= {n: f"\\u{n:04x}" for n in _BIDI}
_IN_JSON = {n: f"\\u{n:04x}" for n in (*range(127, 160), *_BIDI)}  # json escapes C0 itself

_COLOURS = {
    "RUNNING": "36",
    "COMPLETED": "32",
    "ok": "32",
    "PENDING": "33",
    "CONFIGURING": "33",
    "COMPLETING": "36",
    "REQUEUED": "33",
    "REQUEUE_HOLD": "33",
    "PREPARING": "33",
    "UNKNOWN": "33",
    "CANCELLED": "35",
    "FAILED": "31",
    "TIMEOUT": "31",
    "LOST": "31",
    "NODE_FAIL": "31",
    "OUT_OF_MEMORY": "31",
    "PREEMPTED": "31",
    "BOOT_FAIL": "31",
    "DEADLINE": "31",
    "wrong": "31",
    "missing": "33",
}


def visible(text: str) -> str:
    """The text with control characters escaped, so that text from a log or a registry cannot control the terminal."""
    return text if text.isprintable() else text.translate(_CONTROLS)


class LogFilter:
    """Filter a job's output for the terminal: colours are kept, other control sequences are shown as escapes."""

    def __init__(self) -> None:
        import re

        # C1 and bidi as UTF-8; C0 except tab, line feed and carriage return
        bidi = rb"\xd8\x9c|\xe2\x80[\x8e\x8f\xa8-\xae]|\xe2\x81[\xa6-\xa9]"
        bad = rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]|" + bidi
        self.bad = re.compile(rb"(\x1b\[[0-9;:]*m)|" + bad)
        self.cut = re.compile(rb"(?:\x1b(?:\[[0-9;:]{0,30})?|\xc2|\xd8|\xe2[\x80\x81]?)\Z")
        self.plain = bytes((9, 10, 13, *range(32, 127)))
        self.rest = b""

    def __call__(self, data: bytes) -> bytes:
        """Filter the next piece of output. An incomplete sequence at its end is held back until the next call."""
        data = self.rest + data
        cut = self.cut.search(data, max(len(data) - 34, 0))
        self.rest = data[cut.start() :] if cut else b""
        return self._clean(data[: cut.start()] if cut else data)

    def _clean(self, data: bytes) -> bytes:
        if data.isascii() and not data.translate(
            None, self.plain
        ):  # true for nearly all pieces, and ten times as fast
            return data
        return self.bad.sub(lambda found: found[1] or visible(found[0].decode()).encode(), data)


class Console:
    """The Report of the command line."""

    def __init__(self, *, verbose: bool = False, wide: bool = False) -> None:
        self.verbose = verbose
        self.wide = wide
        self.terminal = sys.stderr.isatty()
        self.colour = self.terminal and not os.environ.get("NO_COLOR")
        self.has_passing = False

    def answer(self, text: str, *, exact: bool = False) -> None:
        """Print the answer, the only output on stdout.

        It is printed unchanged, but on a terminal control characters are shown as escapes, unless `exact`.
        """
        if not exact and sys.stdout.isatty():
            text = visible(text)
        sys.stdout.write(text if text.endswith("\n") or not text else text + "\n")

    def line(self, text: str) -> None:
        """Print a line of the answer that may contain text from other sources; control characters are escaped."""
        self.answer(visible(text), exact=True)

    def answer_json(
        self, data: dict[str, Any] | list[dict[str, Any]], schema: int | None = 1
    ) -> None:
        """Print the answer as JSON, one line per object.

        Each object has the number of its schema (docs/schemas). It is raised when a field goes or changes its meaning.
        None: for data that has no schema of its own.
        """
        import json

        if schema is not None:
            number = {"schema": schema}
            data = [number | each for each in data] if isinstance(data, list) else number | data
        if isinstance(data, list) and data:
            text = (
                "[\n"
                + ",\n".join(json.dumps(each, ensure_ascii=False, default=str) for each in data)
                + "\n]"
            )
        else:
            text = json.dumps(data, ensure_ascii=False, default=str)
        self.answer(text if text.isascii() else text.translate(_IN_JSON), exact=True)

    def table(
        self, header: Sequence[str], rows: Sequence[Sequence[str]], *, wrap: bool = False
    ) -> None:
        """Print the answer as columns, each as wide as its widest cell.

        On a terminal, the widest columns are shortened to fit, unless `--wide` is given; with `wrap`, the last one is
        wrapped instead.
        """
        lines = [
            tuple(header),
            *(tuple(visible(cell).replace("\n", " ") for cell in row) for row in rows),
        ]
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        terminal = sys.stdout.isatty()
        if terminal and not self.wide:
            widths = _fitted(
                widths, [len(name) for name in header], columns() - 2 * (len(widths) - 1), last=wrap
            )
        colour = terminal and not os.environ.get("NO_COLOR")
        states = (
            [name in ("STATE", "STATUS") for name in header] if colour else [False] * len(header)
        )
        for line in lines:
            for part in _wrapped(line, widths) if wrap else (line,):
                cells = [_cell(*each) for each in zip(part, widths, states, strict=True)]
                self.answer("  ".join(cells).rstrip(), exact=True)

    def say(self, line: str) -> None:
        """A line on stderr; a closed stderr is not an error."""
        self._write(visible(line))

    def detail(self, line: str) -> None:
        if self.verbose:
            self.say(line)

    def warn(self, line: str) -> None:
        self._write(f"{self._paint('warning:', '33')} {visible(line)}")

    def error(self, error: RunnerError) -> None:
        """Print a RunnerError with its three parts."""
        text = visible(str(error))
        self._write(text.replace("runner:", self._paint("runner:", "31"), 1))

    def _write(self, line: str) -> None:
        self._wipe()
        try:
            print(line, file=sys.stderr, flush=True)
        except UnicodeEncodeError:  # an argument that is not valid UTF-8
            print(line.encode(errors="backslashreplace").decode(), file=sys.stderr, flush=True)
        except (OSError, ValueError):
            pass

    def confirm(self, what: str, fix: str) -> bool:
        """Whether the user accepts something. Raises RunnerError if there is no terminal to ask on."""
        if not (sys.stdin.isatty() and self.terminal):
            raise RunnerError(
                what, "runner cannot ask for confirmation, because there is no terminal", fix
            )
        self.say(f"{what}. Go on? [y/N]")
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def bug(self, error: Exception, argv: Sequence[str]) -> int:
        """Save the traceback of a bug in runner to a file, print its path, and return exit code 3."""
        import traceback

        from runner.machine import files

        trace = "".join(traceback.format_exception(error))
        log = files.write_new("runner-bug-", ".log", f"runner {' '.join(argv)}\n\n{trace}")
        if self.verbose:
            traceback.print_exception(error)
        self.say(
            f"runner: internal error: {type(error).__name__}: {error}\n"
            f"  because: this is a bug in runner; the traceback is in {log}\n"
            "  try:     report it with that file; -v prints the traceback"
        )
        return 3

    def _paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text

    def passing(self, line: str) -> None:
        """Show a step's newest output line; with -v, or without a terminal, treat it like `detail`."""
        if self.verbose or not self.terminal:
            if line:
                self.detail(line)
            return
        self._wipe()
        if line:
            plain = "".join(letter for letter in line if letter.isprintable())
            sys.stderr.write(f"  {plain[: columns() - 3]}")
            sys.stderr.flush()
            self.has_passing = True

    def _wipe(self) -> None:
        """Remove the line that `passing` has shown."""
        if self.has_passing:
            sys.stderr.write("\r\x1b[2K")
            self.has_passing = False

    def bar(self, what: str, total: int | None) -> AbstractContextManager[Callable[[int], None]]:
        """A live bar on a terminal, and a line every few seconds elsewhere."""
        from runner.commands.bars import live_bar, plain_bar

        self._wipe()
        return live_bar(visible(what), total) if self.terminal else plain_bar(self, what, total)


def say_end(status: RunStatus, console: Console) -> None:
    """Print how a run ended."""
    code = "" if status.exit_code is None else f", exit code {status.exit_code}"
    console.say(f"{status.run.name}: {status.state}{code}{status.told_reason}")


def columns() -> int:
    """The width of the terminal."""
    width = os.environ.get("COLUMNS", "")
    if width.isdecimal() and int(width):
        return int(width)
    try:
        return os.get_terminal_size(1).columns or 80
    except OSError:
        return 80


def _fitted(widths: list[int], least: list[int], room: int, *, last: bool) -> list[int]:
    """Reduce the widest columns, or only the last one, until the table fits into `room` characters."""
    widths = list(widths)
    if last:
        widths[-1] = min(widths[-1], max(room - sum(widths[:-1]), 30))
        return widths
    while (over := sum(widths) - room) > 0:
        loose = [n for n, width in enumerate(widths) if width > max(least[n], 8)]
        if not loose:
            break
        widest = max(loose, key=lambda n: widths[n])
        others = max((widths[n] for n in loose if n != widest), default=0)
        widths[widest] = max(
            widths[widest] - over, min(others, widths[widest] - 1), least[widest], 8
        )
    return widths


def _wrapped(line: Sequence[str], widths: Sequence[int]) -> list[tuple[str, ...]]:
    """Split a row into several rows, with the last cell wrapped at spaces."""
    import textwrap

    parts = textwrap.wrap(line[-1], widths[-1], break_on_hyphens=False) or [""]
    return [(*line[:-1], parts[0]), *((*("" for _ in line[:-1]), part) for part in parts[1:])]


def _cell(text: str, width: int, state: bool) -> str:
    if len(text) > width:
        text = text[: width - 1] + "…"
    padded = text.ljust(width)
    code = _COLOURS.get(text) if state else None
    return f"\x1b[{code}m{text}\x1b[0m{padded[len(text) :]}" if code else padded
