"""Progress: a live bar on a terminal, and a plain line every few seconds elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runner.machine.report import Report

_EVERY_SECONDS = 5.0  # how often a plain line is printed


@contextmanager
def live_bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr with bytes, rate and time left; the yielded function advances it."""
    from rich.console import Console as RichConsole
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), *counts)
    with Progress(*columns, console=RichConsole(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def plain_bar(report: Report, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Print a line at the start and then every few seconds; the yielded function advances the count."""
    report.say(what)
    done = 0
    said = time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, said
        done += count
        if time.monotonic() - said >= _EVERY_SECONDS:
            said = time.monotonic()
            share = f" of {total / 1e6:,.0f} MB ({100 * done // total} %)" if total else ""
            report.say(f"  {what}: {done / 1e6:,.0f} MB{share}")

    yield advance
