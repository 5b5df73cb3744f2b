"""`./nox -s faults [-- FAULT… --times 20]`: each fault so many times on real private clusters, and what it cost.

The table of docs/reliability.md. Every run's outcome is kept below --work as it ends: Ctrl-C loses at most the runs in
progress, and the same command goes on from there (--fresh: begins anew).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from datetime import date
from pathlib import Path

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


def load(file: Path) -> list[dict[str, object]]:
    """The outcomes of earlier runs."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def left(names: Iterable[str], times: int, found: Iterable[Mapping[str, object]]) -> list[tuple[str, int]]:
    """What is still to be run: every fault once, then every fault a second time, …"""
    done = {(each["fault"], each["number"]) for each in found}
    wanted = [(number, name) for name in names for number in range(FAULTS[name].runs(times))]
    return [(name, number) for number, name in sorted(wanted, key=lambda each: each[0]) if (name, number) not in done]


def strike_all(wanted: Sequence[tuple[str, int]], workers: int, file: Path) -> None:
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
                    keep(file, *running.pop(future), future.result())
        except KeyboardInterrupt:
            print("ending the runs in progress", file=sys.stderr, flush=True)
            interrupted.set()
            raise


def keep(file: Path, name: str, number: int, outcome: Outcome) -> None:
    entry = {"fault": name, "number": number, "machine": place(), "date": str(date.today()), **asdict(outcome)}
    entry["as_expected"] = FAULTS[name].explains(outcome)
    entry["passed"] = FAULTS[name].passed(outcome)
    if entry["passed"]:
        entry["trouble"] = ""
    with file.open("a") as results:
        results.write(json.dumps(entry) + "\n")
    shown = ("passed", *(key for key in asdict(outcome) if key not in {"trouble", "by_hand"}))
    words = ", ".join(f"{key} {entry[key]}" for key in shown)
    print(f"{name} {number + 1}: {words}", file=sys.stderr, flush=True)
    if entry["trouble"]:
        print(entry["trouble"], file=sys.stderr, flush=True)


def place() -> str:
    told = machine(Path.cwd())
    slurm = parts.BY_NAME["slurmctld, slurmd"].version_text()
    return f"{told['processor']}, {told['cores']} cores, {told['memory']}, Linux {told['kernel']}, Slurm {slurm}"


def main(argv: Sequence[str]) -> int:
    options = arguments(argv)
    options.work.mkdir(parents=True, exist_ok=True)
    file = options.work / "outcomes.jsonl"
    if options.fresh:
        file.unlink(missing_ok=True)
    names = options.faults or list(FAULTS)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        strike_all(left(names, options.times, load(file)), options.workers, file)
    except KeyboardInterrupt:
        return 130
    found = [each for each in load(file) if each["fault"] in names]
    lines = table(found)
    print("\n".join(lines))
    if options.page:
        write_between(options.page, lines)
    return 0 if all(each["passed"] for each in found) else 1


def write_between(page: Path, lines: Sequence[str]) -> None:
    """Put the lines between the page's marks."""
    begin, end = "<!-- faults -->\n", "<!-- end of faults -->"
    head, _, rest = page.read_text().partition(begin)
    page.write_text(f"{head}{begin}\n{chr(10).join(lines)}\n\n{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
