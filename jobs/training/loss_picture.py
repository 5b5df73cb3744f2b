"""A picture of the loss over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from training import pictures


def draw(entries: Sequence[dict[str, Any]], path: Path, title: str) -> bool:
    """Write a PNG; False where matplotlib is absent or there is nothing to draw."""
    if not entries or not pictures.available():
        return False
    curve = {
        "name": title,
        "points": [(entry["step"], entry["loss"]) for entry in entries],
        "starts": [
            (after["attempt"], before["step"])
            for before, after in pairwise(entries)
            if after["attempt"] != before["attempt"]
        ],
    }
    picture = {"title": title, "axis": "step", "panels": [{"metric": "loss", "curves": [curve]}]}
    pictures.draw(picture, path)
    return True
