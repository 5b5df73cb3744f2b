"""Draw curves as text: braille characters with eight dots each, or letters if colours or braille are not available."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from runner.errors import RunnerError
from runner.machine import process
from runner.project import shipped_folder
from runner.runs.metrics import Curve

COLOURS = ("36", "33", "35", "32", "31", "34")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bit of each dot: row, column


@dataclass(frozen=True)
class Style:
    """What the terminal can show."""

    width: int = 80
    height: int = 16
    """the number of rows inside the axes"""
    colour: bool = False
    unicode: bool = True

    def letters(self, curves: int) -> bool:
        """Whether to draw letters: without colours, the dots of several curves look the same."""
        return not self.unicode or (curves > 1 and not self.colour)


def draw(curves: Sequence[Curve], axis: str, style: Style) -> list[str]:
    """The lines of one plot: legend, curves with axes, name of the axis. All curves show the same metric."""
    values = [value for curve in curves for _, value in curve.points]
    places = [place for curve in curves for place, _ in curve.points]
    up = make_scale(values, style.height, 0.03)
    labels = [""] * style.height
    for place, text in _labels(up, style.height // 4):
        labels[style.height - 1 - place] = text
    margin = max(len(label) for label in labels) + 1
    columns = max(style.width - margin - 1, 10)
    across = make_scale(places, columns)
    legend = [_legend(index, curve, len(curves), style) for index, curve in enumerate(curves)]
    if style.letters(len(curves)):
        rows = _by_letters(curves, across, up)
    else:
        rows = _by_dots(curves, across, make_scale(values, style.height * 4, 0.03), style)
    bar, tick = ("│", "┤") if style.unicode else ("|", "+")
    field = [
        f"{label:>{margin - 1}} {tick if label else bar}{row}".rstrip()
        for label, row in zip(labels, rows, strict=True)
    ]
    return [*legend, *field, *_bottom(curves, across, axis, margin, style)]


def _labels(scale: Scale, wanted: int, axis: str = "") -> list[tuple[int, str]]:
    """(cell, text) of about `wanted` round numbers; of steps, only whole ones."""
    chosen = [
        value for value in ticks(scale, max(wanted, 2)) if axis != "step" or value == int(value)
    ]
    step = chosen[1] - chosen[0] if len(chosen) > 1 else abs(scale.high - scale.low)
    return [(scale.place(value), written(value, step)) for value in chosen]


def _legend(index: int, curve: Curve, count: int, style: Style) -> str:
    """The legend of a curve: its name, first and last value, and its lowest or highest point."""
    first, last = curve.points[0][1], curve.points[-1][1]
    arrow = "→" if style.unicode else "->"
    name = (
        f"{LETTERS[index % len(LETTERS)]} {curve.run}"
        if style.letters(count) and count > 1
        else curve.run
    )
    text = f"{name}  {curve.metric} {short_number(first)} {arrow} {short_number(last)}, {len(curve.points)} points"
    if curve.attempts:
        text += f", last attempt {curve.attempts[-1][0]}"
    if curve.left_out:
        text += f", {curve.left_out} values not finite"
    text = text[: style.width]
    return f"\x1b[{COLOURS[index % len(COLOURS)]}m{text}\x1b[0m" if style.colour else text


def short_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _bottom(
    curves: Sequence[Curve], across: Scale, axis: str, margin: int, style: Style
) -> list[str]:
    """The lines below the curves: the axis with ticks and marks for later attempts, the numbers, the name."""
    line, tick, corner, start = ("─", "┬", "└", "▲") if style.unicode else ("-", "+", "+", "^")
    marks = [line] * across.places
    numbers = [" "] * (margin + 1 + across.places)
    for place, text in _labels(across, across.places // 10, axis):
        marks[place] = tick
        begin = min(max(margin + 1 + place - len(text) // 2, 0), len(numbers) - len(text))
        if all(letter == " " for letter in numbers[max(begin - 1, 0) : begin + len(text) + 1]):
            numbers[begin : begin + len(text)] = text
    for curve in curves:
        for _, begun in curve.attempts:
            marks[across.place(begun)] = start
    restarts = (
        f"  ({start} begin of a later attempt)" if any(curve.attempts for curve in curves) else ""
    )
    name = f"{axis}{restarts}"
    return [
        " " * margin + corner + "".join(marks),
        "".join(numbers).rstrip(),
        f"{' ' * (margin + 1)}{name}",
    ]


def _by_dots(curves: Sequence[Curve], across: Scale, up: Scale, style: Style) -> list[str]:
    dots = Scale(across.low, across.high, across.places * 2)
    cells = [[0] * across.places for _ in range(style.height)]
    owner = [[0] * across.places for _ in range(style.height)]
    for index, curve in enumerate(curves):
        for column, dot in _path(curve, dots, up):
            row = up.places - 1 - dot
            cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
            owner[row // 4][column // 2] = index
    return [_row(bits, owners, style) for bits, owners in zip(cells, owner, strict=True)]


def _row(bits: Sequence[int], owners: Sequence[int], style: Style) -> str:
    if not style.colour:
        return "".join(chr(0x2800 + bit) if bit else " " for bit in bits).rstrip()
    text, colour = "", ""
    for bit, index in zip(bits, owners, strict=True):
        wanted = COLOURS[index % len(COLOURS)] if bit else ""
        if wanted != colour:
            text += f"\x1b[{wanted}m" if wanted else "\x1b[0m"
            colour = wanted
        text += chr(0x2800 + bit) if bit else " "
    return text + ("\x1b[0m" if colour else "")


def _by_letters(curves: Sequence[Curve], across: Scale, up: Scale) -> list[str]:
    """One letter per column and curve; `*` if two curves meet."""
    cells = [[" "] * across.places for _ in range(up.places)]
    for index, curve in enumerate(curves):
        letter = LETTERS[index % len(LETTERS)] if len(curves) > 1 else "*"
        for column, height in _path(curve, across, up):
            row = up.places - 1 - height
            cells[row][column] = letter if cells[row][column] in (" ", letter) else "*"
    return ["".join(row).rstrip() for row in cells]


def _path(curve: Curve, across: Scale, up: Scale) -> Iterator[tuple[int, int]]:
    """The cells that a curve passes through, without gaps. If a column has many points, the extreme ones are used."""
    before: tuple[int, int] | None = None
    for place in _thinned([(across.place(x), up.place(y)) for x, y in curve.points]):
        yield from _between(before, place) if before is not None else (place,)
        before = place


def _thinned(places: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The first, lowest, highest and last cell of each column."""
    for _, column in groupby(places, lambda place: place[0]):
        same = list(column)
        yield from dict.fromkeys((same[0], min(same), max(same), same[-1]))


