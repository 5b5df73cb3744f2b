"""One line of `runner doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Diagnosis:
    """What was looked at, how it stands, and how to mend it."""

    name: str
    verdict: str
    """`ok`, `missing` (something else can do its work) or `wrong` (it will hurt)"""
    text: str
    fix: str = ""
    """how to mend it; empty where all is well, or nothing can be done"""
    version: str = ""
