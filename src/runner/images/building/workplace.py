"""Workplace: the engine, its storage, and where a build's log and progress go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runner.images.engine import Engine
from runner.images.oci.store import Store
from runner.machine.report import Report


@dataclass(frozen=True)
class Workplace:
    """What every part of a build needs."""

    engine: Engine
    store: Store
    platform: str
    """`linux/amd64`, `linux/arm64`"""
    log: Path
    report: Report

    @property
    def architecture(self) -> str:
        """The platform's architecture in OCI's words."""
        return self.platform.split("/")[1]

    def listener(self, kept: list[str]) -> Callable[[str], None]:
        """A function that keeps each line, and shows it with -v."""

        def listen(line: str) -> None:
            kept.append(line)
            self.report.detail(line)

        return listen
