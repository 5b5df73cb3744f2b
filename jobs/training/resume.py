"""The checkpoint to resume from: the newest that is complete, of this model."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from training import marker
from training.errors import JobError
from training.marker import MARKER
from training.processes import Processes, gather, once

FOLDER = re.compile(r"checkpoint-(\d+)")
NOT_AT_ALL = ("false", "no", "none")  # values of --resume_from_checkpoint
REPLACED = ".replaced"  # ending of a checkpoint's hidden name while another one of the same step takes its place
TRAINING_STATE = (
    *("optimizer.*", "scheduler.pt", "scaler.pt", "rng_state*", "trainer_state.json", "latest*", "zero_to_*.py"),
    MARKER,
)


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    world_size: int
    zero_stage: int | None = None  # None without DeepSpeed
    sequences: int | None = None  # per step, over all processes
    epochs: float | None = None  # --num_train_epochs, 0 with --max_steps; None in older checkpoints


def find(
    folder: Path, wanted: str | None, automatic: bool, processes: Processes, verify: bool = False
) -> Checkpoint | None:
    """Return the checkpoint to resume from, the same on all ranks; print which ones are skipped and why. A collective.

    `wanted` is a path, true, false, or None for the usual: the newest one if `automatic`. Rank 0 compares sizes;
    with `verify` all ranks together also read and hash every file.
    """
    named = _is_named(wanted)
    once(processes, lambda: _put_back(folder))
    candidates = once(processes, lambda: _candidates(folder, named, wanted, automatic))
    return _first_whole(candidates, wanted if named else None, processes, verify)


def find_own(folder: Path, began: Sequence[str], processes: Processes, verify: bool = False) -> Checkpoint | None:
    """Return the newest checkpoint of a training that `began` like this one, in an earlier attempt. A collective.

    It comes before what `find` finds: a restart must not begin there again.
    """
    if not began:
        return None
    once(processes, lambda: _put_back(folder))
    own = once(processes, lambda: [_checked(path) for path in by_age(folder) if _began(path) == [*began]])
    return _first_whole(own, None, processes, verify)


def _first_whole(
    candidates: Sequence[tuple[Checkpoint | None, str]], named: str | None, processes: Processes, verify: bool
) -> Checkpoint | None:
    """Return the first checkpoint without a fault. Raises JobError if a `named` one has a fault."""
    for checkpoint, fault in candidates:
        if checkpoint is not None:
            damage = _damaged_anywhere(checkpoint.path, processes) if verify else None
            if damage is None:
                if processes.first:
                    print(f"resuming from {checkpoint.path} (step {checkpoint.step})", flush=True)
                return checkpoint
            fault = f"{checkpoint.path}: {damage}"
        if named:
            raise JobError(
                f"cannot resume from {named!r}",
                fault,
                "name a complete checkpoint of these scripts; for the weights of another: --model_name_or_path FOLDER",
            )
        if processes.first:
            print(f"skipped {fault}", flush=True)
    return None


def began_at(run: Path, wanted: str | None) -> list[str]:
    """Return what tells a training of a run that begins at a named checkpoint, or at step 0; nothing for any other."""
    if _is_named(wanted) or (wanted or "").lower() in NOT_AT_ALL:
        return [str(run), (wanted or "") if _is_named(wanted) else "false"]
    return []


def _began(path: Path) -> list[str]:
    try:
        return list(marker.read(path).get("began", []))
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _put_back(folder: Path) -> None:
    """Give a checkpoint its name back if the attempt was killed before the new one took its place."""
    for replaced in folder.glob(f".checkpoint-*{REPLACED}"):
        path = replaced.with_name(replaced.name.removeprefix(".").removesuffix(REPLACED))
        if not path.exists() and marker.missing_or_cut(replaced) is None:
            replaced.rename(path)


def _is_named(wanted: str | None) -> bool:
    return wanted is not None and wanted.lower() not in ("true", "yes", *NOT_AT_ALL)


def _candidates(folder: Path, named: bool, wanted: str | None, automatic: bool) -> list[tuple[Checkpoint | None, str]]:
    """Return checkpoints, newest first, each either with the right sizes or with what is wrong with it."""
    if named:
        path = Path(wanted or "")
        if not path.is_dir():
            fix = f"pass an existing folder; for the newest checkpoint in {folder}: --resume_from_checkpoint true"
            raise JobError(f"there is no checkpoint {wanted!r}", "no folder has that name", fix)
        return [_checked(path)]
    word = (wanted or "").lower()
    if word in NOT_AT_ALL or (wanted is None and not automatic):
        return []
    return [_checked(path) for path in by_age(folder)]


def _checked(path: Path) -> tuple[Checkpoint | None, str]:
    fault = marker.missing_or_cut(path)
    return (None, f"{path}: {fault}") if fault else (load(path), "")


def by_age(folder: Path) -> list[Path]:
    """Return the folders `checkpoint-N`, newest first: of the training that began last, the highest step."""
    steps = _steps(folder)
    return sorted(steps, key=lambda path: (-_generation(path), -steps[path]))


def next_generation(folder: Path, step: int) -> int:
    """Return the generation of checkpoints that follow this step: a new one if the folder has later steps already.

    Those are of another training, which began earlier: with --overwrite_output_dir, or where an older checkpoint was
    named. Without generations, the next start would resume there, and --save_total_limit remove the new checkpoints.
    """
    steps = _steps(folder)
    newest = max(map(_generation, steps), default=0)
    return newest + any(later > step and _generation(path) == newest for path, later in steps.items())


def _steps(folder: Path) -> dict[Path, int]:
    found = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return {path: int(match[1]) for path in found if (match := FOLDER.fullmatch(path.name))}


def _generation(path: Path) -> int:
    """Return what complete.json says; 0 for an incomplete checkpoint, and for one of an older version."""
    try:
        return int(marker.read(path).get("generation", 0))
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def load(path: Path) -> Checkpoint:
    """Return what complete.json says."""
    facts = marker.read(path)
    optional = (facts.get(key) for key in ("zero_stage", "sequences", "epochs"))
    return Checkpoint(path, facts["step"], facts["world_size"], *optional)


def _damaged_anywhere(path: Path, processes: Processes) -> str | None:
    """Return a fault that any rank has found in its share of the files, or None. A collective."""
    fault = marker.damaged(path, processes.rank, processes.world_size, processes.local_world_size)
    return next((found for found in gather(fault, processes) if found), None)


def is_finished(checkpoint: Checkpoint | None, config: Any) -> bool:
    """True if no step is left to take: transformers' Trainer would take one more."""
    if checkpoint is None:
        return False
    if config.max_steps > 0:
        return bool(checkpoint.step >= config.max_steps)
    state = json.loads((checkpoint.path / "trainer_state.json").read_text(encoding="utf-8"))
    if checkpoint.epochs is None:
        same_epochs = state.get("num_train_epochs") == math.ceil(config.num_train_epochs)
    else:  # the trainer's state has the epochs rounded up, so that 0.5 and 1 look the same
        same_epochs = checkpoint.epochs == config.num_train_epochs
    return bool(same_epochs and checkpoint.step >= state.get("max_steps", checkpoint.step + 1))


