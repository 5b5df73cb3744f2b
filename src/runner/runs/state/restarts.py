"""What the attempts of a run tell: why each has ended, the GPU hours they took, why no other one follows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runner.runs.run import STOPPED, Run, job_of

_SIGNS_OF_LIFE = ("ended", "cause", "alive", "first_failure")  # payload/restart.sh counts the same


@dataclass(frozen=True)
class Attempts:
    """The attempts of a run, as their folders tell them."""

    causes: tuple[str, ...] = ()
    """of each attempt, oldest first; empty text where it has not ended, or was killed"""
    gpu_hours: float | None = None
    """of all attempts so far; None where the run has no GPUs"""
    stopped: str = ""
    """why no attempt follows; empty where one may, or where nothing is started anew anyway"""
    job_id: str = ""
    """of the newest attempt"""


def read(run: Run, now: float) -> Attempts:
    """What the run folder tells at `now`, Unix seconds; the newest attempt runs until then when it has left no end."""
    folders = run.attempts
    seconds = 0.0
    gpus_seen = False
    for folder in folders:
        started = _time(folder / "started")
        gpus = int(_line(folder / "started", "gpus") or 0)
        if started is None or not gpus:
            continue
        gpus_seen = True
        ended = _time(folder / "ended")
        last = max((time for name in _SIGNS_OF_LIFE if (time := _time(folder / name))), default=started)
        seconds += gpus * max(0.0, (now if folder == folders[-1] and ended is None else last) - started)
    return Attempts(
        tuple(_text(folder / "cause") for folder in folders),
        round(seconds / 3600, 3) if gpus_seen else None,
        _text(run.folder / STOPPED),
        job_of(folders[-1]) if folders else "",
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _line(path: Path, key: str) -> str:
    """The rest of the line of a file that begins with a key."""
    lines = (line.partition(" ") for line in _text(path).splitlines())
    return next((value for name, _, value in lines if name == key), "")


def _time(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
