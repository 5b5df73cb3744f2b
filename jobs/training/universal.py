"""A checkpoint for another number of processes: DeepSpeed's universal form, made once beside the shards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from training import deepspeed, files, marker, zero3_faults
from training.errors import JobError
from training.processes import Processes, once, once_slowly
from training.resume import Checkpoint

LATEST = "latest_universal"  # DeepSpeed looks for this name
CONVERTER = ("-m", "deepspeed.checkpoint.ds_to_universal")
# Variables of this launch: with them the converter would wait for other ranks.
OF_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def prepare(
    checkpoint: Checkpoint | None, config: Any, processes: Processes, beat: Callable[[], None] = lambda: None
) -> None:
    """Convert the checkpoint if the number of processes or the ZeRO stage has changed, and set `load_universal`.

    A collective; call it before the trainer is made. Without DeepSpeed, and with ZeRO-0, a checkpoint fits any number
    of processes. Raises JobError if this start cannot read that checkpoint.
    """
    if checkpoint is None:
        return
    _print_differences(checkpoint, config, processes)
    stage = deepspeed.stage_of(config)
    if not _needs_conversion(checkpoint, stage, processes.world_size):
        return
    if stage == 3 and not zero3_faults.is_supported():
        raise JobError(
            f"{checkpoint.path} was written by {checkpoint.world_size} processes, but this run has "
            f"{processes.world_size}",
            "DeepSpeed before 0.18 loses all but the first group of parameters when it converts a ZeRO-3 checkpoint",
            f"start {checkpoint.world_size} processes, or use an image with a newer DeepSpeed",
        )
    folder = convert(checkpoint, processes, beat)
    if processes.first:
        print(f"loading the checkpoint from {folder}, which works with any number of processes", flush=True)
    # Only for this start, not in the job's own files: the key would break every other resume.
    for holder in (config.hf_deepspeed_config, config.deepspeed_plugin.hf_ds_config):
        holder.config.setdefault("checkpoint", {})["load_universal"] = True
    if stage == 3:
        zero3_faults.work_around()


def _needs_conversion(checkpoint: Checkpoint, stage: int | None, world_size: int) -> bool:
    saved = checkpoint.zero_stage
    same = checkpoint.world_size == world_size and saved == stage
    sharded = bool(saved) and bool(stage)
    if same or (saved == stage and not sharded):
        return False
    if saved == stage or {saved, stage} == {1, 2}:
        return True
    there, here = ("without DeepSpeed" if found is None else f"with ZeRO-{found}" for found in (saved, stage))
    raise JobError(
        f"{checkpoint.path} was written {there}, but this run trains {here}",
        "the format of the optimizer's state is different; only ZeRO-1 and ZeRO-2 can read each other's format",
        "use the settings of the checkpoint, or load only its weights: convert it (jobs/convert.py), then"
        " --resume_from_checkpoint false --model_name_or_path FOLDER",
    )


def convert(checkpoint: Checkpoint, processes: Processes, beat: Callable[[], None] = lambda: None) -> Path:
    """Return the universal folder in the checkpoint's own; rank 0 makes it if it is not complete. A collective."""
    tag = once(processes, lambda: _tag(checkpoint.path))
    folder = checkpoint.path / f"{tag}_universal"
    if not once(processes, lambda: _is_complete(folder)):
        started = time.monotonic()
        once_slowly(processes, lambda: _convert(checkpoint.path, tag, folder), beat)
        if processes.first:
            print(f"converted to {folder} in {time.monotonic() - started:.1f} s", flush=True)
    return folder


def _convert(checkpoint: Path, tag: str, folder: Path) -> None:
    """Run `ds_to_universal` in a process of its own: it forks workers, which a process with a GPU must not."""
    _sweep(checkpoint)
    partial = files.unfinished(checkpoint / "universal")
    partial.mkdir()
    made, log = partial / folder.name, partial / "log"
    workers = str(min(8, len(os.sched_getaffinity(0))))
    command = (
        *(sys.executable, *CONVERTER, "--inject_missing_state"),
        *("--input_folder", str(checkpoint / tag), "--output_folder", str(made)),
        *("--num_extract_workers", workers, "--num_merge_workers", workers),
    )
    try:
        with log.open("wb") as stream:
            done = subprocess.run(
                command,
                env=_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode != 0:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            raise JobError(
                f"{checkpoint} could not be converted to DeepSpeed's universal format",
                next((line.strip() for line in reversed(lines) if line.strip()), "the converter printed nothing"),
                "start as many processes, with the same ZeRO stage, as wrote the checkpoint, or free some space:"
                " the universal format takes 12 bytes per weight",
            )
        found = marker.digests(made, files.sizes(made), sync=True)
        marker.write(made, found, {"step": 0, "world_size": 0})
        if folder.exists():
            shutil.rmtree(folder)  # made by us, and not complete
        made.rename(folder)
        files.write_text(checkpoint / LATEST, folder.name)
    finally:
        _sweep(checkpoint)


def _tag(path: Path) -> str:
    try:
        return (path / "latest").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise JobError(
            f"{path} has no DeepSpeed shards",
            f"cannot read its file `latest`: {error.strerror}",
            "resume from another checkpoint",
        ) from error


def _is_complete(folder: Path) -> bool:
    named = folder.parent / LATEST
    if not named.is_file() or named.read_text(encoding="utf-8").strip() != folder.name:
        return False
    return marker.missing_or_cut(folder) is None


def _sweep(checkpoint: Path) -> None:
    for path in checkpoint.glob(".universal.*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    kept = {
        key: value for key, value in environment.items() if key not in OF_LAUNCH and not key.startswith("TORCHELASTIC_")
    }
    return {**kept, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def _print_differences(checkpoint: Checkpoint, config: Any, processes: Processes) -> None:
    """Print what will not continue exactly as it was."""
    if not processes.first:
        return
    sequences = config.per_device_train_batch_size * config.gradient_accumulation_steps * processes.world_size
    if checkpoint.sequences not in (None, sequences):
        divides = checkpoint.sequences % (config.per_device_train_batch_size * processes.world_size) == 0
        print(
            f"warning: a step had {checkpoint.sequences} sequences, but now has {sequences}: the step count continues,"
            " so data is skipped or repeated"
            + (f"; to keep the old size: --global_batch_size {checkpoint.sequences}" if divides else ""),
            flush=True,
        )
    if checkpoint.world_size != processes.world_size:
        print(
            f"{checkpoint.path.name} was written by {checkpoint.world_size} processes, but this run has "
            f"{processes.world_size}: data, learning rate and optimizer continue, but random states (dropout) "
            "are not those of an uninterrupted run",
            flush=True,
        )
