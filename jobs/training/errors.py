"""One clear error, from one rank, with exit code 1."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

# A rank other than 0 gives rank 0 this long to say the same thing first. Under torchrun it is ended meanwhile.
RANK_ZERO_FIRST_SECONDS = 3.0


@dataclass(eq=False)  # not frozen: a context manager that it passes through sets its traceback
class JobError(Exception):
    """What the user can mend: what went wrong, why, and what to try."""

    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}\n  because: {self.why}\n  try:     {self.fix}"


def near_miss(word: str, known: Iterator[str] | list[str]) -> str:
    """Return ` (did you mean 'x'?)`, or nothing when no known word is close."""
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


@contextlib.contextmanager
def reported(script: str, note_folder: Path | None = None) -> Iterator[None]:
    """Turn an exception into a message of one rank and exit code 1; `SystemExit` passes untouched.

    Rank 0 speaks at once and leaves `error.txt` in the attempt's folder; any other rank waits a moment and speaks only
    where no rank has done so since this process began: the error was then its own. It leaves without waiting for
    a collective, so that the launcher ends the ranks that hang in one.
    """
    started = time.time()
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("RUNNER_DEBUG"):
            traceback.print_exc()
        text = _message(script, error)
        _restore_signals()
        rank = int(os.environ.get("RANK", "0") or "0")
        note = (note_folder or _attempt_folder()) / "error.txt"
        if rank != 0:
            time.sleep(RANK_ZERO_FIRST_SECONDS)
            if _said_since(note, started):
                leave(1)
        _leave_note(note, text)
        sys.stderr.write(text if rank == 0 else f"[rank {rank}] {text}")
        sys.stderr.flush()
        leave(130 if isinstance(error, KeyboardInterrupt) else 1)


def _message(script: str, error: BaseException) -> str:
    """Return what to print: three lines for a JobError, the traceback for a fault of ours."""
    if isinstance(error, JobError):
        return f"{script}: {error}\n"
    if isinstance(error, KeyboardInterrupt):
        return f"{script}: interrupted\n"
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return f"{trace}{script}: {type(error).__name__}: {error}\n"


def _attempt_folder() -> Path:
    return Path(os.environ.get("RUNNER_ATTEMPT") or os.environ.get("RUNNER_RUN") or os.devnull)


def _said_since(note: Path, started: float) -> bool:
    try:
        return note.stat().st_mtime >= started - 1
    except OSError:
        return False


def _leave_note(note: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        note.write_text(text, encoding="utf-8")


def _restore_signals() -> None:
    """Let SIGTERM end this process again: from here on nothing is worth saving."""
    import signal

    for number in (signal.SIGTERM, signal.SIGUSR2):
        with contextlib.suppress(ValueError):
            signal.signal(number, signal.SIG_DFL)


def leave(code: int) -> NoReturn:
    """Exit without atexit handlers: those of a process group wait for ranks that will never come."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
