"""Which commit of a model or dataset a run has had from the hub: what the shared cache holds under its name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner.runs.cache import hub
from runner.runs.cache.folder import shared_cache

NOT_HERE = "(not here yet)"


def of_words(words: Sequence[str], run_folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """`model NAME`, `dataset NAME` -> commit, for what the words of a job name on the hub."""
    named = env.get("HF_HOME", "")
    home = Path(named) if named.startswith("/") else shared_cache(run_folder, os.environ) / hub.HOME
    return {f"{each.kind} {each.name}": _commit(home, each) for each in hub.wanted(words)}


def _commit(home: Path, each: hub.Wanted) -> str:
    folder = home / "hub" / f"{each.kind}s--{each.name.replace('/', '--')}"
    try:
        return (folder / "refs" / each.revision).read_text().strip() or NOT_HERE
    except (OSError, UnicodeDecodeError):
        return each.revision if (folder / "snapshots" / each.revision).is_dir() else NOT_HERE
