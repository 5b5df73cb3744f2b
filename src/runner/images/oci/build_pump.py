"""Run an engine's build: every line into the kept log, and to whoever listens."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

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
    # one pipe for the messages of both: neither ever waits for us to read the other's
    messages, say = os.pipe()
    children: list[subprocess.Popen[bytes]] = []
    try:
        with os.fdopen(messages, "rb") as lines:
            try:
                children.append(_start(step.argv, environment, subprocess.DEVNULL, subprocess.PIPE, say))
                writer = children[0].stdout
                assert writer is not None
                children.append(_start(step.pipe_to, environment, writer, say, say))
                writer.close()  # so that the writer sees the reader's death
            finally:
                os.close(say)
            for raw in lines:
                line(raw.decode(errors="replace").rstrip("\n"))
        codes = [child.wait() for child in children]
        return codes[0] or codes[1]
    except BaseException:
        for child in children:
            process.end_group(child.pid)
            child.wait()
        raise


def _start(
    argv: Sequence[str], environment: Mapping[str, str], stdin: int | IO[bytes], stdout: int, stderr: int
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv, env=environment, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
    )  # fmt: skip


def run_quietly(step: Step) -> None:
    """Run a small step (copy, write, tag) to its end. Raises RunnerError when it fails."""
    if step.write:
        _write(step.write, step.text, step.mode)
    else:
        process.run(step.argv, env=step.env, cwd=step.cwd)


def _write(path: Path, text: str, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode(errors="surrogateescape"))
            os.fchmod(descriptor, mode)
    except OSError as error:
        raise files.explain(error, f"write {path}") from error


def start_log(log: Path, first: Mapping[str, str]) -> None:
    """A new log file with a few `key: value` lines at its head."""
    files.write(log, "".join(f"# {key}: {value}\n" for key, value in first.items()))
