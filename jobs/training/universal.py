"""A checkpoint for another number of processes: DeepSpeed's universal form, made once beside the shards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training import deepspeed as deepspeed_config
from training import files, marker, zero3_faults, zero3_groups
from training.errors import JobError
from training.processes import Processes, once
from training.resume import Checkpoint
from training.save_and_exit import any_rank

LATEST = "latest_universal"  # DeepSpeed looks for this name
POLL_SECONDS = 0.2
# Of this launch, not of the converter's: with them it would look for its peers.
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def prepare(checkpoint: Checkpoint | None, config: Any, peers: Processes) -> None:
    """Make the trainer able to resume here: convert where world size or ZeRO stage differ, set `load_universal`.

    A collective, to be called before the trainer is made. Without DeepSpeed, and with ZeRO-0, a checkpoint fits any
    number of processes. Raises JobError where no way leads from that checkpoint to this start.
    """
    if checkpoint is None:
        return
    _say_what_differs(checkpoint, config, peers)
    stage = stage_of(config)
    if not _needs_conversion(checkpoint, stage, peers.world_size):
        return
    folder = convert(checkpoint, peers)
    if peers.first:
        print(f"loading it from {folder}, which fits any number of processes", flush=True)
    _load_universal(config)
    if stage == 3:
        (zero3_groups if zero3_groups.are_needed() else zero3_faults).work_around()


def stage_of(config: Any) -> int | None:
    """Return the ZeRO stage of the training arguments, None without DeepSpeed."""
    plugin = getattr(config, "deepspeed_plugin", None) if config.deepspeed else None
    return deepspeed_config.stage(plugin.hf_ds_config.config) if plugin else None


def _needs_conversion(checkpoint: Checkpoint, stage: int | None, world_size: int) -> bool:
    saved = checkpoint.zero_stage
    if saved is None and (checkpoint.path / "latest").is_file():
        saved = stage  # an older marker, which does not say it
    same = checkpoint.world_size == world_size and saved == stage
    sharded = bool(saved) and bool(stage)
    if same or (saved == stage and not sharded):
        return False
    if saved == stage or {saved, stage} == {1, 2}:
        return True
    names = {None: "without DeepSpeed"}
    there, here = (names.get(found, f"with ZeRO-{found}") for found in (saved, stage))
    raise JobError(
        f"{checkpoint.path} was written {there}, this start is {here}",
        "the optimizer's state lies in another form; only ZeRO-1 and ZeRO-2 read each other's",
        "start as before, or begin anew from its weights: --resume_from_checkpoint false --model_name_or_path FOLDER",
    )


def convert(checkpoint: Checkpoint, peers: Processes) -> Path:
    """Return the universal folder in the checkpoint's own, made by rank 0 if it is not there whole. A collective.

    The other ranks meet it in a short collective now and then: one long wait would run into the backend's timeout.
    """
    tag = once(peers, lambda: _tag(checkpoint.path))
    folder = checkpoint.path / f"{tag}_universal"
    if once(peers, lambda: _is_whole(folder)):
        return folder
    conversion = Conversion(checkpoint.path, tag) if peers.first else None
    started = time.monotonic()
    while any_rank(conversion is not None and conversion.running(), peers):
        time.sleep(POLL_SECONDS)
    once(peers, lambda: conversion.settle() if conversion else None)
    if peers.first:
        print(f"converted to {folder} in {time.monotonic() - started:.1f} s", flush=True)
    return folder


def program() -> tuple[str, ...]:
    """Return what Python is to run for the conversion: DeepSpeed's own, but before 0.18, where it fails on ZeRO-3."""
    return (zero3_groups.__file__,) if zero3_groups.are_needed() else ("-m", "deepspeed.checkpoint.ds_to_universal")


