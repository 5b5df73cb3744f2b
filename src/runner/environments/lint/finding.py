"""A finding of the linter: code, position, reason and fix."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from runner import __version__
from runner.environments.lint.codes import CODES
from runner.environments.rewriting import Change, rewrite
from runner.errors import RunnerError
from runner.located_toml import Place


@dataclass(frozen=True)
class Finding:
    """One problem. An `error` makes the job fail or changes what it does; a `warning` affects results, speed or safety;
    a `note` is information."""

    code: str
    """a key of CODES"""
    severity: str
    """`error`, `warning` or `note`"""
    field: str
    """the field of the environment, as in `env show`: `image`, `mounts.0`, `env.NAME`; a script's: `#SBATCH`, `srun`"""
    place: Place | None
    """None: the value does not come from a file of the user"""
    reason: str
    fix: str
    changes: tuple[Change, ...] = dataclasses.field(default=(), compare=False)
    """the changes that fix it in the file of `place`"""

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place else ""
        return f"{where}{self.severity}: {self.reason} [{self.code}]\n  try: {self.fix}"


def finding(
    code: str,
    field: str,
    place: Place | None,
    reason: str,
    fix: str = "",
    severity: str = "",
    changes: tuple[Change, ...] = (),
) -> Finding:
    """A finding, with the severity and fix of its code unless given."""
    known = CODES[code]
    severity = severity or known.severities[0]
    assert severity in known.severities, f"{code} is never a {severity}"
    return Finding(code, severity, field, place, reason, fix or known.fix, changes)


def as_data(finding: Finding) -> dict[str, Any]:
    """The finding for JSON."""
    keys = ("code", "severity", "field", "reason", "fix")
    place = {"path": str(finding.place.path), "line": finding.place.line} if finding.place else {}
    return {**{key: getattr(finding, key) for key in keys}, "path": None, "line": None, **place}


_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_sarif(findings: Sequence[Finding], root: Path) -> dict[str, Any]:
    """The log of one run. Paths below `root` are written relative to it."""
    codes = sorted({finding.code for finding in findings})
    driver = {"name": "runner", "version": __version__, "rules": [_rule(code) for code in codes]}
    results = [_result(finding, codes.index(finding.code), root) for finding in findings]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(code: str) -> dict[str, Any]:
    known = CODES[code]
    return {
        "id": code,
        "shortDescription": {"text": known.title},
        "help": {"text": known.fix},
        "defaultConfiguration": {"level": known.severities[0]},
    }


def _result(finding: Finding, index: int, root: Path) -> dict[str, Any]:
    result = {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": finding.severity,
        "message": {"text": f"{finding.reason}. Try: {finding.fix}"},
        "properties": {"field": finding.field},
    }
    if finding.place is None:
        return result
    path = finding.place.path
    inside = path.is_relative_to(root)
    uri = quote(path.relative_to(root).as_posix()) if inside else path.absolute().as_uri()
    region = {"region": {"startLine": finding.place.line}} if finding.place.line else {}
    return {**result, "locations": [{"physicalLocation": {"artifactLocation": {"uri": uri}, **region}}]}


def by_file(findings: Sequence[Finding]) -> dict[Path, list[Finding]]:
    """The findings that can be fixed automatically, by file."""
    found: dict[Path, list[Finding]] = {}
    for one in findings:
        if one.changes and one.place is not None:
            found.setdefault(one.place.path, []).append(one)
    return found


def fixed(text: str, path: Path, findings: Sequence[Finding]) -> tuple[str, tuple[Finding, ...]]:
    """The text with one change per key path, and the findings that this fixes. Comments and order are kept.

    Other findings about the same key need another pass. Changes that cannot be made automatically are left out.
    """
    touched: set[tuple[str, ...]] = set()
    done: list[Finding] = []
    for one in findings:
        keys = {change.keys for change in one.changes}
        if keys & touched:
            continue
        try:
            text = rewrite(text, one.changes, path)
        except RunnerError:
            continue
        touched |= keys
        done.append(one)
    return text, tuple(done)