def _between(left: tuple[int, int], right: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The cells on the straight line from one cell to another, without the first."""
    steps = max(abs(right[0] - left[0]), abs(right[1] - left[1]), 1)
    for number in range(1, steps + 1):
        share = number / steps
        column, height = (
            math.floor(a + (b - a) * share + 0.5) for a, b in zip(left, right, strict=True)
        )
        yield column, height


# the script with which a job draws its loss.png
SCRIPT = Path("jobs") / "training" / "pictures.py"


def write_png(curves: Sequence[Curve], axis: str, title: str, path: Path) -> Path:
    """Draw one panel per metric, with all runs, and return the file's absolute path."""
    panels: dict[str, list[Mapping[str, object]]] = {}
    for curve in curves:
        drawn = {"name": curve.run, "points": curve.points, "starts": curve.attempts}
        panels.setdefault(curve.metric, []).append(drawn)
    listed = [{"metric": metric, "curves": drawn} for metric, drawn in panels.items()]
    return write_picture({"title": title, "axis": axis, "panels": listed}, path)


def write_picture(picture: Mapping[str, object], path: Path) -> Path:
    """Draw what jobs/training/pictures.py describes, and return the file's absolute path."""
    target = path.absolute()
    if not target.parent.is_dir():
        raise RunnerError(
            f"cannot write {path}",
            f"there is no folder {target.parent}",
            f"create {target.parent}, or pass another path",
        )
    fix = "pip install matplotlib, or load a module with it; a finished run of runner's training scripts has loss.png"
    python = process.python_with("matplotlib", (sys.executable, process.which("python3")), fix)
    script = shipped_folder() / SCRIPT
    drawn = process.run(
        (python, str(script), str(target)), text_input=json.dumps(picture), check=False
    )
    if drawn.exit_code != 0:
        raise process.failed(drawn)
    return target


@dataclass(frozen=True)
class Scale:
    """Maps a range of values to a number of cells."""

    low: float
    high: float
    places: int

    def place(self, value: float) -> int:
        """The cell of a value, from 0 to places - 1."""
        share = (value - self.low) / (self.high - self.low)
        return min(max(round(share * (self.places - 1)), 0), self.places - 1)


def make_scale(values: Sequence[float], places: int, margin: float = 0.0) -> Scale:
    """A scale that contains all values. If they are all equal, there is some space around them."""
    low, high = min(values), max(values)
    room = (high - low) * margin if low < high else abs(low) * 0.1 or 1.0
    return Scale(low - room, high + room, places)


def ticks(scale: Scale, wanted: int) -> tuple[float, ...]:
    """About `wanted` round numbers within a scale: 1, 2 or 5 times a power of ten apart."""
    rough = (scale.high - scale.low) / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(
        (factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999), 10 * power
    )
    first, last = math.ceil(scale.low / step - 1e-9), math.floor(scale.high / step + 1e-9)
    return tuple(number * step for number in range(first, last + 1))


def written(value: float, step: float) -> str:
    """Format a number for an axis, with enough digits to distinguish it from a number that is `step` away."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            size = 1e3 if letter == "k" else size
            return _plain(value / size, step / size) + letter
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return _plain(value, step)


def _plain(value: float, step: float) -> str:
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 2
    text = f"{value:.{min(digits, 6)}f}"
    return "0" if float(text) == 0 else text
