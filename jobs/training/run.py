"""Where a job finds its run: from the environment that the batch script sets, or beside the user when run by hand."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFolder:
    """The folder of one launch, as seen inside the container."""

    path: Path
    attempt: Path  # attempts/N of this start
    save_and_exit: Path  # the flag: when it exists, save and leave
    cache: Path  # what runs share; the batch script sets RUNNER_CACHE
    by_hand: bool  # no batch script: nothing was there before, and nothing resumes by itself

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def picture(self) -> Path:
        return self.path / "loss.png"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def attempt_number(self) -> int:
        """N of attempts/N; 1 where the folder bears no number."""
        return int(self.attempt.name) if self.attempt.name.isdigit() else 1


def from_environment(environment: Mapping[str, str], script: str) -> RunFolder:
    """Return the run folder of RUNNER_RUN, RUNNER_ATTEMPT, RUNNER_SAVE_AND_EXIT and RUNNER_CACHE.

    Run by hand, it is `runs/by-hand-SCRIPT` below the working directory.
    """
    named = environment.get("RUNNER_RUN")
    path = Path(named or Path("runs") / f"by-hand-{script}").absolute()
    attempt = Path(environment.get("RUNNER_ATTEMPT") or path / "attempts" / "1").absolute()
    flag = Path(environment.get("RUNNER_SAVE_AND_EXIT") or attempt / "save-and-exit").absolute()
    cache = Path(environment.get("RUNNER_CACHE") or path / "cache").absolute()
    return RunFolder(path, attempt, flag, cache, by_hand=not named)


def make(run: RunFolder) -> None:
    """Make the folders that the job writes to."""
    for folder in (run.path, run.attempt, run.cache):
        folder.mkdir(parents=True, exist_ok=True)


def point_caches(run: RunFolder, environment: dict[str, str] | os._Environ[str]) -> None:
    """Send the caches of Hugging Face and matplotlib to ours, unless the user has said where they are, or has them.

    In a container the home folder is often missing, read-only, or gone with the container: these libraries then fail,
    or start anew each time. What lies in a home folder that is seen here (models that were fetched before, a token,
    settings of plots) is used as it is.
    """
    home = Path(environment.get("HOME") or "/")
    fetched = run.cache / "huggingface" / "prefetched"  # by `runner prefetch`; a job that is offline has only these
    if environment.get("HF_HUB_OFFLINE") == "1" and fetched.is_dir():
        environment.setdefault("HF_HOME", str(fetched.parent))
    if not (Path(environment.get("XDG_CACHE_HOME") or home / ".cache") / "huggingface").is_dir():
        environment.setdefault("HF_HOME", str(run.cache / "huggingface"))
    if not (Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "matplotlib").is_dir():
        environment.setdefault("MPLCONFIGDIR", str(run.cache / "matplotlib"))
