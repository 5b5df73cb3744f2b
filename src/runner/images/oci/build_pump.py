"""Run an engine's build: every line into the kept log, and to whoever listens."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from runner.machine import files, process
from runner.machine.plan import Step


def run_logged(step: Step, log: Path, line: Callable[[str], None]) -> int:
    """Run a step, append each line of its output to `log` and hand it to `line`; returns the exit code."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", buffering=1, errors="replace") as kept:

            def both(text: str) -> None:
                kept.write(text + "\n")
                line(text)

            kept.write(f"# {step.why}\n")
            if step.pipe_to:
                return _run_pipe(step, both)
            return process.follow(step.argv, both, env=step.env, cwd=step.cwd)
    except OSError as error:
        raise files.explain(error, f"write the log {log}") from error


def _run_pipe(step: Step, line: Callable[[str], None]) -> int:
    """Run `argv | pipe_to`; the messages of both are handed over; the first exit code that is not 0 counts."""
    process.need((step.argv[0], step.pipe_to[0]))
    environment = process.environment(step.env)
    writer = subprocess.Popen(
        step.argv,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert writer.stdout is not None and writer.stderr is not None
    reader = subprocess.Popen(
        step.pipe_to,
        env=environment,
        stdin=writer.stdout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    writer.stdout.close()  # so that the writer sees the reader's death
    try:
        for raw in writer.stderr:
            line(raw.decode(errors="replace").rstrip("\n"))
        assert reader.stdout is not None
        for raw in reader.stdout:
            line(raw.decode(errors="replace").rstrip("\n"))
        return writer.wait() or reader.wait()
    except BaseException:
        for child in (writer, reader):
            process.end_group(child.pid)
            child.wait()
        raise


def run_quietly(step: Step) -> process.Completed:
    """Run a small step (copy, write, tag) to its end. Raises RunnerError when it fails."""
    done = process.run(step.argv, env=step.env, cwd=step.cwd)
    if not step.pipe_to:
        return done
    return process.run(step.pipe_to, env=step.env, text_input=done.stdout)


def start_log(log: Path, first: Mapping[str, str]) -> None:
    """A new log file with a few `key: value` lines at its head."""
    files.write(log, "".join(f"# {key}: {value}\n" for key, value in first.items()))
