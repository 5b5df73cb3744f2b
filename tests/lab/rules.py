"""Rules for the tests themselves, part of `nox -s lint`: `python -m tests.lab.rules`.

- Each pattern of tests/tiers.toml matches a test.
- A test whose text sets a short limit, or measures time, is in the tier `timing`, or its line says `# not timed: WHY`.
- Every collection finds the same tests: workers that find others end the whole run at once.
- tests/flaky.txt has at most ten lines, NODEID | DATE | MECHANISM, and no more than the commit on main has.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# a limit of less than 100 seconds, a pause that must be long enough, a time that must not be longer
TIMED = re.compile(
    r"""hang_seconds=\d{1,2}\b|_SECONDS["']?: ["'][1-9]\d?["']|sleep \d?\.\d+; cat|monotonic\(\) - \w+ <"""
)
EXCUSE = "# not timed: "
MOST_FLAKY = 10


def collected(hash_seed: int) -> list[str]:
    """Return the ids of all tests, without tests/. Raises RuntimeError when pytest cannot collect them."""
    argv = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", str(TESTS))
    environ = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    shown = subprocess.run(argv, cwd=TESTS.parent, env=environ, capture_output=True, text=True, check=False)
    found = [line.removeprefix("tests/") for line in shown.stdout.splitlines() if "::" in line]
    if shown.returncode or not found:
        raise RuntimeError(shown.stdout[-2000:] + shown.stderr[-2000:])
    return found


def unmatched(tiers: dict[str, list[str]], ids: list[str]) -> Iterator[str]:
    for tier, patterns in tiers.items():
        for pattern in patterns:
            if not any(re.search(pattern, name) for name in ids):
                yield f"tests/tiers.toml: no test matches {pattern!r} of {tier}"


def timed(tiers: dict[str, list[str]], ids: list[str]) -> Iterator[str]:
    """Tests of the gate that depend on time by their text."""
    gate = {name.partition("[")[0] for name in ids if not any(re.search(p, name) for ps in tiers.values() for p in ps)}
    for path in sorted(TESTS.rglob("test_*.py")):
        text, name = path.read_text(), path.relative_to(TESTS).as_posix()
        if not TIMED.search(text):
            continue
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef) or f"{name}::{node.name}" not in gate:
                continue
            if any("mark.slow" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                line = lines[number - 1]
                if TIMED.search(line) and EXCUSE not in line and EXCUSE not in lines[number - 2]:
                    yield f"tests/{name}:{number}: time decides in {node.name}, which is not in the tier timing"


def changing(once: list[str], again: list[str]) -> Iterator[str]:
    """Ids that depend on the time, on random numbers or on the order of a set."""
    for name, other in zip(once, again, strict=False):
        if name != other:
            yield f"tests/{name}: another collection has {other} here"


def flaky() -> Iterator[str]:
    lines = (TESTS / "flaky.txt").read_text().splitlines()
    for line in lines:
        if len([field for field in line.split("|") if field.strip()]) != 3:
            yield f"tests/flaky.txt: not NODEID | DATE | MECHANISM: {line!r}"
    show = ("git", "show", "main:tests/flaky.txt")
    there = subprocess.run(show, cwd=TESTS, capture_output=True, text=True, check=False)
    most = len(there.stdout.splitlines()) if there.returncode == 0 else MOST_FLAKY
    if len(lines) > min(most, MOST_FLAKY) and len(lines) > 0:
        yield f"tests/flaky.txt: {len(lines)} lines; main has {most}, and {MOST_FLAKY} is the most: fix one first"


def main() -> int:
    tiers = tomllib.loads((TESTS / "tiers.toml").read_text())
    ids = collected(1)
    found = [*unmatched(tiers, ids), *timed(tiers, ids), *changing(ids, collected(2)), *flaky()]
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
