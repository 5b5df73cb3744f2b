"""The suite as `.ci/run` runs it: `python -m tests.gate`; `--all` runs every tier.

First pass: three workers. What fails there runs once more, alone on the machine and with new labs, if it uses a real
part (Slurm, podman, a registry, torch) and few tests fail: such a test may have met a slow moment of the machine. A
failure of the quick tier is final, because nothing there depends on the machine. The last line but one names what
passed only the second time. Such a test is a fault with a deadline: find its cause, or note it in tests/flaky.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from tests.lab import leftovers, parts

TESTS = Path(__file__).parent
OUTCOMES = "RUNNER_PYTEST_OUTCOMES"  # the file to which tests/conftest.py writes what ended how
TIMEOUT_SECONDS = 600  # of a test with its fixtures: more than ten times the quiet time of the slowest in the gate
TIMEOUT_SECONDS_ALL = 1800
SESSION_SECONDS = 70 * 60
MOST_FAILURES = 10  # more than that is a fault of the product or of the machine, and running again would hide it
MOST_FLAKY = 3
# three at a time on two cores: a third of the tests wait, for Slurm above all; the longest files are begun first
SPREAD = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
GATE = "not slow and not timing and not long and not index"


@dataclass(frozen=True)
class Outcome:
    """How one pass of pytest ended."""

    code: int
    passed: int = 0
    skipped: int = 0
    failed: dict[str, bool] = field(default_factory=dict)  # id of the test -> whether it uses a real part
    complaints: tuple[str, ...] = ()  # parts that are missing or unused, and skips without a reason


def run_pytest(words: Sequence[str], **environ: str) -> Outcome:
    """Run pytest with its output on ours."""
    with tempfile.TemporaryDirectory(prefix="runner-gate-") as folder:
        file = Path(folder, "outcomes.json")
        argv = (sys.executable, "-m", "pytest", *words)
        print(f"$ pytest {shlex.join(words)}", flush=True)
        code = subprocess.run(argv, env={**os.environ, OUTCOMES: str(file), **environ}, check=False).returncode
        found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    complaints = tuple(found.pop("complaints", ()))
    return Outcome(code, complaints=complaints, **found)


def why_final(outcome: Outcome) -> str:
    """Return why the failures of a first pass are final; "" if they may run once more."""
    if outcome.code != 1 or not outcome.failed:
        return f"pytest ended with exit code {outcome.code}"
    if outcome.complaints:
        return "; ".join(outcome.complaints)
    if len(outcome.failed) > MOST_FAILURES:
        return f"{len(outcome.failed)} tests failed, more than {MOST_FAILURES}"
    if quick := [name for name, on_parts in outcome.failed.items() if not on_parts]:
        return f"no real part is in {', '.join(quick)}"
    return ""


def passed_again(outcome: Outcome, names: Sequence[str]) -> bool:
    """Whether each of the tests has passed in a second pass; a skip does not count."""
    return outcome.code == 0 and outcome.passed == len(names)


def limits(seconds: int) -> tuple[str, ...]:
    return (
        *(f"--timeout={seconds}", "--timeout-method=signal", f"--session-timeout={SESSION_SECONDS}"),
        *("-o", f"faulthandler_timeout={seconds - 60}"),
    )


def later_files() -> tuple[str, ...]:
    """Options that spare each worker the import of files of which every test is in a later tier."""
    later = re.compile("|".join(chain.from_iterable(tomllib.loads((TESTS / "tiers.toml").read_text()).values())))
    files = (path.relative_to(TESTS).as_posix() for path in sorted(TESTS.rglob("test_*.py")))
    return tuple(f"--ignore=tests/{file}" for file in files if later.search(file))


def gate() -> int:
    """Run the gate; returns the exit code."""
    began = time.monotonic()
    words = ("--maxfail=15", "--durations=25", "-m", GATE, *later_files(), *limits(TIMEOUT_SECONDS))
    first = run_pytest((*SPREAD, *words))
    final = why_final(first) if first.code else ""
    flaky: list[str] = []
    if first.code and not final:
        names = list(first.failed)
        print(f"second pass: {len(names)} tests that failed, alone and with new labs", flush=True)
        without = {parts.REQUIRE: ""}  # the first pass has used each part
        second = run_pytest(("-p", "no:cacheprovider", "-p", "no:xdist", *limits(TIMEOUT_SECONDS), *names), **without)
        if not passed_again(second, names):
            final = f"failed twice: {', '.join(second.failed or names)}"
        else:
            flaky = names
        if len(flaky) > MOST_FLAKY:
            final = f"{len(flaky)} tests passed only alone, more than {MOST_FLAKY}"
    if final:
        print(f"red: {final}")
    minutes, seconds = divmod(int(time.monotonic() - began), 60)
    print(f"flaky: {len(flaky)}", *flaky)
    failed = 0 if not final else max(1, len(first.failed))
    print(f"{first.passed + len(flaky)} passed, {failed} failed, {first.skipped} skipped in {minutes} min {seconds} s;"
          f" {leftovers.machine()}", flush=True)  # fmt: skip
    return 1 if final else 0


def everything(words: Sequence[str]) -> int:
    """Run every tier; returns pytest's exit code."""
    argv = (*SPREAD, "--durations=25", "-m", "", f"--timeout={TIMEOUT_SECONDS_ALL}", "--timeout-method=signal", *words)
    return run_pytest(argv, **{parts.ALL: "1"}).code


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every tier, without a second pass")
    options, words = parser.parse_known_args(argv)
    leftovers.remove(Path(tempfile.gettempdir()))
    print(leftovers.machine(), flush=True)
    if why := leftovers.too_little_room():
        print(f"red: {why}")
        return 1
    return everything(words) if options.all else gate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
