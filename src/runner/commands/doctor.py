"""doctor: what this machine can do."""

from __future__ import annotations

import argparse

from runner.commands.options import add_wide

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from runner.commands.console import Console

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    """Register the verb."""
    doctor = subparsers.add_parser("doctor", parents=[common], help="what this machine can do")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    add_wide(doctor)
    doctor.set_defaults(run=examine_machine)


def examine_machine(args: argparse.Namespace, console: Console) -> int:
    """`runner doctor`: one line each; exit code 1 when something is wrong."""
    import os

    from runner.detection import find_site
    from runner.doctor.diagnosis import Diagnosis
    from runner.doctor.examination import examine
    from runner.environments.engines import choose

    site, why = find_site(args.site, os.environ)
    engine, chosen = choose(site, os.environ)
    none = engine == "host" and site.engine != "host"
    found = [
        Diagnosis("site", "ok", f"{site.name} ({why})"),
        Diagnosis("engine", "wrong" if none else "ok", f"{engine}: {chosen}",
                  "apt-get install bubblewrap squashfuse squashfs-tools" if none else ""),
        *examine(site, os.environ),
    ]  # fmt: skip
    wrong = sum(item.verdict == "wrong" for item in found)
    if args.json:
        console.answer_json([vars(item) for item in found])
        return 1 if wrong else 0
    console.table(
        ("", "WHAT", "VERSION", "HOW IT STANDS"),
        [
            (item.verdict, item.name, item.version, f"{item.text} -> {item.fix}" if item.fix else item.text)
            for item in found
        ],
    )
    for item in found:
        if item.fix and item.verdict == "wrong":
            console.say(f"{item.name}: {item.fix}")
    console.say(f"{wrong} things to mend" if wrong else "nothing to mend")
    return 1 if wrong else 0
