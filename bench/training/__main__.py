"""`./nox -s bench -- train [options]`: the jobs beside the stock scripts, side by side in one run.

CPU, one thread, process CPU time: the figures to read are ratios. Results: tables on stdout, JSON in the work folder.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.figures import machine

PARTS = {
    "first_step": "bench.training.first_step",
    "resume": "bench.training.resume",
    "kills": "tests.jobs.kills",
}


def arguments(argv: list[str]) -> argparse.Namespace:
    """The options."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "runner-bench" / "training"
    parser = argparse.ArgumentParser(prog="nox -s bench -- train", description=__doc__)
    parser.add_argument("--work", type=Path, default=cache, help=f"folder for data and results (default: {cache})")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds: to see that it works")
    parser.add_argument("--print", action="store_true", help="print the tables of the last run, measure nothing")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Run the parts that were asked for; write results.json after each and print the tables."""
    options = arguments(argv)
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    file = work / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name in () if options.print else options.parts.split(","):
        part = _part(name)
        folder = work / name
        folder.mkdir(exist_ok=True)
        results[name] = {"machine": machine(work), "quick": options.quick, "found": part.measure(folder, options.quick)}
        file.write_text(json.dumps(results, indent=1))
    for name in PARTS:
        if name in results:
            print("\n".join(_told(name, results[name], _part(name))))


def _part(name: str) -> Any:
    if name not in PARTS:
        raise SystemExit(f"unknown part {name!r}; parts: {', '.join(PARTS)}")
    return import_module(PARTS[name])


def _told(name: str, result: dict[str, Any], part: Any) -> list[str]:
    told = result["machine"]
    short = " (quick)" if result["quick"] else ""
    place = f"{told['processor']}, {told['cores']} cores, {told['memory']}, Linux {told['kernel']}"
    return [f"## {name}{short}", "", place, "", *part.render(result["found"]), ""]


if __name__ == "__main__":
    main(sys.argv[1:])
