"""Progress: a live bar on a terminal, and a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.machine.report import Report

_EVERY_SECONDS = 5.0  # how often a plain line is printed


@contextmanager
def live_bar(what: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    """A bar on stderr with counts, rate and time left; the yielded function advances it."""
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


@contextmanager
def plain_bar(report: Report, what: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    """Print a line at the start and then every few seconds; the yielded function advances the count."""
    report.say(what)
    done = 0
    said = time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, said
        done += count
        if time.monotonic() - said >= _EVERY_SECONDS:
            said = time.monotonic()
            share = f" of {_amount(total, unit)} ({100 * done // total} %)" if total else ""
            report.say(f"  {what}: {_amount(done, unit)}{share}")

    yield advance


def _amount(count: int, unit: str) -> str:
    return f"{count / 1e6:,.0f} MB" if unit == "bytes" else f"{count} {unit}"
