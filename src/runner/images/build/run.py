"""Run an engine's build. Each line of output goes to the log and to a listener."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from runner.machine import files, process
from runner.machine.plan import Step


def run_logged(step: Step, log: Path, line: Callable[[str], None]) -> int:
    """Run a step, pass each line of its output to `log` and to `line`, and return the exit code."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", buffering=1, errors="replace") as kept:

            def both(text: str) -> None:
                kept.write(text + "\n")
                line(text)

            kept.write(f"# {step.why}\n")
            return process.follow(step.argv, both, pipe_to=step.pipe_to, env=step.env, cwd=step.cwd)
    except OSError as error:
        raise files.explain(error, f"write the log {log}") from error


def run_quietly(step: Step) -> None:
    """Run a small step (copy, write, tag). Raises RunnerError if it fails."""
    if not step.write:
        process.run(step.argv, env=step.env, cwd=step.cwd)
        return
    try:
        descriptor = os.open(step.write, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(step.text.encode(errors="surrogateescape"))
            os.fchmod(descriptor, step.mode)
    except OSError as error:
        raise files.explain(error, f"write {step.write}") from error
