"""Programs are started as they are found, and what they print never holds them up."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.machine import process, sessions
from tests.waiting import until


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


def test_an_exception_ends_the_program() -> None:
    programs: list[int] = []

    def interrupt(line: str) -> None:
        programs.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process.follow(("sh", "-c", "echo $$ >&2; exec sleep 600"), interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(programs[0], 0)


def test_an_error_of_an_output_ends_the_program_and_is_raised() -> None:
    """The output is passed on by a thread, whose own error would be a traceback."""

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            if data:
                raise RunnerError("what", "why", "fix")
            return 0

    argv = ("sh", "-c", "echo mark ready $$; echo one; exec sleep 600")
    interrupted: list[int] = []
    child = process.Marked(argv, b"mark", (Full(), io.BytesIO()), terminal=False, reads=False)
    with pytest.raises(RunnerError, match="what"):
        child.wait(interrupted.append)
    assert [str(pid) for pid in interrupted] == [child.head.split()[-1]]


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


def test_the_command_to_run_by_hand_is_quoted_and_not_endless() -> None:
    fix = process.failed(process.Completed(("a", "b c"), 1, "", "")).fix
    assert fix == "run the command by hand: a 'b c'"
    fix = process.failed(process.Completed(("sh", "-c", "x" * 5000), 1, "", "")).fix
    assert len(fix) < 400 and fix.endswith(" …")


def test_a_program_that_takes_too_long_is_named_also_behind_env() -> None:
    with pytest.raises(process.TimedOut) as caught:
        process.run(("env", "--unset=SBATCH_TIME", "sleep", "60"), timeout_seconds=0.1)
    assert caught.value.what == "sleep did not answer"
