"""The cache that runs share: what one has made (corpus, tokenizer, fetched models), the next one finds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from runner.environments.mount import Mount

CACHE_MOUNT = Mount("${RUNNER_CACHE}", "${RUNNER_CACHE}")
"""at the same path inside and outside; payload/attempt.sh sets the variable for a job"""


def shared_cache(run_folder: Path, environ: Mapping[str, str]) -> Path:
    """The folder: RUNNER_CACHE, else `.cache` beside the run. payload/attempt.sh decides the same for a job."""
    named = environ.get("RUNNER_CACHE", "")
    usable = named.startswith("/") and not set(named) & {":", ","}
    return Path(named) if usable else run_folder.parent / ".cache"
