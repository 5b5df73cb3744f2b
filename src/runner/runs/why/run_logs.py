"""The logs of a run's newest attempt: its part of job.log, and the file of each rank."""

from __future__ import annotations

import re
from pathlib import Path

from runner.runs.run import Run
from runner.runs.why.evidence import Source

_ATTEMPT = re.compile(rb"^job\.sbatch: attempt (\d{1,6}) on ", re.MULTILINE)
_PIECE_BYTES = 1 << 20


def sources(run: Run) -> tuple[Source, ...]:
    """What there is to read, job.log first."""
    found = [Source(run.log, _begin(run.log, len(run.attempts)))] if run.log.is_file() else []
    if run.attempts:
        attempt = run.attempts[-1]
        found += [Source(path, rank=_number(path.stem)) for path in sorted(attempt.glob("rank-*.log"))]
        found += [Source(path) for path in sorted(attempt.glob("setup-node-*.log"))]
        found += [
            Source(path, rank=_torchrun_rank(path, run))
            for path in sorted(attempt.glob("node-*/*/attempt_*/*/std*.log"))
        ]
    return tuple(each for each in found if each.path.stat().st_size)


def _begin(log: Path, attempts: int) -> int:
    """The byte where the newest attempt begins in the one appended file; 0 for the only one."""
    if attempts < 2:
        return 0
    begin = 0
    with log.open("rb") as file:
        offset, carry = 0, b""
        while data := file.read(_PIECE_BYTES):
            piece = carry + data
            for found in _ATTEMPT.finditer(piece):
                begin = offset - len(carry) + found.start()
            cut = piece.rfind(b"\n") + 1
            offset += len(data)
            carry = piece[cut:][-4096:]
    return begin


def _number(stem: str) -> int | None:
    found = re.search(r"(\d{1,6})$", stem)
    return int(found[1]) if found else None


def _torchrun_rank(path: Path, run: Run) -> int | None:
    """The rank in attempts/N/node-NODE/ID/attempt_K/LOCAL/stderr.log."""
    node, local = _number(path.parents[3].name), _number(path.parent.name)
    return None if node is None or local is None else node * run.processes_per_node + local


def first_failure(run: Run) -> tuple[int, int, str] | None:
    """(exit code, rank, node) of the task that said first that it failed."""
    if not run.attempts:
        return None
    try:
        words = (run.attempts[-1] / "first_failure").read_text(errors="replace").split()
    except OSError:
        return None
    if len(words) < 5 or not (words[0].isdigit() and words[2].isdigit()):
        return None
    return int(words[0]), int(words[2]), words[4]
