"""doctor: what this machine can do."""

import argparse
import os

from runner.commands.console import Console
from runner.detection import find_site
from runner.doctor.examination import examine


def examine_machine(args: argparse.Namespace, console: Console) -> int:
    """`runner doctor`: print a line per check, then what the machine is ready for. Exit code 1 if a check failed."""
    site, why = find_site(args.site, os.environ)
    examination = examine(site, why, os.environ)
    found = examination.diagnoses
    wrong = [item for item in found if item.verdict == "wrong"]
    if args.json:
        console.answer_json([vars(item) for item in found])
        return 1 if wrong else 0
    rows = [
        (
            item.verdict,
            item.name,
            item.version,
            item.text + (f" -> {item.fix}" if item.fix and item.counts else ""),
        )
        for item in found
    ]
    console.table(("STATUS", "CHECK", "VERSION", "RESULT"), rows, wrap=True)
    for item in wrong:
        console.say(f"fix {item.name}: {item.fix or item.text}")
    if examination.not_ready:
        console.say(f"not ready for: {', '.join(examination.not_ready)}")
    console.say(f"ready for: {', '.join(examination.ready) or 'nothing yet'}")
    return 1 if wrong else 0
