"""Checkpoints that are complete, or are not used."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training import files
from training.errors import JobError
from training.processes import Processes, barrier

MARKER = "complete.json"
FOLDER = re.compile(r"checkpoint-(\d+)")
TRAINING_STATE = (
    *("optimizer.*", "scheduler.pt", "scaler.pt", "rng_state*", "trainer_state.json", "latest", "zero_to_*.py"),
    MARKER,
)


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    world_size: int


def newest_complete(folder: Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Return the newest checkpoint whose files are all there in their sizes, and why each newer one was skipped."""
    skipped: list[str] = []
    found = [(int(match[1]), path) for path in _folders(folder) if (match := FOLDER.fullmatch(path.name))]
    for _, path in sorted(found, reverse=True):
        fault = incomplete(path)
        if fault is None:
            marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
            return Checkpoint(path, marker["step"], marker["world_size"]), tuple(skipped)
        skipped.append(f"skipped {path}: {fault}")
    return None, tuple(skipped)


def incomplete(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None when its done marker and every file of it are right."""
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
        expected: dict[str, int] = marker["files"]
    except FileNotFoundError:
        return f"it has no {MARKER}: the job ended while writing it"
    except (OSError, ValueError, KeyError) as error:
        return f"{MARKER} cannot be read ({error})"
    for name, size_bytes in expected.items():
        try:
            actual = (path / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if actual != size_bytes:
            return f"{name} has {actual} bytes, {size_bytes} were written"
    return None


def mark_complete(path: Path, step: int, world_size: int) -> None:
    """Sync every file of a checkpoint, then write its done marker."""
    files.sync_tree(path)
    written = files.sizes(path)
    written.pop(MARKER, None)
    files.write_json(path / MARKER, {"step": step, "world_size": world_size, "files": written})


def choose(folder: Path, wanted: str | None, automatic: bool) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Return the checkpoint to resume from: `wanted` is a path, true, false, or None for what is usual here."""
    word = (wanted or "").lower()
    if word in ("false", "no", "none") or (wanted is None and not automatic):
        return None, ()
    if wanted is None or word in ("true", "yes"):
        return newest_complete(folder)
    path = Path(wanted)
    if not path.is_dir():
        raise JobError(
            f"there is no checkpoint {wanted!r}",
            "no such folder",
            f"name a folder, or leave it out: {folder} is searched",
        )
    fault = incomplete(path)
    if fault:
        raise JobError(f"the checkpoint {wanted!r} is not complete", fault, "name an older one")
    marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
    return Checkpoint(path, marker["step"], marker["world_size"]), ()


def refuse_other_world_size(checkpoint: Checkpoint, processes: Processes, zero_stage: int | None) -> None:
    """Raise JobError where ZeRO's shards were written by another number of processes."""
    if zero_stage and checkpoint.world_size != processes.world_size:
        raise JobError(
            f"{checkpoint.path} is of {checkpoint.world_size} processes, this start has {processes.world_size}",
            f"with ZeRO-{zero_stage} each process holds one shard of the optimizer",
            f"start {checkpoint.world_size} processes, or begin anew with --resume_from_checkpoint false",
        )


def at_the_end(checkpoint: Checkpoint, config: Any) -> bool:
    """True where no step is left to take: transformers' Trainer would take one more."""
    if config.max_steps > 0:
        return bool(checkpoint.step >= config.max_steps)
    state = json.loads((checkpoint.path / "trainer_state.json").read_text(encoding="utf-8"))
    same_epochs = state.get("num_train_epochs") == math.ceil(config.num_train_epochs)
    return bool(same_epochs and checkpoint.step >= state.get("max_steps", checkpoint.step + 1))


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


class CompleteCheckpoints(TrainerCallback):
    """Marks each checkpoint once all ranks have written their part, and only then removes old ones."""

    def __init__(self, processes: Processes, keep: int | None) -> None:
        self.processes = processes
        self.keep = keep

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        barrier(self.processes)
        if self.processes.first:
            path = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
            mark_complete(path, state.global_step, self.processes.world_size)
            print(f"checkpoint {path}", flush=True)
            if self.keep:
                remove_old(path.parent, self.keep)
        barrier(self.processes)


def remove_old(folder: Path, keep: int) -> None:
    """Keep the newest `keep` complete checkpoints; what is incomplete is left for a person to look at."""
    found = [(int(match[1]), path) for path in _folders(folder) if (match := FOLDER.fullmatch(path.name))]
    whole = [path for _, path in sorted(found, reverse=True) if incomplete(path) is None]
    for path in whole[max(1, keep) :]:
        doomed = path.with_name(f".{path.name}.removing")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
