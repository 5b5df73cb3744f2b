"""The most telling lines of logs, and the last ones, for a failure that no cause explains."""

from __future__ import annotations

import re
from collections.abc import Sequence

from runner.runs.why.cause import Cause, cause_of
from runner.runs.why.evidence import Evidence, Source
from runner.runs.why.logs import Line, scan, window
from runner.runs.why.place import rank_of

_WORDS = (b"rror", b"ERR", b"FATAL", b"atal", b"ailed", b"AILED", b"annot", b"denied", b"illed", b"bort", b"o such",
          b"panic", b"xception", b"nable to", b"ot found", b"imed out")  # fmt: skip
_WEIGHTS = (
    (re.compile(r"(?i)\b(fatal|panic|abort(ed|ing)?|killed|core dumped)\b"), 4),
    (re.compile(r"^(\[rank ?\d+\]: ?|\d+: )?[\w.]{1,120}(Error|Exception)\b"), 4),
    (re.compile(r"\bNCCL WARN\b"), 4),
    (re.compile(r"(?i)\b(error|exception|failed|failure|cannot|denied|unable|timed out|no such|not found)\b"), 2),
    (re.compile(r"(?i)\b(warn(ing)?|deprecat|info|debug|retry)"), -2),
    (re.compile(r"(?i)\b(0 errors?|no errors?|errors?[=:] ?0|failed[=:] ?0|0 failed|ignor|fall(ing)? back)\b"), -6),
)
UNKNOWN = Cause("unknown", "", "", "", "")
_TORCHRUN = re.compile(r"^\S{1,400} FAILED$|^ +raise \w+\(|Root Cause \(first|^  (exitcode|error_file|traceback) +: ")
_MOST = 8
_LAST = 5
_TAIL_BYTES = 16 << 10
_OWN = ("job.sbatch: ", "preflight: ")  # what our batch script reports about itself


def lines(sources: Sequence[Source]) -> tuple[Evidence, ...]:
    """The most telling lines, in their order; none where no line that a cause does not match reports trouble."""
    weighed: list[tuple[int, int, Line, Source]] = []
    seen: set[str] = set()
    for source in sources:
        found = scan(source.path, _WORDS, source.start)
        for line in found.lines():
            shape = re.sub(r"\d+", "0", line.text.strip())[:200]
            weight = sum(value for pattern, value in _WEIGHTS if pattern.search(line.text))
            silent = line.text.startswith(_OWN) or _TORCHRUN.search(line.text) or cause_of(line.text)
            if weight > 0 and shape not in seen and not silent and not found.survived(line):
                seen.add(shape)
                weighed.append((weight, -line.offset, line, source))
    best = sorted(weighed, key=lambda each: (-each[0], each[1]))[:_MOST]
    ordered = sorted(best, key=lambda each: (str(each[2].path), each[2].offset))
    return tuple(_evidence(line, source) for _, _, line, source in ordered)


def last_lines(sources: Sequence[Source]) -> tuple[Evidence, ...]:
    """The last lines of the first log, without those of the batch script."""
    for source in sources[:1]:
        size = source.path.stat().st_size
        found = window(source.path, max(source.start, size - _TAIL_BYTES), _TAIL_BYTES)
        kept = [line for line in found if line.strip() and not line.startswith(_OWN)][-_LAST:]
        return tuple(Evidence(UNKNOWN, source.path, 0, line.strip()[-400:]) for line in kept)
    return ()


def _evidence(line: Line, source: Source) -> Evidence:
    rank = rank_of(line.text, line.path)
    return Evidence(
        UNKNOWN, line.path, line.number, line.text.strip()[:400], line.offset, source.rank if rank is None else rank
    )
