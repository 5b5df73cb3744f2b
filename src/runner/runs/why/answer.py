"""What `runner why` answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from runner.runs.why.cause import Cause
from runner.runs.why.evidence import Evidence


@dataclass(frozen=True)
class Answer:
    """Why something failed, waits or is slow."""

    subject: str
    """the run's name, or the logs"""
    state: str = ""
    """what the scheduler and the run folder say: `FAILED, exit code 1, attempt 2`"""
    cause: Cause | None = None
    evidence: str = ""
    """`job.log:17`, `squeue`, ..."""
    line: str = ""
    """the evidence itself"""
    first: Evidence | None = None
    """where the evidence is a line of a log"""
    rank: int | None = None
    """the first rank that failed"""
    node: str = ""
    followed: tuple[tuple[Evidence, int], ...] = ()
    slow: tuple[Evidence, ...] = ()
    notes: tuple[str, ...] = ()
    """what else is worth knowing: the pace, logs that could not be read or not whole"""
    telling: tuple[Evidence, ...] = field(default=())
    """the most telling lines, where no cause is known, or one that does not say much"""
    last: tuple[Evidence, ...] = ()
    """the last lines, where no cause is known and no line is telling"""
    hint: str = ""
    """what to do where no cause is known"""
    fine: bool = False
    """nothing is wrong with it"""

    @property
    def known(self) -> bool:
        """Whether it explains the failure, or there is nothing to explain."""
        return self.cause is not None or self.fine

    def record(self) -> dict[str, object]:
        """What --json prints."""
        cause, first = self.cause, self.first
        return {
            "subject": self.subject,
            "state": self.state,
            "known": self.known,
            "fine": self.fine,
            "cause": cause and {"code": cause.code, "subject": cause.subject, "says": cause.says,
                                "explanation": cause.explanation, "fix": cause.fix},
            "evidence": {"place": self.evidence, "line": self.line,
                         "file": str(first.path) if first else None, "number": first.number if first else None,
                         "time": first.time.isoformat() if first and first.time else None} if cause else None,
            "rank": self.rank,
            "node": self.node or None,
            "frame": _frame(first),
            "followed": [{"code": each.cause.code, "place": each.place, "line": each.text, "lines": count}
                         for each, count in self.followed],
            "slow": [{"code": each.cause.code, "says": each.cause.says, "place": each.place, "line": each.text,
                      "fix": each.cause.fix} for each in self.slow],
            "notes": list(self.notes),
            "telling": [{"place": each.place, "line": each.text} for each in (*self.telling, *self.last)],
        }  # fmt: skip


def _frame(first: Evidence | None) -> dict[str, object] | None:
    frame = first.frame if first else None
    if frame is None:
        return None
    return {"file": frame.file, "line": frame.line, "function": frame.function, "code": frame.code}
