"""How far a run has come is read from the end of its metrics, whatever state that file is in."""

import json
from pathlib import Path

import pytest

from runner.runs.metrics import NAMES, Metrics, Pace, pace, read_curves, read_progress


def entry(step: int, time: float, **others: object) -> str:
    known = {"step": step, "total_steps": 100, "loss": 1.5, "tokens_per_second": 1000.0, "attempt": 1, "time": time}
    return json.dumps({**known, **others}) + "\n"


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_without_metrics_there_is_no_progress(metrics: Path) -> None:
    assert read_progress(Metrics.of_file(metrics)) is None
    metrics.write_text('{"step": 3, "eval_loss": 2.0}\nnull\n[1]\n{"ste')
    assert read_progress(Metrics.of_file(metrics)) is None


def test_the_end_follows_from_the_pace_of_the_newest_steps(metrics: Path) -> None:
    metrics.write_text(entry(10, 1000.0) + entry(20, 1020.0, loss=1.25))
    found = read_progress(Metrics.of_file(metrics))
    assert found is not None
    assert (found.steps_text, found.loss, found.tokens_per_second) == ("20/100", 1.25, 1000.0)
    assert found.end == 1020 + 80 * 2.0


def test_the_wait_between_two_attempts_is_no_pace(metrics: Path) -> None:
    metrics.write_text(entry(10, 0.0) + entry(20, 10_000.0, attempt=2))
    found = read_progress(Metrics.of_file(metrics))
    assert found is not None and found.end is None
    metrics.write_text(entry(10, 0.0) + entry(20, 10_000.0, attempt=2) + entry(21, 10_001.0, attempt=2))
    found = read_progress(Metrics.of_file(metrics))
    assert found is not None and found.end == 10_001 + 79


def test_of_a_job_that_tells_no_total_the_step_is_shown_alone(metrics: Path) -> None:
    metrics.write_text('{"step": 7, "loss": 2}\n{"step": 8, "loss": 3}\n')
    found = read_progress(Metrics.of_file(metrics))
    assert found is not None and (found.steps_text, found.end) == ("8", None)


def test_of_a_long_file_only_the_end_is_read_and_cut_lines_do_no_harm(metrics: Path) -> None:
    metrics.write_text("".join(entry(step, float(step)) for step in range(1, 5000)) + entry(5000, 5000.0)[:-20])
    found = read_progress(Metrics.of_file(metrics))
    assert found is not None and found.step == 4999


def test_a_loss_that_is_no_number_is_shown_and_stays_json(metrics: Path) -> None:
    metrics.write_text(entry(1, 1.0, loss=float("nan")) + entry(2, 2.0, loss=float("nan")))
    found = read_progress(Metrics.of_file(metrics))
    assert found is not None
    record = found.record(running=True)
    assert tuple(record) == NAMES and record["loss"] == "nan"
    json.dumps(record, allow_nan=False)
    assert record["estimated_end"] and found.record(running=False)["estimated_end"] is None


@pytest.mark.parametrize("total", [float("inf"), float("nan"), 10**12, 10**300])
def test_a_number_out_of_range_is_not_shown_and_does_no_harm(metrics: Path, total: float) -> None:
    infinite = float("inf")
    steps = entry(1, 1.0) + entry(2, 1e4, total_steps=total, tokens_per_second=infinite)
    infinite_step = '{"step": Infinity, "loss": 1.0, "time": 1e4}\n'
    for text in (steps, steps + infinite_step + entry(2, infinite, total_steps=total)):
        metrics.write_text(text)
        found = read_progress(Metrics.of_file(metrics))
        assert found is not None and (found.step, found.end) == (2, None)
        assert json.loads(json.dumps(found.record(running=True), allow_nan=False))["tokens_per_second"] == 1000.0
        assert pace(Metrics.of_file(metrics), 1e4) == Pace()
        (curve,) = read_curves("a-1", Metrics.of_file(metrics), ("loss",), "hours")
        assert curve.steps == (1, 2)