def model_at_end(checkpoint: Checkpoint, config: Any) -> Path:
    """Return the checkpoint whose model a finished training leaves: the best one if the training was to load it.

    A best checkpoint that is not complete does not count.
    """
    state = json.loads((checkpoint.path / "trainer_state.json").read_text(encoding="utf-8"))
    best = state.get("best_model_checkpoint") if config.load_best_model_at_end else None
    return Path(best) if best and marker.missing_or_cut(Path(best)) is None else checkpoint.path


def check_old_torch(allowed: bool) -> None:
    """Raise JobError if transformers refuses to load a checkpoint with this torch and the user does not allow it.

    torch before 2.6 (NGC 24.06 has 2.4) can run code from a prepared file even with `weights_only`, so transformers
    refuses it. A checkpoint of this run was written by this run.
    """
    import torch
    import transformers.trainer

    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6):
        return
    if not hasattr(transformers.trainer, "check_torch_load_is_safe"):
        return  # an older version, which does not check
    if not allowed:
        raise JobError(
            f"torch {torch.__version__} cannot resume from a checkpoint",
            "before torch 2.6, loading a crafted file can run code, so transformers refuses to load checkpoints",
            "use a newer torch, or --allow_old_torch_load true if you trust everyone who can write to the run folder",
        )
    transformers.trainer.check_torch_load_is_safe = lambda: None


def copy_model(checkpoint: Path, path: Path) -> None:
    """Copy the Hugging Face model of a checkpoint, without optimizer, schedule and random states.

    A checkpoint of ZeRO-3 may consist of shards only. They are copied then, as the trainer writes them at the end.
    """
    shards = [] if any(checkpoint.glob("*.safetensors")) else list(checkpoint.glob("global_step*"))
    if not shards and not any(checkpoint.glob("*.safetensors")):
        raise JobError(
            f"{checkpoint} has no model to copy to the final model's folder",
            "it contains neither *.safetensors nor shards",
            "keep it if it has pytorch_model*.bin; if not, remove it, so that the run resumes from an older one",
        )
    path.mkdir()
    for folder in shards:
        shutil.copytree(folder, path / folder.name)
        shutil.copy2(checkpoint / "latest", path / "latest")
    for source in checkpoint.iterdir():
        if source.is_file() and not any(fnmatch(source.name, pattern) for pattern in TRAINING_STATE):
            shutil.copy2(source, path / source.name)
