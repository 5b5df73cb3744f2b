"""The curves of runs, as lines of text, as points and as a PNG: what is drawn is what the metrics say."""

from __future__ import annotations

import json
import math
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.runs.metrics import Curve, Metrics, read_curves
from runner.runs.plot import Style, draw, make_scale, ticks, written


def entry(step: int, loss: float, attempt: int = 1, **others: object) -> str:
    known = {"step": step, "loss": loss, "total_tokens": 100 * step, "attempt": attempt, "time": 3600.0 * step}
    return json.dumps({**known, **others}) + "\n"


def metrics(folder: Path, *lines: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "metrics.jsonl"
    path.write_text("".join(lines))
    return path


def source(folder: Path, *lines: str) -> Metrics:
    return Metrics.of_file(metrics(folder, *lines))


def plot(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RUNNER_SITE": "local", **variables}
    command = (sys.executable, "-m", "runner", "plot", *words)
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_curve_follows_the_attempt_that_counts(tmp_path: Path) -> None:
    """Steps from the one on that a later attempt began at are void, even where it has not come as far yet."""
    lines = (entry(1, 9.0), entry(2, 8.0), entry(3, 7.0), entry(4, 6.0), entry(2, 8.5, 2), entry(3, 7.5, 2))
    (curve,) = read_curves("a", source(tmp_path, '{"header": {}}\n', *lines, '{"step": 9, "lo'), ["loss"])
    assert curve.points == ((1, 9.0), (2, 8.5), (3, 7.5))
    assert curve.attempts == ((2, 2),)


def test_each_metric_has_its_own_points(tmp_path: Path) -> None:
    path = source(tmp_path, entry(1, 9.0), '{"step": 1, "eval_loss": 8.5}\n', entry(2, math.nan), entry(3, 7.0))
    loss, held_out = read_curves("a", path, ["loss", "eval_loss"])
    assert (loss.points, loss.left_out) == (((1, 9.0), (3, 7.0)), 1)
    assert held_out.points == ((1, 8.5),)


def test_the_axis_may_be_tokens_or_hours(tmp_path: Path) -> None:
    path = source(tmp_path, entry(1, 9.0), entry(3, 7.0))
    assert read_curves("a", path, ["loss"], "tokens")[0].points == ((100, 9.0), (300, 7.0))
    assert read_curves("a", path, ["loss"], "hours")[0].points == ((0, 9.0), (2, 7.0))


def test_an_unknown_metric_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(RunnerError) as caught:
        read_curves("a", source(tmp_path, entry(1, 9.0, grad_norm=1.0)), ["grad_nrm"])
    assert "did you mean 'grad_norm'" in caught.value.fix
    with pytest.raises(RunnerError, match="has no metrics"):
        read_curves("a", Metrics.of_file(tmp_path / "none"), ["loss"])


STRAIGHT = Curve("sft-0001", "loss", tuple((float(step), 10 - step / 2) for step in range(13)))
HYPERBOLA = Curve("sft-0002", "loss", tuple((float(step), 4 + 6 / (1 + step)) for step in range(13)))


def test_the_picture_is_this_one() -> None:
    lines = draw([STRAIGHT], "step", Style(width=44, height=8))
    assert "\n".join(lines) == GOLDEN


def test_without_colour_runs_are_told_apart_by_letters() -> None:
    lines = draw([STRAIGHT, HYPERBOLA], "step", Style(width=44, height=8))
    assert "\n".join(lines) == GOLDEN_LETTERS
    plain = draw([STRAIGHT, HYPERBOLA], "step", Style(width=44, height=8, unicode=False))
    assert all(line.isascii() for line in plain)


@pytest.mark.parametrize("width", [30, 44, 80, 200])
@pytest.mark.parametrize("colour", [False, True])
def test_no_line_is_wider_than_the_terminal(width: int, colour: bool) -> None:
    import re

    tall = Curve("r", "tokens_per_second", tuple((step * 1000.0, 1e6 * math.sin(step / 9)) for step in range(3000)))
    for curves in ([tall], [STRAIGHT, HYPERBOLA], [Curve("one", "loss", ((5.0, 2.0),))]):
        for line in draw(curves, "step", Style(width=width, height=12, colour=colour)):
            assert len(re.sub(r"\x1b\[\d+m", "", line)) <= width


def test_every_point_is_drawn_at_its_place() -> None:
    """Dots of a falling line fall: the topmost dot of a column never lies above that of the column before."""
    field = [line[4:] for line in draw([STRAIGHT], "step", Style(width=44, height=8))[1:9]]
    heights = []
    for column in range(max(map(len, field))):
        for row, line in enumerate(field):
            if column < len(line) and line[column] not in " ┤│":
                heights.append(row)
                break
    assert heights == sorted(heights) and heights[0] == 0 and heights[-1] == 7


@pytest.mark.parametrize(
    ("value", "step", "text"),
    [(0.0, 1, "0"), (5.5, 0.5, "5.5"), (12_000, 2_000, "12k"), (1_500_000, 500_000, "1.5M"), (2e-5, 1e-5, "2.0e-05")],
)
def test_numbers_on_an_axis_are_short_and_differ(value: float, step: float, text: str) -> None:
    assert written(value, step) == text


def test_ticks_are_round_and_lie_within() -> None:
    scale = make_scale([3.1, 9.4], 20)
    assert ticks(scale, 4) == (4, 6, 8)
    flat = make_scale([2.0, 2.0], 20)
    assert flat.low < 2 < flat.high


def test_stdout_is_the_picture_the_points_or_the_path(tmp_path: Path) -> None:
    metrics(tmp_path / "a", *(entry(step, 9 - step / 4, 1 + step // 20) for step in range(1, 30)))
    metrics(tmp_path / "b", *(entry(step, 8 - step / 5) for step in range(1, 30)))
    shown = plot(f"{tmp_path}/a", f"{tmp_path}/b", COLUMNS="60")
    assert shown.returncode == 0 and "\x1b" not in shown.stdout
    assert "a a  loss 8.75 → 1.75, 29 points, last attempt 2" in shown.stdout and "▲" in shown.stdout
    points = json.loads(plot(f"{tmp_path}/a", "--json", "--axis", "tokens").stdout)
    assert points[0]["points"][0] == [100, 8.75] and points[0]["attempts"] == [{"attempt": 2, "tokens": 2000}]
    missing = plot(f"{tmp_path}/a", "--metric", "los")
    assert missing.returncode == 1 and not missing.stdout and "did you mean 'loss'" in missing.stderr


def test_where_the_output_is_not_utf_8_the_picture_is_ascii(tmp_path: Path) -> None:
    metrics(tmp_path / "a", *(entry(step, 9 - step / 4) for step in range(1, 30)))
    shown = plot(f"{tmp_path}/a", PYTHONIOENCODING="ascii")
    assert shown.returncode == 0 and shown.stdout.isascii() and "*" in shown.stdout


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_gets_colours_unless_it_wants_none(tmp_path: Path, no_color: str) -> None:
    path = metrics(tmp_path / "a", *(entry(step, 9 - step / 4) for step in range(1, 30))).parent
    leader, follower = pty.openpty()
    environment = {**os.environ, "RUNNER_SITE": "local", "NO_COLOR": no_color, "COLUMNS": "60"}
    command = (sys.executable, "-m", "runner", "plot", str(path))
    assert subprocess.run(command, stdout=follower, env=environment).returncode == 0
    os.close(follower)
    output = b""
    while True:
        try:
            data = os.read(leader, 65536)
        except OSError:
            break
        output += data
        if not data:
            break
    os.close(leader)
    assert (b"\x1b[" in output) == (not no_color)


def test_a_png_has_a_panel_for_each_metric(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = metrics(tmp_path / "a", *(entry(step, 9 - step / 4, mfu=0.4) for step in range(1, 30))).parent
    sizes = []
    for words in (("loss",), ("loss,mfu",)):
        target = tmp_path / f"{len(words[0])}.png"
        drawn = plot(str(path), str(path), "--metric", *words, "--png", str(target))
        assert drawn.returncode == 0 and drawn.stdout == f"{target}\n", drawn.stderr
        content = target.read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        sizes.append((int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")))
    assert sizes[0][0] == sizes[1][0] >= 1000 and sizes[1][1] > 1.5 * sizes[0][1]


def test_without_matplotlib_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    """Our own Python is asked, which finds one that cannot be imported, then `python3` on PATH: it has nothing."""
    path = metrics(tmp_path / "a", entry(1, 9.0), entry(2, 8.0)).parent
    (tmp_path / "matplotlib.py").write_text("raise ImportError('no matplotlib')\n")
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    hidden = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    drawn = plot(str(path), "--png", str(tmp_path / "x.png"), PATH=str(tmp_path), PYTHONPATH=hidden)
    assert drawn.returncode == 1 and "pip install matplotlib" in drawn.stderr and not (tmp_path / "x.png").exists()


GOLDEN = """\
sft-0001  loss 10 → 4, 13 points
10 ┤⠒⠤⠤⣀⡀
   │    ⠈⠑⠢⢄⣀⡀
   │         ⠈⠉⠒⠤⣀
   │              ⠉⠉⠒⠢⠤⢄⣀
   │                     ⠉⠒⠤⣀⣀
   │                          ⠉⠑⠢⢄⡀
 5 ┤                              ⠈⠉⠑⠒⠤⣀
   │                                    ⠉⠒⠒⠤
   └┬───────────────┬───────────────┬───────
    0               5              10
    step"""

GOLDEN_LETTERS = """\
a sft-0001  loss 10 → 4, 13 points
b sft-0002  loss 10 → 4.462, 13 points
10 ┤*a
   │ baaaaaaa
   │  b      aaaaaa
   │   b           aaaaaaa
   │    bb                aaa
   │      bbbbbbbbb          aaaaaa
 5 ┤               bbbbbbbbbbbbbbbb*******bb
   │                                      aa
   └┬───────────────┬───────────────┬───────
    0               5              10
    step"""
