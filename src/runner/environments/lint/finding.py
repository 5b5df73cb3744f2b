"""A finding of the linter: code, place, reason, way out."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from runner.environments.lint.codes import CODES, SEVERITIES
from runner.environments.rewriting import Change
from runner.located_toml import Place


@dataclass(frozen=True)
class Finding:
    """One thing that will hurt. An `error` ends the job, or makes it do something else; a `warning` costs results,
    speed or safety; a `note` is worth knowing."""

    code: str
    """a key of CODES"""
    severity: str
    """`error`, `warning` or `note`"""
    field: str
    """the field of the environment, as in `env show`: `image`, `mounts.0`, `env.NAME`; a script's: `#SBATCH`, `srun`"""
    place: Place | None
    """None: the value stands in no file of the user's"""
    reason: str
    fix: str
    changes: tuple[Change, ...] = dataclasses.field(default=(), compare=False)
    """what mends it in the file of `place`"""

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place else ""
        return f"{where}{self.severity}: {self.reason} [{self.code}]\n  try: {self.fix}"

    @property
    def rank(self) -> int:
        """Errors come first."""
        return SEVERITIES.index(self.severity)


def finding(
    code: str,
    field: str,
    place: Place | None,
    reason: str,
    fix: str = "",
    severity: str = "",
    changes: tuple[Change, ...] = (),
) -> Finding:
    """A finding, its severity and advice those of its code where none are given."""
    known = CODES[code]
    severity = severity or known.severities[0]
    assert severity in known.severities, f"{code} is never a {severity}"
    return Finding(code, severity, field, place, reason, fix or known.fix, changes)


def as_data(finding: Finding) -> dict[str, Any]:
    """The finding for JSON."""
    keys = ("code", "severity", "field", "reason", "fix")
    place = {"path": str(finding.place.path), "line": finding.place.line} if finding.place else {}
    return {**{key: getattr(finding, key) for key in keys}, "path": None, "line": None, **place}
