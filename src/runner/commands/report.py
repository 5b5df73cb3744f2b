"""report: a page about runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from runner.commands.console import Console, visible
from runner.commands.options import selected_runs
from runner.commands.why import answer_lines
from runner.errors import RunnerError
from runner.machine import files
from runner.runs.report.report import MARK, MOST_BYTES, read_report, render
from runner.runs.status import ask


def write_report(args: argparse.Namespace, console: Console) -> int:
    """`runner report`: write the page and print its path; with --md or --json, print the report."""
    statuses = ask(selected_runs(args))
    reports = []
    for status in statuses[-20:]:
        console.passing(f"reading {status.run.name}")
        reports.append(read_report(status, alone=len(statuses) == 1))
    console.passing("")
    if args.json or not statuses:
        console.answer_json([each.record() for each in reports]) if args.json else console.say(
            "no run was launched since then"
        )
        return 0
    text = render(
        "md" if args.md else "html",
        statuses,
        reports,
        {"visible": visible, "why_lines": answer_lines},
    )
    data = text.encode(errors="backslashreplace")
    if len(data) > MOST_BYTES:
        usual = f"the usual {MOST_BYTES // 1000} kB"
        console.warn(f"the report is {len(data) / 1000:,.0f} kB, more than {usual}")
    if args.md and not args.output:
        console.answer(text)
        return 0
    target = Path(args.output or ".").absolute()
    if not args.output or args.output.endswith("/") or target.is_dir():
        name = "report" if len(statuses) > 1 else statuses[0].run.name
        target = target / f"{name}.{'md' if args.md else 'html'}"
    write_page(target, data)
    console.answer(str(target))
    return 0


def write_page(target: Path, data: bytes) -> None:
    """Write a report. Raises RunnerError if the file exists, and is not a report."""
    with files.explained(f"write {target}"):
        if target.exists() and MARK.encode() not in target.read_bytes()[:100]:
            why = "the file exists, and runner did not write it"
            raise RunnerError(f"cannot write {target}", why, "choose another name with -o")
    files.write(target, data)
