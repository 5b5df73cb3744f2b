"""Watching asks ever less often while nothing changes, and stops by itself."""

import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runner import cli
from runner.commands.open import open_browser
from runner.errors import RunnerError
from runner.machine import sessions
from runner.machine.report import Quiet
from runner.project import Project
from runner.runs import status
from runner.runs.open import _can_be_opened, minutes_left, running, started
from runner.runs.plan import EDF
from runner.runs.run import CANCELLED, SUBMITTED, Run, save
from runner.runs.shell import ShellRequest, prepared
from runner.runs.status import RunStatus


def test_the_pause_grows_to_its_limit_and_is_short_again_when_something_changes(tmp_path: Path) -> None:
    """A process that lives for as long as the test wants stands for the run."""
    child = subprocess.Popen((sys.executable, "-c", "input()"), stdin=subprocess.PIPE, start_new_session=True)
    identity = sessions.identity(child.pid)
    run = Run("a-1", tmp_path, "a", "local", "local", "2026", SUBMITTED, (f"local-{child.pid}",),
              host=platform.node(), process=identity)  # fmt: skip
    pauses: list[float] = []
    states: list[str] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 20:
            (tmp_path / "attempts/1").mkdir(parents=True)  # the attempt begins
        if len(pauses) == 22:
            child.communicate()

    status.watch(lambda: [run], lambda found: states.append(found[0].state), sleep)
    assert pauses[:2] == [2.0, 2.6] and max(pauses) == pauses[19] == status.LONGEST
    assert pauses[20] == status.SHORTEST and len(pauses) == 22
    assert states == ["RUNNING"] * 22 + ["LOST"]


def test_a_scheduler_that_does_not_answer_is_waited_for_and_a_run_elsewhere_is_not() -> None:
    run = Run("a-1", Path(os.devnull), "a", "s", "slurm", "2026")
    assert status.goes_on(RunStatus(run, "UNKNOWN")) and not status.goes_on(RunStatus(run, "LOST"))
    assert not status.goes_on(RunStatus(replace(run, scheduler="local"), "UNKNOWN"))


def test_runs_that_start_later_are_watched_too(tmp_path: Path) -> None:
    child = subprocess.Popen((sys.executable, "-c", "input()"), stdin=subprocess.PIPE, start_new_session=True)
    names = ["a-1"]
    shown: list[list[str]] = []

    def runs() -> list[Run]:
        return [Run(name, tmp_path, "a", "local", "local", "2026", SUBMITTED, (f"local-{child.pid}",),
                    host=platform.node(), process=identity) for name in names]  # fmt: skip

    def sleep(seconds: float) -> None:
        names.append("a-2")
        if len(names) == 3:
            child.communicate()

    identity = sessions.identity(child.pid)
    status.watch(runs, lambda found: shown.append([each.run.name for each in found]), sleep)
    assert shown == [["a-1"], ["a-1", "a-2"], ["a-1", "a-2", "a-2"]]


def test_a_run_that_is_about_to_end_is_not_opened(tmp_path: Path) -> None:
    """`runner open` starts a new one, also right after `runner cancel`."""
    run = Run("jupyter-0001", tmp_path, "jupyter", "x", "slurm", "2026-11-23", state=SUBMITTED)
    cancelled = replace(run, state=CANCELLED)
    assert _can_be_opened(RunStatus(run, "RUNNING")) and _can_be_opened(RunStatus(run, "PENDING"))
    for found in (RunStatus(run, "COMPLETING"), RunStatus(cancelled, "RUNNING"), RunStatus(run, "COMPLETED")):
        assert not _can_be_opened(found)


def test_the_file_that_the_browser_opens_contains_nothing_but_the_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --on, another machine has printed the URL."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    open_browser('http://127.0.0.1:1/lab?token="><script>alert(1)</script>', tmp_path / "page.html")
    assert opened == [(tmp_path / "page.html").as_uri()]
    text = (tmp_path / "page.html").read_text()
    assert text.count("<") == 1 and "&quot;&gt;&lt;script" in text


def test_a_time_without_use_is_not_negative(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["open", "jupyter", "host", "--site", "local", "--idle", "-1"]) == 2
    assert "--idle -1 is not a time" in capsys.readouterr().err


def test_a_job_of_the_user_may_have_the_name_of_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`launch --script ./code.py` makes code-0001, in which no server starts by itself."""
    monkeypatch.setattr("runner.runs.open._start_inside", lambda *given: 4711)
    monkeypatch.setattr("runner.runs.open._launched", lambda *given: None)
    child = subprocess.Popen((sys.executable, "-c", "input()"), stdin=subprocess.PIPE, start_new_session=True)
    values = {"host": platform.node(), "process": sessions.identity(child.pid), "environment": "mine"}
    words = {"code-0001": ("launch", "--script", "./code.py"), "code-0002": ("open", "code"), "code-0003": ("launch",)}
    for name, line in words.items():
        (tmp_path / name).mkdir()
        save(Run(name, tmp_path / name, "code", "local", "local", "2026-11-23T10:00:00+00:00", SUBMITTED,
                 (f"local-{child.pid}",), command_line=line, **values))  # fmt: skip
    (tmp_path / "mine.toml").write_text("")
    project, environ = Project(None, tmp_path, tmp_path), {"RUNNER_RUNS": str(tmp_path), "HOME": str(tmp_path)}

    def opened(where: str) -> tuple[str, int]:
        run, pid = started("code", ShellRequest(where, site="local"), project, environ, Quiet())
        return run.name, pid

    assert opened("code-0001") == ("code-0001", 4711)
    assert opened("code-0002") == ("code-0002", 0)
    assert opened("./mine.toml") == ("code-0002", 0), "an environment"
    with pytest.raises(RunnerError, match="cannot connect to code-0001") as caught:
        running("code-0001", "local", project, environ)
    assert caught.value.why == "no sshd of `runner open` runs in code-0001"
    assert caught.value.fix == "runner open ssh code-0001"
    (tmp_path / "code-0001/open/ssh").mkdir(parents=True)
    (tmp_path / "code-0001/open/ssh/server").write_text("local here /dev/shm/x\n")
    assert running("code-0001", "local", project, environ).name == "code-0001"
    child.communicate()


def test_while_the_scheduler_does_not_answer_no_tunnel_is_closed_and_no_job_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("sft-0001", tmp_path, "sft", "local", "slurm", "2026-11-23", SUBMITTED, ("17",))
    save(run)
    (tmp_path / "squeue").write_text("#!/bin/sh\necho timed out >&2\nexit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert minutes_left(run) is None
    with pytest.raises(RunnerError, match="cannot connect to sft-0001") as caught:
        started("jupyter", ShellRequest(str(tmp_path), site="local"), Project(None, tmp_path, tmp_path), {}, Quiet())
    assert caught.value.why == "it is not known whether sft-0001 still runs: squeue: timed out"
    (tmp_path / EDF).write_text("")
    request, project = ShellRequest(str(tmp_path), site="local"), Project(None, tmp_path, tmp_path)
    with (
        pytest.raises(RunnerError, match="cannot open a shell in sft-0001") as caught,
        prepared(request, project, {}, Quiet()),
    ):
        pass
    assert caught.value.why == "runner cannot tell whether the run is still running: squeue: timed out"
    (tmp_path / "squeue").write_text("#!/bin/sh\n")
    assert minutes_left(run) == -1
