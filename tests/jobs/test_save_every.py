"""Saves by wall time: all ranks save the same step, and `auto` loses hardly more time than the best fixed interval."""

import json
import random
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.training

from transformers import TrainerControl, TrainerState  # noqa: E402

from tests.jobs.attempts import Start  # noqa: E402
from tests.jobs.conftest import SMALL, Launcher  # noqa: E402
from training import arguments, save_every  # noqa: E402
from training import run as run_folder  # noqa: E402
from training.errors import JobError  # noqa: E402
from training.heartbeat import Heartbeat  # noqa: E402
from training.job import Job  # noqa: E402
from training.processes import ALONE  # noqa: E402
from training.save_and_exit import SaveAndExit  # noqa: E402
from training.save_every import best_interval, interval_after  # noqa: E402
from training.settings import Settings  # noqa: E402

HISTORIES = 1000
RESTART_SECONDS = 120.0
DOCS = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"


def test_the_interval_is_dalys() -> None:
    assert best_interval(2, 39600) == pytest.approx(397, abs=1)
    assert best_interval(200, 100) == 100


def test_the_newest_saves_count_and_a_save_is_complete_before_the_next() -> None:
    assert interval_after([], 3600) == 300
    assert interval_after([(50, 0)] * 9 + [(2, 0), (2, 0), (40, 0), (2, 0), (2, 0)], 39600) == best_interval(2, 39600)
    assert interval_after([(2, 900)], 39600) == 900
    assert interval_after([(0.01, 0.02)], 36) == 30
    assert interval_after([(2, 9)], 6000 * 3600) == 3600
    assert interval_after([(100, 200)], 6000 * 3600) == 10_000


def fixed(interval: float, save: float, work: float, failures: Any) -> float:
    """The mean time of a run that saves after each `interval` of training; a row of `failures` for each history."""
    left, total = np.full(len(failures), work), np.zeros(len(failures))
    for column in failures.T:
        running = left > 1e-9
        if not running.any():
            break
        until_failure = column - RESTART_SECONDS
        rest = left + (np.ceil(left / interval) - 1) * save
        ends = until_failure >= rest
        kept = np.clip(np.floor(until_failure / (interval + save)), 0, None) * interval
        total += np.where(running, np.where(ends, rest + RESTART_SECONDS, column), 0)
        left = np.where(running, np.where(ends, 0, left - np.minimum(kept, left)), left)
    assert not (left > 1e-9).any()
    return float(total.mean())


def auto(save: float, expected: float, work: float, failures: Any, noise: float) -> float:
    """The same for the interval that SaveEvery chooses, with saves that are measured with this noise."""
    chance, total = random.Random(2), 0.0
    for history in failures.tolist():
        left, saves = work, []
        for until_failure in history:
            clock = RESTART_SECONDS
            interval = interval_after(saves, expected)
            while left > interval and clock + interval + save <= until_failure:
                clock += interval + save
                left -= interval
                saves = [*saves[-4:], (save * chance.gauss(1, noise), 0.0)]
                interval = interval_after(saves, expected)
            if left <= interval and clock + left <= until_failure:
                total += clock + left
                break
            total += until_failure
    return total / len(failures)


@pytest.mark.parametrize(("save", "hours"), [(2, 11), (20, 11), (60, 2), (300, 1), (20, 1500)])
def test_auto_is_within_two_percent_of_the_best_fixed_interval(save: float, hours: float) -> None:
    """Over 1,000 histories of failures. docs/checkpoints.md shows the figures."""
    mean = hours * 3600
    work = max(24 * 3600.0, mean / 5)
    failures = np.random.default_rng(1).exponential(mean, (HISTORIES, 200))
    daly = best_interval(save, mean)
    best = min(fixed(daly * 1.03**step, save, work, failures) for step in range(-45, 46))

    def more(factor: float = 1, noise: float = 0) -> float:
        return 100 * (auto(save, mean * factor, work, failures, noise) / best - 1)

    found = [more(), more(noise=0.2), more(0.5), more(2)]
    assert max(found[:2]) < 2
    row = f"| {save} s | {hours:,} h | {100 * (best / work - 1):.1f}% | " + " | ".join(f"{each:.1f}%" for each in found)
    assert row in DOCS.read_text()


