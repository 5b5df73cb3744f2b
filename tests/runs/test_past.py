"""History tells what run folders hold, and of runs that are not over what `status` says."""

import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.runs import status
from runner.runs.history import Filters, Launch, find, look, parse_since
from runner.runs.lock import lock_text
from runner.runs.run import CANCELLED, PREPARING, SUBMITTED, Run, list_runs, load, save

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


def make(runs: Path, name: str, *, lock: dict[str, object] | None = None, codes: tuple[int | None, ...] = (),
         created: str = "2026-11-20T10:00:00+00:00", state: str = SUBMITTED, site: str = "alps-clariden",
         environment: str = "ngc-ds") -> Run:  # fmt: skip
    """A run folder as a launch leaves it, with attempts of the given exit codes."""
    folder = runs / name
    folder.mkdir(parents=True)
    run = Run(name, folder, name.rpartition("-")[0], site, "slurm", created, state,
              ("17",) if state != PREPARING else (), environment)  # fmt: skip
    save(run)
    table: dict[str, object] = {"name": run.job, **(lock or {"script": "jobs/sft.py"})}
    (folder / "lock.toml").write_text(lock_text({"run": {"script": "no"}, "job": table, "z": {"a": 1}}))  # type: ignore[dict-item]
    for number, code in enumerate(codes, 1):
        (folder / f"attempts/{number}").mkdir(parents=True)
        if code is not None:
            (folder / f"attempts/{number}/exit_code").write_text(f"{code}\n")
    return run


@pytest.mark.parametrize(
    ("codes", "record", "expected"),
    [
        ((), PREPARING, ("PREPARING", None)),
        ((), SUBMITTED, ("PENDING", None)),
        ((None,), SUBMITTED, ("RUNNING", None)),
        ((75, None), SUBMITTED, ("RUNNING", None)),
        ((75, 0), SUBMITTED, ("COMPLETED", 0)),
        ((0, 0, 0, 0, 0, 0, 0, 0, 0, 9), SUBMITTED, ("FAILED", 9)),
        ((0,), CANCELLED, ("CANCELLED", 0)),
    ],
)
def test_the_state_is_what_the_newest_attempt_left(
    tmp_path: Path, codes: tuple[int | None, ...], record: str, expected: tuple[str, int | None]
) -> None:
    launch = look(make(tmp_path, "sft-0001", codes=codes, state=record))
    assert (launch.state, launch.exit_code) == expected and launch.attempts == len(codes)


@pytest.mark.parametrize(
    "words",
    [("true",), ("python", "-c", 'print("a\\n[job]")', "\x7f", "é"), tuple(f"word-number-{n}" for n in range(40))],
)
def test_a_command_is_read_from_the_lock_as_it_was_written(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert look(make(tmp_path, "a-1", lock={"command": words})).command == words


def test_a_script_is_read_from_its_own_table_and_a_damaged_lock_costs_only_the_script(tmp_path: Path) -> None:
    run = make(tmp_path, "a-1", lock={"script": 'jobs/"it".py', "arguments": ["--x"]})
    assert look(run).program == 'jobs/"it".py'
    for damaged in (b"\xff", b"1", b"null"):
        (run.folder / "lock.toml").write_bytes(b"[job]\nscript = " + damaged + b"\n")
        assert (look(run).program, look(run).state) == ("", "PENDING")


def test_of_a_run_that_is_not_over_it_says_what_status_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed one would be RUNNING for ever, and one that waits for its next attempt FAILED."""
    make(tmp_path, "killed-0001", codes=(None,))
    make(tmp_path, "waits-0001", codes=(75,))
    make(tmp_path, "over-0001", codes=(3,))
    for name in ("waits-0001", "over-0001"):
        os.utime(tmp_path / name / "attempts/1/exit_code", (1e9, 1e9))
    save(replace(load(tmp_path / "waits-0001"), restarts=True))
    asked: list[str] = []

    def ask(runs: list[Run]) -> tuple[status.RunStatus, ...]:
        asked.extend(run.name for run in runs)
        return tuple(status.RunStatus(run, {"killed": "LOST", "waits": "PENDING"}[run.job]) for run in runs)

    monkeypatch.setattr(status, "ask", ask)
    found = {launch.run.job: launch.state for launch in find(list_runs(tmp_path), Filters())}
    assert found == {"killed": "LOST", "waits": "PENDING", "over": "FAILED"}
    assert sorted(asked) == ["killed-0001", "waits-0001"]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, ...]:
    monkeypatch.setattr(status, "ask", lambda runs: ())
    make(tmp_path, "sft-0001", created="2026-11-01T10:00:00+00:00", codes=(0,))
    make(tmp_path, "sft-0002", created="2026-11-20T10:00:00+00:00", codes=(1,), environment="ngc-ds-alps")
    make(tmp_path, "gen-0001", created="2026-11-21T10:00:00+00:00", lock={"command": ("/usr/bin/env", "x")}, site="b")
    (tmp_path / ".numbers").mkdir()
    (tmp_path / "stray").write_text("")
    return list_runs(tmp_path)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (Filters(), ["sft-0001", "sft-0002", "gen-0001"]),
        (Filters(env="ngc-ds"), ["sft-0001", "gen-0001"]),
        (Filters(env="ngc-*"), ["sft-0001", "sft-0002", "gen-0001"]),
        (Filters(script="sft"), ["sft-0001", "sft-0002"]),
        (Filters(script="jobs/*.py"), ["sft-0001", "sft-0002"]),
        (Filters(script="env"), ["gen-0001"]),
        (Filters(script="sf"), []),
        (Filters(job="s?t"), ["sft-0001", "sft-0002"]),
        (Filters(site="b"), ["gen-0001"]),
        (Filters(states=("FAILED", "PENDING")), ["sft-0002", "gen-0001"]),
        (Filters(since=parse_since("2d", NOW)), ["sft-0002", "gen-0001"]),
        (Filters(since=parse_since("2026-11-21T09:00+00:00", NOW)), ["gen-0001"]),
    ],
)
def test_each_filter_lets_only_its_own_pass(runs: tuple[Run, ...], filters: Filters, expected: list[str]) -> None:
    found: list[Launch] = list(find(runs, filters))
    assert [launch.run.name for launch in found] == expected


def test_a_since_that_is_no_time_is_a_usage_error() -> None:
    for text in ("soon", "7y", "999999w"):
        with pytest.raises(RunnerError) as caught:
            parse_since(text, NOW)
        assert caught.value.exit_code == 2
