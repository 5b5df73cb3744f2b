"""Findings as SARIF 2.1.0, which code hosts show beside the lines. Source: OASIS, SARIF 2.1.0, 3.13 to 3.30."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from runner import __version__
from runner.environments.lint.codes import CODES
from runner.environments.lint.finding import Finding

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
