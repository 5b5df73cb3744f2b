"""Curves as a PNG, drawn by matplotlib in a Python that has it: the tool itself does not depend on it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from runner.errors import RunnerError
from runner.machine import process
from runner.project import shipped_folder
from runner.runs.plotting.curves import Curve

# the same script that a job draws its loss.png with
SCRIPT = Path("jobs") / "training" / "pictures.py"


def find_python() -> str:
    """A Python that has matplotlib: our own, else the python3 on PATH. Raises RunnerError where neither has it."""
    candidates = [sys.executable, process.which("python3")]
    for python in dict.fromkeys(candidate for candidate in candidates if candidate):
        asked = process.run((python, "-c", "import matplotlib"), check=False, timeout_seconds=60)
        if asked.exit_code == 0:
            return python
    raise RunnerError(
        "no Python here has matplotlib",
        f"asked: {', '.join(dict.fromkeys(candidate for candidate in candidates if candidate))}",
        "pip install 'runner-hpc[plot]', or load a module whose python3 has it; a run's own loss.png is in its folder",
    )


def write_png(curves: Sequence[Curve], axis: str, title: str, path: Path) -> Path:
    """Draw a panel for each metric, all runs in it, and return the file's absolute path."""
    panels = [
        {
            "metric": metric,
            "curves": [
                {"name": curve.run, "points": curve.points, "starts": curve.attempts}
                for curve in curves
                if curve.metric == metric
            ],
        }
        for metric in dict.fromkeys(curve.metric for curve in curves)
    ]
    target = path.absolute()
    if not target.parent.is_dir():
        raise RunnerError(f"cannot write {path}", f"there is no folder {target.parent}", "make it, or name another")
    picture = {"title": title, "axis": axis, "panels": panels}
    drawn = process.run(
        (find_python(), str(shipped_folder() / SCRIPT), str(target)), text_input=json.dumps(picture), check=False
    )
    if drawn.exit_code != 0:
        raise process.failed(drawn)
    return target
