"""`./nox -s faults [-- FAULT… --times 20]`: each fault so many times on real private clusters, and what it cost.

The table of docs/reliability.md. Every run's outcome is kept below --work as it ends: Ctrl-C loses at most the runs in
progress, and the same command goes on from there (--fresh: begins anew). The table has all outcomes of this commit and
machine, so that it can be measured in several parts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from datetime import date
from pathlib import Path

from tests.faults.account import misplaced
from tests.faults.case import Outcome, interrupted
from tests.faults.faults import FAULTS, strike
from tests.faults.report import table
from tests.figures import machine
from tests.lab import parts

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "runner-bench" / "faults"
    parser = argparse.ArgumentParser(prog="nox -s faults --", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"default: all of {' '.join(FAULTS)}")
    parser.add_argument("--times", type=int, default=20, help="runs of each fault (default: 20)")
    parser.add_argument("--workers", type=int, default=6, help="clusters that live at the same time (default: 6)")
    parser.add_argument("--work", type=Path, default=cache, help=f"folder of the outcomes (default: {cache})")
    parser.add_argument("--fresh", action="store_true", help="forget the outcomes of earlier runs")
    parser.add_argument("--page", type=Path, help=f"write the table there, between its marks ({PAGE.name})")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.faults if name not in FAULTS]:
        parser.error(f"no fault {', '.join(unknown)}: {' '.join(FAULTS)}")
    return options


def load(file: Path, here: Mapping[str, str]) -> list[dict[str, object]]:
    """The outcomes of earlier runs `here`: on this machine, at this commit."""
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    kept = [each for each in found if here.items() <= each.items()]
    if len(kept) < len(found):
        print(f"outcomes of other commits or machines are left out: {len(found) - len(kept)}", file=sys.stderr)
    return kept


def left(names: Iterable[str], times: int, found: Iterable[Mapping[str, object]]) -> list[tuple[str, int]]:
    """What is still to be run: every fault once, then every fault a second time, …"""
    done = {(each["fault"], each["number"]) for each in found}
    wanted = [(number, name) for name in names for number in range(FAULTS[name].runs(times))]
    return [(name, number) for number, name in sorted(wanted, key=lambda each: each[0]) if (name, number) not in done]


def strike_all(wanted: Sequence[tuple[str, int]], workers: int, file: Path, here: Mapping[str, str]) -> None:
    """Run them, so many at a time, and keep each outcome."""
    with ThreadPoolExecutor(workers) as pool:
        running: dict[Future[Outcome], tuple[str, int]] = {}
        waiting = list(reversed(wanted))
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    name, number = waiting.pop()
                    running[pool.submit(strike, name, number)] = (name, number)
                ended, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in ended:
                    keep(file, *running.pop(future), future.result(), here)
        except KeyboardInterrupt:
            print("ending the runs in progress", file=sys.stderr, flush=True)
            interrupted.set()
            raise


def keep(file: Path, name: str, number: int, outcome: Outcome, here: Mapping[str, str]) -> None:
    entry = {"fault": name, "number": number, **here, "date": str(date.today()), **asdict(outcome)}
    entry["misplaced"] = misplaced(outcome.costs) if FAULTS[name].account else []
    entry["as_expected"] = FAULTS[name].explains(outcome)
    entry["passed"] = FAULTS[name].passed(outcome)
    if entry["passed"]:
        entry["trouble"] = ""
    with file.open("a") as results:
        results.write(json.dumps(entry) + "\n")
    shown = ("passed", "misplaced", *(key for key in asdict(outcome) if key not in {"trouble", "by_hand", "costs"}))
    words = ", ".join(f"{key} {entry[key]}" for key in shown)
    print(f"{name} {number + 1}: {words}", file=sys.stderr, flush=True)
    if entry["trouble"]:
        print(entry["trouble"], file=sys.stderr, flush=True)


def place() -> dict[str, str]:
    """The machine, and the newest commit of what is tested."""
    told = machine(Path.cwd())
    slurm = parts.BY_NAME["slurmctld, slurmd"].version_text()
    words = f"{told['processor']}, {told['cores']} cores, {told['memory']}, Linux {told['kernel']}, Slurm {slurm}"
    tested = ("--", "src", "jobs", "tests")
    commit = git("log", "-1", "--format=%h", *tested) + ("-changed" if git("status", "--porcelain", *tested) else "")
    return {"machine": words, "commit": commit}


def git(*words: str) -> str:
    return subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def main(argv: Sequence[str]) -> int:
    options = arguments(argv)
    options.work.mkdir(parents=True, exist_ok=True)
    file = options.work / "outcomes.jsonl"
    if options.fresh:
        file.unlink(missing_ok=True)
    names = options.faults or list(FAULTS)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    here = place()
    try:
        strike_all(left(names, options.times, load(file, here)), options.workers, file, here)
    except KeyboardInterrupt:
        return 130
    found = load(file, here)
    lines = table(found)
    print("\n".join(lines))
    if options.page:
        write_between(options.page, lines)
    return 0 if all(each["passed"] for each in found if each["fault"] in names) else 1


def write_between(page: Path, lines: Sequence[str]) -> None:
    """Put the lines between the page's marks."""
    begin, end = "<!-- faults -->\n", "<!-- end of faults -->"
    head, _, rest = page.read_text().partition(begin)
    page.write_text(f"{head}{begin}\n{chr(10).join(lines)}\n\n{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
