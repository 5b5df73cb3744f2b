"""Axes: round numbers within a range, and how they are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """A range of values laid over a number of places."""

    low: float
    high: float
    places: int

    def place(self, value: float) -> int:
        """The place of a value, 0 to places - 1."""
        share = (value - self.low) / (self.high - self.low)
        return min(max(round(share * (self.places - 1)), 0), self.places - 1)


def make_scale(values: Sequence[float], places: int, margin: float = 0.0) -> Scale:
    """A scale that holds all values; where they are all the same, some room around them."""
    low, high = min(values), max(values)
    if low == high:
        room = abs(low) * 0.1 or 1.0
        return Scale(low - room, high + room, places)
    room = (high - low) * margin
    return Scale(low - room, high + room, places)


def ticks(scale: Scale, wanted: int) -> tuple[float, ...]:
    """About `wanted` round numbers within a scale: 1, 2 or 5 times a power of ten apart."""
    rough = (scale.high - scale.low) / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999), 10 * power)
    first, last = math.ceil(scale.low / step - 1e-9), math.floor(scale.high / step + 1e-9)
    return tuple(number * step for number in range(first, last + 1))


def written(value: float, step: float) -> str:
    """A number as an axis shows it, with as many digits as tell it from its neighbour `step` away."""
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
