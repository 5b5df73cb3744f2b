"""Upload a model's folder to the Hugging Face hub in one commit. Needs huggingface_hub only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.errors import JobError

# Never uploaded: the state of a training, and hidden files.
LEFT_OUT = (
    *("*.pt", "*.pth", "rng_state*", "trainer_state.json", "optimizer.*", "latest*", "zero_to_*.py", "complete.json"),
    *("global_step*", ".*", "**/.*", "converted.json", "training_args.bin"),
)


def check_folder(folder: Path) -> int:
    """Return the size in bytes of the weights. Raises JobError if the folder is not a complete model."""
    if not folder.is_dir():
        raise JobError(f"no folder {str(folder)!r}", "it does not exist", "give the path that convert.py printed")
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise JobError(
            f"{str(folder)!r} is not a Hugging Face model", "it has no config.json", "python jobs/convert.py makes one"
        )
    weights = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")]
    index = folder / "model.safetensors.index.json"
    wanted = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.is_file() else set()
    missing = sorted(wanted - {path.name for path in weights})
    if missing or not weights:
        raise JobError(
            f"{str(folder)!r} is incomplete",
            f"{missing[0]} is missing" if missing else "it has no weights",
            "convert the checkpoint again",
        )
    return sum(path.stat().st_size for path in weights)


def push(folder: Path, repository: str, *, private: bool, branch: str | None, message: str) -> str:
    """Upload the folder and return the address of the commit."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise JobError("huggingface_hub is not installed here", str(error), "pip install huggingface_hub") from error
    token = find_token(os.environ)
    api = HfApi(token=token)
    try:
        api.create_repo(repository, private=private or None, exist_ok=True)
        if branch:
            api.create_branch(repository, branch=branch, exist_ok=True)
        done: Any = api.upload_folder(
            repo_id=repository, folder_path=str(folder), revision=branch, commit_message=message,
            ignore_patterns=list(LEFT_OUT),
        )  # fmt: skip
    except Exception as error:  # the library raises its own, httpx' and requests' errors, by version
        if isinstance(error, (KeyboardInterrupt, MemoryError)):
            raise
        raise refused(repository, error) from error
    return str(getattr(done, "commit_url", done))


def find_token(environment: Mapping[str, str]) -> str:
    """Return the user's token. Raises JobError if there is none, or if HF_HUB_OFFLINE is set."""
    if environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        raise JobError(
            "HF_HUB_OFFLINE is set",
            "it forbids all connections to the hub",
            "from a login node: env -u HF_HUB_OFFLINE …",
        )
    from huggingface_hub import get_token

    token = get_token()
    if not token:
        raise JobError(
            "no token for the hub",
            "HF_TOKEN is not set, and `hf auth login` has not been run here",
            "HF_TOKEN=… with write access (huggingface.co/settings/tokens)",
        )
    return str(token)


def refused(repository: str, error: Exception) -> JobError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    fixes = {
        401: "the token is wrong or has expired: create a new one",
        403: f"the token cannot write to {repository!r}: use one with write access, or another --repo",
        404: f"check the name {repository!r}: ORGANISATION/NAME or USER/NAME",
    }
    fix = fixes.get(
        status or 0, "push again, from a machine that reaches the hub: files that arrived are not sent twice"
    )
    return JobError(f"the hub refused {repository!r}", lines[0] if lines else type(error).__name__, fix)
