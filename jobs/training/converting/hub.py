"""Upload a model's folder to the Hugging Face hub in one commit. Needs huggingface_hub only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from training.errors import JobError

# Never uploaded: the state of the trainer, and hidden files.
LEFT_OUT = (
    *("*.pt", "*.pth", "rng_state*", "trainer_state.json", "optimizer.*", "latest*", "zero_to_*.py", "complete.json"),
    *("global_step*", ".*", "**/.*", "converted.json", "training_args.bin"),
)


def check_folder(folder: Path) -> int:
    """Return the size in bytes of the weights. Raises JobError if the folder is not a complete model."""
    weights = [path for path in folder.glob("*") if path.suffix in (".safetensors", ".bin")]
    index = folder / "model.safetensors.index.json"
    wanted = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.is_file() else set()
    missing = sorted(wanted - {path.name for path in weights})
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        missing = ["config.json"]
    if missing or not weights:
        raise JobError(
            f"{str(folder)!r} is not a complete Hugging Face model",
            f"{missing[0]} is missing" if missing else "it has no weights",
            "give the path that `python jobs/convert.py` printed",
        )
    return sum(path.stat().st_size for path in weights)


def push(folder: Path, repository: str, *, private: bool, branch: str | None, message: str) -> str:
    """Upload the folder and return the address of the commit. Raises JobError, before anything is sent if it can."""
    try:
        from huggingface_hub import HfApi, get_token
    except ImportError as error:
        raise JobError("huggingface_hub is not installed", str(error), "pip install huggingface_hub") from error
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        why = "HF_HUB_OFFLINE is set, and forbids all connections to the hub"
        raise JobError(
            "cannot connect to the hub",
            why,
            "on a login node: env -u HF_HUB_OFFLINE python jobs/push.py FOLDER --repo OWNER/NAME",
        )
    if not get_token():
        why = "HF_TOKEN is not set, and `hf auth login` has not been run here"
        fix = "export HF_TOKEN=… with write access (huggingface.co/settings/tokens)"
        raise JobError("cannot log in to the hub", why, fix)
    api = HfApi()
    try:
        api.create_repo(repository, private=private or None, exist_ok=True)
        if branch:
            api.create_branch(repository, branch=branch, exist_ok=True)
        done: Any = api.upload_folder(
            repo_id=repository, folder_path=str(folder), revision=branch, commit_message=message,
            ignore_patterns=list(LEFT_OUT),
        )  # fmt: skip
    except Exception as error:  # the library raises its own, httpx' and requests' errors, by version
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = " ".join(lines[:3]) or type(error).__name__
        fix = "check the name and the token's write access, and push again: uploaded files are not sent twice"
        raise JobError(f"cannot push to {repository!r}", why, fix) from error
    return str(getattr(done, "commit_url", done))
