"""Where the hub's own cache has a repository, found without huggingface_hub and without network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

OFFLINE = ("1", "true", "yes", "on")


def is_offline(environment: Mapping[str, str]) -> bool:
    return environment.get("HF_HUB_OFFLINE", "").lower() in OFFLINE


def snapshot(kind: str, name: str, environment: Mapping[str, str], revision: str = "main") -> Path | None:
    """Return the folder of a model's or dataset's files, or None. Source: huggingface_hub, "Understand caching"."""
    home = environment.get("HF_HOME") or Path(environment.get("HOME") or "/") / ".cache" / "huggingface"
    cache = Path(environment.get("HF_HUB_CACHE") or Path(home) / "hub")
    repository = cache / f"{kind}s--{name.replace('/', '--')}"
    try:
        commit = (repository / "refs" / revision).read_text(encoding="utf-8").strip()
    except OSError:
        commit = revision
    folder = repository / "snapshots" / commit
    return folder if folder.is_dir() else None
