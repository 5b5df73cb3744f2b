"""Start-up of the command line beside Python's own and torchx's, as ratios measured in turn in one run.

`python bench/startup.py [RUNS]`: `runner --help` should be at most 3x, `runner env emit` at most 5x, `runner launch
--dry-run` at most 10x the time of `python -c pass`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
# byte code is kept, as it is after an ordinary install; all commands alike
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
COMMANDS = {
    "python -c pass": (PYTHON, "-c", "pass"),
    "runner --help": (str(Path(PYTHON).parent / "runner"), "--help"),
    "runner env emit": (
        str(Path(PYTHON).parent / "runner"),
        *("env", "emit", "ngc-ds", "--as", "pyxis", "--site", "generic-pyxis"),
    ),
    "runner launch --dry-run": (
        str(Path(PYTHON).parent / "runner"),
        *(
            "launch",
            "--dry-run",
            "--site",
            "alps-clariden",
            "--account",
            "a01",
            "--env",
            "ngc-ds-alps",
            "--script",
            "sft",
        ),
    ),
    "torchx run --dryrun": (
        str(Path(PYTHON).parent / "torchx"),
        *("run", "--scheduler", "local_cwd", "--dryrun", "utils.echo", "--msg", "hi"),
    ),
}


def seconds(argv: tuple[str, ...]) -> float:
    """Wall seconds of one run; ends the bench where the command fails."""
    start = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT, env=ENVIRONMENT)
    return time.perf_counter() - start


def main() -> None:
    """Run the commands in turn, so that a change of the machine's speed meets all alike; print medians and ratios."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    samples: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for argv in COMMANDS.values():  # one warm-up each: byte code, page cache
        seconds(argv)
    for _ in range(runs):
        for name, argv in COMMANDS.items():
            samples[name].append(seconds(argv))
    base = statistics.median(samples["python -c pass"])
    print(f"{'command':<26}{'median ms':>10}{'min':>8}{'max':>8}{'x python':>10}")
    for name, values in samples.items():
        middle = statistics.median(values)
        print(
            f"{name:<26}{middle * 1e3:>10.1f}{min(values) * 1e3:>8.1f}{max(values) * 1e3:>8.1f}{middle / base:>10.2f}"
        )


if __name__ == "__main__":
    main()