def test_the_time_since_the_end_of_the_last_save_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked for that save. A save of 20 s and a failure every 11 h make an interval of 21 minutes."""
    clock = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    every = save_every.from_environment(
        {"RUNNER_SAVE_EVERY": "auto", "RUNNER_FAILURE_HOURS": "11 (measured)"}, folder(tmp_path), ALONE
    )
    every.on_train_begin()
    clock += 299
    assert not every.due()
    clock += 1
    assert every.due()
    every.on_save()
    assert not every.due()
    every.saved(20.0, 25.0)
    clock += 1244
    assert not every.due()
    clock += 2
    assert every.due()


def test_the_next_attempt_knows_how_long_a_save_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = [{"step": 5, "checkpoint_seconds": 9.5, "checkpoint_wait_seconds": 2.1}, {"step": 6, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in entries) + '{"step": 7, "ch')
    every = save_every.SaveEvery(folder(tmp_path), ALONE, None, 11.25, "(measured)")
    every.on_train_begin()
    said = (
        "saving every 411 s: the training waits 2.1 s for a save, and a failure is expected every 11.2 h (measured)\n"
    )
    assert capsys.readouterr().out == said
    every.saved(2.1, 9.5)
    assert capsys.readouterr().out == "", "the interval is the same"
    every.hours = 6000
    every.saved(2.1, 9.5)
    assert capsys.readouterr().out.endswith("every 6e+03 h (measured); at least once an hour\n")


@pytest.mark.parametrize("variables", [("5m", ""), ("-1", ""), ("nan", ""), ("inf", ""), ("auto", ""), ("auto", "0")])
def test_a_value_that_is_not_valid_is_refused(tmp_path: Path, variables: tuple[str, str]) -> None:
    names = ("RUNNER_SAVE_EVERY", "RUNNER_FAILURE_HOURS")
    with pytest.raises(JobError, match="must be a positive number"):
        save_every.from_environment(dict(zip(names, variables, strict=True)), folder(tmp_path), ALONE)


def test_two_processes_save_the_same_steps_and_keep_the_newest_two(launcher: Launcher, tmp_path: Path) -> None:
    """Each step takes longer than a millisecond. The last step is saved whenever the one before was."""
    train = (*SMALL, "--deepspeed=zero2")
    first = {"RUNNER_SAVE_EVERY": "0.001"}
    Start(tmp_path, (*train, "--max_steps=5"), 2, launcher.cache, variables=first).finish()
    assert saved(tmp_path) == [1, 2, 3, 4, 5]
    assert {path.name for path in (tmp_path / "checkpoints").glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-5"}
    auto = {"RUNNER_SAVE_EVERY": "auto", "RUNNER_FAILURE_HOURS": "0.01 (a test)"}
    second = Start(tmp_path, (*train, "--max_steps=7"), 2, launcher.cache, attempt=2, variables=auto)
    second.finish()
    said = (
        r"saving every \d+ s: the training waits [\d.]+ s for a save, and a failure is expected every 0.01 h \(a test\)"
    )
    assert re.search(said, second.output)
    assert saved(tmp_path) == [1, 2, 3, 4, 5, 7]


def test_the_search_for_a_micro_batch_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_SAVE_EVERY", "0.001")
    job = Job("sft", folder(tmp_path), ALONE, Heartbeat(folder(tmp_path), ALONE))
    assert any(isinstance(each, save_every.SaveEvery) for each in job.callbacks())
    monkeypatch.setenv(run_folder.PROBE, "{}")
    assert not any(isinstance(each, save_every.SaveEvery) for each in job.callbacks())
    assert not job.stop.save_is_due()


@pytest.mark.parametrize(
    ("given", "strategy"),
    [
        ({}, "no"),
        ({"save_steps": 50}, "steps"),
        ({"save_strategy": "epoch"}, "epoch"),
        ({"load_best_model_at_end": True}, "steps"),
    ],
)
def test_saves_that_the_arguments_request_happen_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], strategy: str
) -> None:
    monkeypatch.setenv("RUNNER_SAVE_EVERY", "600")
    values = {"save_strategy": "steps", "save_steps": 500, "save_total_limit": None, "load_best_model_at_end": False}
    settings = Settings({**values, **given}, dict.fromkeys(given, "command line"))
    job: Any = SimpleNamespace(run=folder(tmp_path), processes=ALONE)
    arguments.fit_machine(settings, job)
    assert (settings["save_strategy"], settings["save_total_limit"]) == (strategy, 2)


@pytest.mark.parametrize(("step", "evaluates"), [(4, False), (9, True)])
def test_asked_to_exit_it_saves_at_once_and_evaluates_after_the_last_step_only(
    tmp_path: Path, step: int, evaluates: bool
) -> None:
    """transformers evaluates before it saves; with `best`, it saves only what is better than before."""
    run = folder(tmp_path)
    run.save_and_exit.parent.mkdir(parents=True)
    run.save_and_exit.touch()
    stop, control = SaveAndExit(run, ALONE), TrainerControl(should_evaluate=True)
    state: Any = TrainerState(global_step=step, max_steps=9)
    args: Any = None
    stop.on_step_end(args, state, control)
    assert (control.should_save, control.should_training_stop, control.should_evaluate) == (True, True, evaluates)
    control = TrainerControl(should_evaluate=True, should_save=True)
    stop.on_epoch_end(args, state, control)
    assert (control.should_save, control.should_evaluate) == (evaluates, evaluates)


def folder(path: Path) -> run_folder.RunFolder:
    return run_folder.from_environment({"RUNNER_RUN": str(path)}, "sft")


def saved(run: Path) -> list[int]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [entry["step"] for entry in lines if "checkpoint_seconds" in entry]
