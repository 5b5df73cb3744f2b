"""One clear error from one rank, and exit code 1."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

# Rank 0 usually meets the same error. Other ranks give it this long to report it first.
RANK_ZERO_FIRST_SECONDS = 3.0


@dataclass(eq=False)  # not frozen: a context manager that it passes through sets its traceback
class JobError(Exception):
    """An error that the user can fix: what happened, why, and what to try."""

    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}\n  because: {self.why}\n  try:     {self.fix}"


def near_miss(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)`, or nothing when no known word is close.

    A word that others continue is taken for the start of one: `--dataset` for `--dataset_name`.
    """
    known = list(known)
    continued = [other for other in known if word and other.startswith(f"{word}_")]
    if continued:
        best = min(continued, key=lambda other: (not other.startswith(f"{word}_name"), len(other)))
        return f" (did you mean {best!r}?)"
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


@contextlib.contextmanager
def reported(script: str, note_folder: Path | None = None) -> Iterator[None]:
    """Turn an exception into one message and exit code 1; `SystemExit` passes.

    Rank 0 prints at once and writes `error.txt` into the attempt's folder. Another rank waits a moment and prints
    only if no rank has written error.txt since this process began. The process then exits without waiting for a
    collective, so that the launcher ends the ranks that hang in one.
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
            if _written_since(note, started):
                leave(1)
        with contextlib.suppress(OSError):
            note.write_text(text, encoding="utf-8")
        sys.stderr.write(text if rank == 0 else f"[rank {rank}] {text}")
        sys.stderr.flush()
        leave(130 if isinstance(error, KeyboardInterrupt) else 1)


def _message(script: str, error: BaseException) -> str:
    """Return three lines for a JobError, and the traceback for a fault of the scripts."""
    if isinstance(error, JobError):
        return f"{script}: {error}\n"
    if isinstance(error, KeyboardInterrupt):
        return f"{script}: interrupted\n"
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return f"{trace}{script}: {type(error).__name__}: {error}\n"


def _attempt_folder() -> Path:
    return Path(os.environ.get("RUNNER_ATTEMPT") or os.environ.get("RUNNER_RUN") or os.devnull)


def _written_since(note: Path, started: float) -> bool:
    try:
        return note.stat().st_mtime >= started - 1
    except OSError:
        return False


def _restore_signals() -> None:
    """Let SIGTERM end this process again: there is nothing left to save."""
    import signal

    for number in (signal.SIGTERM, signal.SIGUSR2):
        with contextlib.suppress(ValueError):
            signal.signal(number, signal.SIG_DFL)


def leave(code: int) -> NoReturn:
    """Exit without atexit handlers: those of a process group wait for ranks that never arrive."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
