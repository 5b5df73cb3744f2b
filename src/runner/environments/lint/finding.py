"""A finding of the linter: code, place, reason, way out."""

from __future__ import annotations

from dataclasses import dataclass

from runner.located_toml import Place


@dataclass(frozen=True)
class Finding:
    """One thing that will hurt. `severity` is `error` (the job will fail, or do something else) or `warning`."""

    code: str
    severity: str
    field: str
    place: Place | None
    reason: str
    fix: str

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place else ""
        return f"{where}{self.severity}: {self.reason} [{self.code}]\n  try: {self.fix}"
