"""account: where the GPU time of runs went."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from runner.commands.console import Console
from runner.commands.options import selected_runs
from runner.errors import RunnerError
from runner.machine.files import owner
from runner.runs.account import NAMES, Account, Classes, add_up
from runner.runs.account import account as account_of
from runner.runs.advice import advice

_BAR = 30  # characters
_MOST_BARS = 40


def show_account(args: argparse.Namespace, console: Console) -> int:
    """`runner account`: the largest losses, a table of all classes, and for several runs a line for each."""
    accounts = _accounts(args)
    for account in accounts:
        for note in account.notes:
            console.warn(f"{account.run.name}: {note}")
    groups = {
        unit: _groups(args.by, [each for each in accounts if each.unit == unit and each.nodes])
        for unit in ("gpu", "cpu")
    }
    totals = {unit: add_up(named.values()) for unit, named in groups.items() if named}
    if args.json:
        by = {
            unit: {name: each.summary() for name, each in groups[unit].items()}
            for unit in totals
            if args.by
        }
        total = {
            unit: classes.summary() | ({"by": by[unit]} if by else {})
            for unit, classes in totals.items()
        }
        console.answer_json({"runs": [account.record() for account in accounts], "total": total})
    elif not totals:
        console.say(
            "no run has had a node since then" if args.since else "no node has been allocated yet"
        )
    elif args.png:
        console.answer(_draw(groups, totals, args.png))
    else:
        for unit, classes in totals.items():
            _show(classes, [each for each in accounts if each.unit == unit], console)
            if args.by or len(groups[unit]) > 1:
                _show_groups(args.by or "run", groups[unit], console)
    return 0


def _accounts(args: argparse.Namespace) -> list[Account]:
    if args.by and not args.since:
        what, why = (
            f"account: --by {args.by} without --since",
            "--by groups the runs that were launched since a given time",
        )
        raise RunnerError(what, why, f"runner account --since 30d --by {args.by}", exit_code=2)
    return [account_of(run, time.time()) for run in selected_runs(args)]


def _groups(by: str | None, accounts: Sequence[Account]) -> dict[str, Classes]:
    """Name -> classes: of each run, or of all runs by cause, node, environment or user, the largest loss first."""
    found: dict[str, Classes] = {}
    for account in accounts:
        run = account.run
        name = (
            run.environment
            if by == "env"
            else owner(run.folder) or "you"
            if by == "user"
            else run.name
        )
        pairs: Iterable[tuple[str, Mapping[str, float]]] = [(name, account.classes)]
        if by in ("cause", "node"):
            pairs = account.by_cause() if by == "cause" else account.nodes.items()
        for name, classes in pairs:
            found.setdefault(name, Classes()).add(classes)
    return (
        dict(sorted(found.items(), key=lambda each: each[1].get("useful", 0.0) - each[1].held))
        if by
        else found
    )


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.2f}" if seconds >= 36 or not seconds else f"{seconds / 3600:.2g}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole > 0 else ""


def _show(classes: Classes, accounts: Sequence[Account], console: Console) -> None:
    held, hours = classes.held, f"{accounts[0].unit.upper()} hours"
    ratio = _share(classes.get("useful", 0.0), held)
    console.line(f"{_hours(held)} {hours} held; effective training time ratio {ratio}")
    for number, (name, seconds) in enumerate(classes.losses[:3], 1):
        console.line(
            f"loss {number}: {NAMES[name]}, {_hours(seconds)} {hours}{_reason(name, accounts)}"
        )
    console.answer("\n")
    rows = [
        (NAMES[name], _hours(seconds), "not charged", "")
        if name == "queue"
        else (
            NAMES[name],
            _hours(seconds),
            _share(seconds, held),
            "#" * round(_BAR * seconds / (held or 1)),
        )
        for name in NAMES
        if (seconds := classes.get(name, 0.0)) > 0
    ]
    console.table(("CLASS", hours.upper(), "SHARE", ""), rows)


def _reason(name: str, accounts: Sequence[Account]) -> str:
    """`: ADVICE` for the run that has lost most, which is named if it is not the only one."""
    most = max(accounts, key=lambda each: each.classes.get(name, 0.0))
    setting = advice(name, most)
    place = f", most in {most.run.name}" if len(accounts) > 1 else ""
    return f"{place}: {setting}" if setting else place


def _show_groups(by: str, groups: Mapping[str, Classes], console: Console) -> None:
    rows = []
    for name, classes in groups.items():
        held, useful = classes.held, classes.get("useful", 0.0)
        largest = "".join(
            f"{NAMES[kind]} {_share(lost, held)}" for kind, lost in classes.losses[:1]
        )
        rows.append((name, _hours(held), _share(useful, held), _hours(held - useful), largest))
    console.answer("\n")
    console.table((by.upper(), "HELD", "RATIO", "LOST", "LARGEST LOSS"), rows)


def _draw(
    groups: Mapping[str, Mapping[str, Classes]], totals: Mapping[str, Classes], path: str
) -> str:
    """Draw a bar for each run or group; a single one for all if there are many."""
    from runner.runs.plot import write_picture

    panels = []
    for unit, total in totals.items():
        named = groups[unit] if len(groups[unit]) <= _MOST_BARS else {"all": total}
        bars = [
            {
                "name": name,
                "parts": [
                    (label, each.get(kind, 0.0) / 3600)
                    for kind, label in NAMES.items()
                    if kind != "queue"
                ],
            }
            for name, each in named.items()
        ]
        panels.append({"label": f"{unit.upper()} hours", "bars": bars})
    ratios = ", ".join(_share(total.get("useful", 0.0), total.held) for total in totals.values())
    picture = {"title": f"effective training time ratio {ratios}", "axis": "", "panels": panels}
    return str(write_picture(picture, Path(path)))
