"""Metrics are lines that a person and a program can read, over all attempts."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.training

from training.measuring import loss_picture, metrics  # noqa: E402


def entry(step: int, loss: float, attempt: int = 1) -> dict[str, float]:
    return {"step": step, "loss": loss, "tokens": 100, "tokens_per_second": 50.0, "attempt": attempt}


def test_the_progress_line_is_plain_text() -> None:
    line = metrics.progress_line({"step": 3, "loss": 5.12345, "tokens_per_second": 1200.4}, 60, seconds_left=81)
    assert line == "step  3/60 loss 5.1235 1200 tok/s eta 1:21"
    assert metrics.progress_line({"step": 3, "loss": 5, "tokens_per_second": 1}, 60, 3723).endswith("eta 1:02:03")


def test_a_step_taken_again_counts_once_and_a_cut_line_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for line in (entry(1, 9.0), entry(2, 8.0), entry(3, 7.5), entry(3, 7.0, attempt=2)):
        metrics.append(path, line)
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [(found["step"], found["loss"]) for found in metrics.read(path)] == [(1, 9.0), (2, 8.0), (3, 7.0)]


def test_the_summary_covers_all_attempts() -> None:
    found = metrics.summarise([entry(1, 9.0), entry(2, 8.0), entry(3, 7.0, attempt=2)])
    assert found == {
        "steps": 3,
        "first_loss": 9.0,
        "last_loss": 7.0,
        "tokens": 300,
        "tokens_per_second": 50.0,
        "seconds": 6.0,
        "attempts": 2,
    }
    json.dumps(metrics.summarise([]))


def test_smoothing_keeps_the_ends_and_does_not_lag() -> None:
    line = [10.0 - step for step in range(60)]
    assert loss_picture.smooth(line) == pytest.approx(line)
    values = [9.0, 8.0, 8.5, 7.0] * 10
    smoothed = loss_picture.smooth(values)
    assert (smoothed[0], smoothed[-1]) == (9.0, 7.0)
    assert len(smoothed) == len(values)
    assert min(values) <= min(smoothed) <= max(smoothed) <= max(values)


def test_the_picture_is_a_png_of_a_useful_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    entries = [entry(step, 9 - step / 10, attempt=1 + step // 20) for step in range(1, 40)]
    assert loss_picture.draw(entries, tmp_path / "loss.png", "a run")
    content = (tmp_path / "loss.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(content[16:20], "big") >= 1000
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_there_is_no_picture_of_nothing(tmp_path: Path) -> None:
    assert not loss_picture.draw([], tmp_path / "loss.png", "a run")
    assert list(tmp_path.iterdir()) == []
