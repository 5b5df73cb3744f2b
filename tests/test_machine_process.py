"""Programs are started as they are found, and what they print never holds them up."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.machine import process, sessions
from tests.waiting import until

LOUD = "head -c 300000 /dev/zero | tr '\\0' 'x' | fold -w 99"


def test_a_program_of_sbin_is_started_where_path_lacks_sbin(monkeypatch: pytest.MonkeyPatch) -> None:
    """`which` finds it there, so must the start, by every way."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    if shutil.which("ldconfig") or not process.which("ldconfig"):
        pytest.skip("ldconfig is not in /usr/sbin alone")
    assert "ldconfig" in process.run(("ldconfig", "--version")).stdout
    assert process.follow(("ldconfig", "--version"), lambda line: None) == 0
    assert process.Started(("ldconfig", "--version")).finish().exit_code == 0
    assert process.attached(("ldconfig", "--version")) == 0


def test_the_path_of_the_programs_own_environment_counts(tmp_path: Path) -> None:
    (tmp_path / "hello").write_text("#!/bin/sh\necho hello\n")
    (tmp_path / "hello").chmod(0o755)
    assert process.run(("hello",), env={"PATH": f"{tmp_path}:/usr/bin:/bin"}).stdout == "hello\n"
    with pytest.raises(RunnerError, match="missing on this machine: hello"):
        process.run(("hello",))


@pytest.mark.parametrize("words", ["", "cat >/dev/null; "])
def test_both_ends_of_a_pipe_may_print_a_lot(words: str) -> None:
    """More than a pipe holds, the reader before the writer has ended."""
    lines: list[str] = []
    reader = ("sh", "-c", f"{LOUD} >&2; {words}{LOUD}; cat >/dev/null")
    writer = ("sh", "-c", f"{LOUD} >&2; {LOUD}; sleep 0.2; {LOUD} >&2")
    assert process.follow(writer, lines.append, pipe_to=reader) == 0
    assert sum(map(len, lines)) == 4 * 300_000


@pytest.mark.parametrize(("first", "second", "code"), [("exit 3", "exit 0", 3), ("exit 0", "exit 4", 4)])
def test_the_first_failure_of_a_pipe_counts(first: str, second: str, code: int) -> None:
    assert process.follow(("sh", "-c", first), lambda line: None, pipe_to=("sh", "-c", second)) == code


def test_a_program_ends_whose_reader_has_gone() -> None:
    assert process.follow(("yes",), lambda line: None, pipe_to=("true",)) != 0


def test_a_pipe_whose_second_program_is_missing_starts_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **named: pytest.fail(f"{words} was started"))
    with pytest.raises(RunnerError, match="missing on this machine: no-such-program"):
        process.follow(("true",), lambda line: None, pipe_to=("no-such-program",))


def test_an_exception_ends_both_programs_of_a_pipe() -> None:
    """Each alone: the reader reads nothing, and would outlive the writer."""
    programs: list[int] = []

    def interrupt(line: str) -> None:
        programs.append(int(line))
        if len(programs) == 2:
            raise KeyboardInterrupt

    words = ("sh", "-c", "echo $$ >&2; exec sleep 600")
    with pytest.raises(KeyboardInterrupt):
        process.follow(words, interrupt, pipe_to=words)
    for pid in programs:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_exception_ends_a_grandchild_in_a_session_of_its_own_and_no_other_process() -> None:
    """As podman's build does: the step is in another session, so that no signal to podman's group reaches it."""
    other = subprocess.Popen(("sleep", "600"), start_new_session=True)
    step: list[int] = []

    def interrupt(line: str) -> None:
        step.append(int(line))
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            process.follow(("sh", "-c", "setsid sh -c 'echo $$; exec sleep 600'; true"), interrupt)
        until(lambda: not sessions.identity(step[0]), "the end of the step")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
