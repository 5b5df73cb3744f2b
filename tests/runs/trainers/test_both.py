"""runs/steps.py reads the same as payload/trainer.awk in all recorded logs, at once and in parts."""

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runner.runs import payload, trainer
from runner.runs.patterns import parse
from runner.runs.steps import Piece, Reader, State
from tests.runs.trainers.test_bars import FORMATS, LINES, NOTHING, PREFIXES, SEQUENCES
from tests.runs.trainers.test_logs import EXPECTED, HERE, NO_PROJECT, OTHERS

Found = tuple[str, list[dict[str, Any]], list[str]]
"""(trainer, entries, lines of attempts/N/saved)"""
LOGS = [
    *((path.stem, path.read_bytes()) for path in sorted((HERE / "logs").glob("*.log"))),
    *((path.stem, path.read_bytes()) for path in OTHERS),
    *((name, text.encode() + b"\n") for name, text, _ in FORMATS),
    *((name, text.encode()) for name, text, _, _ in SEQUENCES),
    *((text[:30], text.encode() + b"\n") for text in NOTHING),
    *((prefix, f"\r{prefix}{text}\r".encode()) for prefix in PREFIXES for text, _ in LINES),
]


def in_parts(log: bytes, size: int) -> list[bytes]:
    """Parts of at least so many bytes that end with a line."""
    parts, at = [], 0
    while at < len(log):
        ends = [end for end in (log.find(each, at + size) for each in (b"\n", b"\r")) if end >= 0]
        end = min(ends, default=len(log) - 1) + 1
        parts.append(log[at:end])
        at = end
    return parts


def by_awk(parts: list[bytes], patterns: str, folder: Path) -> Found:
    (folder / "trainer.awk").write_text(payload.files()["payload/trainer.awk"])
    (folder / "trainers").write_text(patterns)
    found: Found = ("", [], [])
    name, state = "", ""
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        text = part.translate(bytes.maketrans(b"\r\0\1", b"\n\n "))
        done = subprocess.run(
            ("mawk", "-v", f"now={number + 1}", "-v", f"before={number}", "-v", "attempt=1", "-v", "world=4",
             "-v", f"last={int(last)}", "-f", folder / "trainer.awk", folder / "trainers", "-"),
            input=state.encode() + b"\1f 0 %d job.log\n" % (number + 1) + text + b"\1e\n",
            capture_output=True, check=True, env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
        )  # fmt: skip
        lines = done.stdout.decode(errors="surrogateescape").splitlines()
        state = "".join(f"\1{line}\n" for line in lines if line.startswith("s "))
        name = next((line.split(" ")[1] for line in reversed(lines) if line.startswith("trainer ")), name)
        found[1].extend(json.loads(line) for line in lines if line.startswith("{"))
        found[2].extend(f"{int(line.split()[1])} {line.split()[2]}" for line in lines if line.startswith("saved "))
    return name, *found[1:]


def by_python(parts: list[bytes], patterns: str) -> Found:
    trainers, _ = parse(patterns)
    entries: list[dict[str, Any]] = []
    saved: list[str] = []
    state = None
    reader = Reader(trainers, 4)
    for number, part in enumerate(parts):
        reader = Reader(trainers, 4, state)
        reader.read(Piece("job.log", part.decode("latin-1"), number, number + 1))
        entries = [*([] if reader.discarded else entries), *reader.entries]
        saved += [f"{each.step} {each.path}" for each in reader.saved]
        state = State.from_record(json.loads(json.dumps(reader.state.record())))
    return reader.reported, [*entries, *reader.newest(ended=True)], saved


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        both_nan = one != one and other != other
        return both_nan or (one is not None and other is not None and math.isclose(one, other, rel_tol=1e-5))
    return one == other


def assert_same(awk: Found, python: Found, *, times: bool) -> None:
    assert (awk[0], awk[2]) == (python[0], python[2])
    left = [{key: value for key, value in each.items() if key != "attempt"} for each in awk[1]]
    assert [each["step"] for each in left] == [each["step"] for each in python[1]]
    for one, other in zip(left, python[1], strict=True):
        keys = (one.keys() | other.keys()) - (set() if times else {"time"})
        assert not [(key, one.get(key), other.get(key)) for key in keys if not same(one.get(key), other.get(key))]


@pytest.mark.parametrize(("name", "log"), LOGS)
def test_at_once(tmp_path: Path, name: str, log: bytes) -> None:
    for chosen in (None, EXPECTED[name][0] if name in EXPECTED else trainer.GENERIC, "bars"):
        patterns = trainer.render(chosen, NO_PROJECT)
        assert_same(by_awk([log], patterns, tmp_path), by_python([log], patterns), times=False)


@pytest.mark.parametrize(("name", "log"), LOGS)
def test_in_parts(tmp_path: Path, name: str, log: bytes) -> None:
    """The reader finds the same wherever a part begins. The awk forgets the entry to which a line adds something."""

    def with_loss(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in each.items() if key != "time"} for each in entries if each["loss"] is not None
        ]

    patterns = trainer.render(None, NO_PROJECT)
    whole = by_python([log], patterns)
    for size in (0, 300, 2000):
        python = by_python(in_parts(log, size), patterns)
        assert with_loss(python[1]) == with_loss(whole[1])
        assert (python[0], python[2]) == (whole[0], whole[2])
    awk = by_awk(in_parts(log, 1000), patterns, tmp_path)
    assert (awk[0], awk[2]) == (whole[0], whole[2])
    steps = [[each["step"] for each in found[1]] for found in (awk, whole)]
    assert steps[0][-1:] == steps[1][-1:] and set(steps[0]) >= {each["step"] for each in with_loss(whole[1])}
