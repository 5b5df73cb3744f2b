"""Where to resume: the newest checkpoint that is whole, of this model, for this number of processes."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from training import marker
from training.errors import JobError
from training.marker import MARKER
from training.processes import Processes, once

FOLDER = re.compile(r"checkpoint-(\d+)")
TRAINING_STATE = (
    *("optimizer.*", "scheduler.pt", "scaler.pt", "rng_state*", "trainer_state.json", "latest*", "zero_to_*.py"),
    MARKER,
)


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    world_size: int
    zero_stage: int | None = None  # None without DeepSpeed, and where an older marker does not say it
    sequences: int | None = None  # per step, over all processes


def settle(folder: Path, wanted: str | None, automatic: bool, peers: Processes) -> Checkpoint | None:
    """Return where to resume, the same on all ranks, every byte of it checked; say what was passed over and why.

    A collective. `wanted` is a path, true, false, or None for what is usual: the newest one where `automatic`.
    Sizes are looked at by rank 0 alone; the hashes of the newest that passes are computed by all ranks together.
    """
    named = _named(wanted)
    candidates = once(peers, lambda: _candidates(folder, named, wanted, automatic))
    for checkpoint, fault in candidates:
        if checkpoint is not None:
            fault = _damaged_anywhere(checkpoint.path, peers)
            if fault is None:
                if peers.first:
                    print(f"resuming from {checkpoint.path} (step {checkpoint.step})", flush=True)
                return checkpoint
            fault = f"{checkpoint.path}: {fault}"
        if named:
            raise JobError(f"the checkpoint {wanted!r} is not complete", fault, "name an older one, or a copy")
        if peers.first:
            print(f"skipped {fault}", flush=True)
    return None


def _named(wanted: str | None) -> bool:
    return wanted is not None and wanted.lower() not in ("true", "yes", "false", "no", "none")


def _candidates(folder: Path, named: bool, wanted: str | None, automatic: bool) -> list[tuple[Checkpoint | None, str]]:
    """Return what may be resumed from, newest first: a checkpoint of the right sizes, or what is wrong with it."""
    if named:
        path = Path(wanted or "")
        if not path.is_dir():
            fix = f"name a folder, or leave it out: {folder} is searched"
            raise JobError(f"there is no checkpoint {wanted!r}", "no such folder", fix)
        return [_looked_at(path)]
    word = (wanted or "").lower()
    if word in ("false", "no", "none") or (wanted is None and not automatic):
        return []
    return [_looked_at(path) for path in by_age(folder)]


def _looked_at(path: Path) -> tuple[Checkpoint | None, str]:
    fault = marker.missing_or_cut(path)
    return (None, f"{path}: {fault}") if fault else (load(path), "")


def by_age(folder: Path) -> list[Path]:
    """Return the folders `checkpoint-N`, highest step first."""
    found = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    steps = {path: int(match[1]) for path in found if (match := FOLDER.fullmatch(path.name))}
    return sorted(steps, key=lambda path: -steps[path])


def load(path: Path) -> Checkpoint:
    """Return what the done marker says."""
    facts = marker.read(path)
    return Checkpoint(path, facts["step"], facts["world_size"], facts.get("zero_stage"), facts.get("sequences"))


def _damaged_anywhere(path: Path, peers: Processes) -> str | None:
    """Return a fault that any rank has found in its share of the files, or None. A collective."""
    fault = marker.damaged(path, peers.rank, peers.world_size, peers.local_world_size)
    if peers.world_size == 1:
        return fault
    import torch.distributed

    faults: list[str | None] = [None] * peers.world_size
    torch.distributed.all_gather_object(faults, fault)
    return next((found for found in faults if found), None)


def at_the_end(checkpoint: Checkpoint, config: Any) -> bool:
    """True where no step is left to take: transformers' Trainer would take one more."""
    if config.max_steps > 0:
        return bool(checkpoint.step >= config.max_steps)
    state = json.loads((checkpoint.path / "trainer_state.json").read_text(encoding="utf-8"))
    same_epochs = state.get("num_train_epochs") == math.ceil(config.num_train_epochs)
    return bool(same_epochs and checkpoint.step >= state.get("max_steps", checkpoint.step + 1))


def let_it_be_read() -> None:
    """Let transformers read optimizer and random states with torch before 2.6, as NGC 24.06 has it.

    It refuses there, since a file made for that could run code. What is resumed was written by a run of ours, and
    its hashes were compared: as with that run's own code, whoever may write there is trusted.

    Torch 2.4 puts no tensor on "cpu:0", and that is what accelerate calls the device where several processes train on
    CPUs.
    """
    import torch
    import transformers.trainer

    if torch.__version__ < "2.6":
        transformers.trainer.check_torch_load_is_safe = lambda: None
        torch.serialization.register_package(
            0, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
        )


def copy_model(checkpoint: Path, path: Path) -> None:
    """Copy the Hugging Face model of a checkpoint, without optimizer, schedule and random states."""
    if not any(checkpoint.glob("*.safetensors")):
        raise JobError(
            f"{checkpoint} holds no model to copy",
            "it has optimizer shards only",
            'set "stage3_gather_16bit_weights_on_model_save" in the DeepSpeed configuration',
        )
    path.mkdir()
    for source in checkpoint.iterdir():
        if source.is_file() and not any(fnmatch(source.name, pattern) for pattern in TRAINING_STATE):
            shutil.copy2(source, path / source.name)
