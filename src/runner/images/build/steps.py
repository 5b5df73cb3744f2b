"""The steps of a build as data, which are run here, or printed as a bash script that does the same."""

import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runner.machine import files, process


@dataclass(frozen=True)
class Step:
    """A program to run, or a file to write. `why` is shown to the user; `env` is added to the environment."""

    why: str
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
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
    return f"( cd {shlex.quote(str(step.cwd))} && {command} )" if step.cwd else command


def _heredoc(step: Step) -> str:
    """Shell text that writes the step's file. Until its mode is set, only the user can read it."""
    path, end, lines = shlex.quote(str(step.write)), "EOF", step.text.splitlines()
    while end in lines:
        end += "_"
    mode = f"\nchmod {step.mode:o} {path}" if step.mode != 0o600 else ""
    return f"( umask 077 && cat > {path} ) << '{end}'\n{step.text}{end}{mode}"


def run_logged(step: Step, log: Path, line: Callable[[str], None]) -> int:
    """Run a step, pass each line of its output to `log` and to `line`, and return the exit code."""
    with files.explained(f"write the log {log}"):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", buffering=1, errors="replace") as kept:

            def both(text: str) -> None:
                kept.write(text + "\n")
                line(text)

            kept.write(f"# {step.why}\n")
            return process.follow(step.argv, both, env=step.env, cwd=step.cwd)


def run_quietly(step: Step) -> None:
    """Run a small step (copy, write, tag). Raises RunnerError if it fails."""
    if not step.write:
        process.run(step.argv, env=step.env, cwd=step.cwd)
        return
    with files.explained(f"write {step.write}"):
        descriptor = os.open(
            step.write, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600
        )
        with os.fdopen(descriptor, "wb") as file:
            file.write(step.text.encode(errors="surrogateescape"))
            os.fchmod(descriptor, step.mode)