class Conversion:
    """`ds_to_universal` in a process of its own: it forks workers, which a process with a GPU must not."""

    def __init__(self, checkpoint: Path, tag: str) -> None:
        self.checkpoint, self.name = checkpoint, f"{tag}_universal"
        self.fault: OSError | None = None
        self.process: subprocess.Popen[bytes] | None = None
        try:
            _sweep(checkpoint)
            self.partial = files.unfinished(checkpoint / "universal")
            self.partial.mkdir()
            self.log = self.partial / "log"
            workers = str(min(8, len(os.sched_getaffinity(0))))
            command = (
                *(sys.executable, *program(), "--inject_missing_state"),
                *("--input_folder", str(checkpoint / tag), "--output_folder", str(self.partial / self.name)),
                *("--num_extract_workers", workers, "--num_merge_workers", workers),
            )
            environment = _alone(os.environ)
            with self.log.open("wb") as log:
                streams: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
                self.process = subprocess.Popen(command, env=environment, **streams)
        except OSError as error:
            self.fault = error

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def settle(self) -> None:
        """Put the result in its place, or raise JobError and leave nothing behind."""
        try:
            if self.process is None or self.process.returncode != 0:
                raise JobError(
                    f"{self.checkpoint} could not be converted for this number of processes",
                    str(self.fault) if self.fault else self._last_words(),
                    "start as many processes as wrote it, or make room: the universal form takes 12 bytes a parameter",
                )
            made = self.partial / self.name
            found = marker.digests(made, files.sizes(made), marker.algorithm(), sync=True)
            marker.write(made, found, marker.algorithm(), {"step": 0, "world_size": 0})
            target = self.checkpoint / self.name
            if target.exists():
                shutil.rmtree(target)  # ours, and not whole
            made.rename(target)
            files.write_text(self.checkpoint / LATEST, self.name)
        finally:
            _sweep(self.checkpoint)

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def _tag(path: Path) -> str:
    try:
        return (path / "latest").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise JobError(
            f"{path} holds no shards of DeepSpeed", f"latest: {error.strerror}", "resume from another checkpoint"
        ) from error


def _is_whole(folder: Path) -> bool:
    named = folder.parent / LATEST
    if not named.is_file() or named.read_text(encoding="utf-8").strip() != folder.name:
        return False
    return marker.missing_or_cut(folder) is None and marker.damaged(folder) is None


def _sweep(checkpoint: Path) -> None:
    for path in checkpoint.glob(".universal.*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def _alone(environment: Mapping[str, str]) -> dict[str, str]:
    kept = {key: value for key, value in environment.items() if key not in OURS and not key.startswith("TORCHELASTIC_")}
    return {**kept, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def _load_universal(config: Any) -> None:
    """Tell DeepSpeed; in the job's own files the key stays unset, since it would break every other resume."""
    for holder in (config.hf_deepspeed_config, config.deepspeed_plugin.hf_ds_config):
        holder.config.setdefault("checkpoint", {})["load_universal"] = True


def loaded(trainer: Any) -> None:
    """Forget `load_universal` once the training has begun: the best checkpoint, loaded at its end, is a usual one."""
    engine = getattr(trainer, "deepspeed", None)
    if engine is not None:
        engine._config.load_universal_checkpoint = False


def _say_what_differs(checkpoint: Checkpoint, config: Any, peers: Processes) -> None:
    """Print what cannot go on exactly as it was."""
    if not peers.first:
        return
    sequences = config.per_device_train_batch_size * config.gradient_accumulation_steps * peers.world_size
    if checkpoint.sequences not in (None, sequences):
        print(
            f"warning: a step was {checkpoint.sequences} sequences and is {sequences} now: steps are counted on, so"
            f" data is skipped or taken twice; --global_batch_size {checkpoint.sequences} keeps it",
            flush=True,
        )
    if checkpoint.world_size != peers.world_size:
        print(
            f"{checkpoint.path.name} is of {checkpoint.world_size} processes, here are {peers.world_size}:"
            " data, learning rate and optimizer go on; random states (dropout) begin anew",
            flush=True,
        )
