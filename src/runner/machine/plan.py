"""Steps as data, which can be run, or printed as a bash script that does the same."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """A program to run, or a file to write. `why` is shown to the user; `env` is added to the environment."""

    why: str
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    pipe_to: tuple[str, ...] = ()
    """a program that reads the stdout of this one; empty: none"""
    write: Path | None = None
    """a file to write instead of running a program; for secrets, because every user can read a program's arguments"""
    text: str = ""
    """the content of the file; ends with a newline"""
    mode: int = 0o600
    logged: bool = False
    """the output goes to the log, and is shown as progress"""


def bash(steps: Iterable[Step]) -> str:
    """The steps as a bash script that does the same by hand; the first that fails ends it."""
    lines = ["#!/usr/bin/env bash", "set -euo pipefail"]
    for step in steps:
        lines += ["", *(f"# {line}" for line in step.why.splitlines()), _line(step)]
    return "\n".join(lines) + "\n"


def _line(step: Step) -> str:
    if step.write:
        return _heredoc(step)
    assignments = [f"{name}={shlex.quote(value)}" for name, value in step.env.items()]
    command = " ".join([*assignments, shlex.join(step.argv)])
    if step.pipe_to:
        command += " | " + shlex.join(step.pipe_to)
    return f"( cd {shlex.quote(str(step.cwd))} && {command} )" if step.cwd else command


def _heredoc(step: Step) -> str:
    """Shell text that writes the step's file. Until its mode is set, only the user can read it."""
    path, end, lines = shlex.quote(str(step.write)), "EOF", step.text.splitlines()
    while end in lines:
        end += "_"
    mode = f"\nchmod {step.mode:o} {path}" if step.mode != 0o600 else ""
    return f"( umask 077 && cat > {path} ) << '{end}'\n{step.text}{end}{mode}"
