"""What in a DeepSpeed configuration cannot be meant together, or changes nothing with this job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.errors import JobError

NUMBERS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def refuse(path: Path, config: Mapping[str, Any]) -> None:
    """Raise JobError for the first contradiction within one file."""
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise JobError(f"{path}: zero_optimization.stage is {stage!r}", "the stages are 0, 1, 2 and 3", "write one")
    for name in ("bf16", "fp16"):
        enabled = config.get(name, {}).get("enabled", False)
        if enabled not in (True, False, "auto"):
            raise JobError(f"{path}: {name}.enabled is {enabled!r}", 'it is true, false or "auto"', 'write "auto"')
    _precision(path, config)
    _batch(path, config)
    _stage_three_only(path, zero, stage)
    _offload(path, config, zero, stage)
    _universal(path, config)


def _precision(path: Path, config: Mapping[str, Any]) -> None:
    bf16 = config.get("bf16", config.get("bfloat16", {})).get("enabled", False)
    if bf16 is True and config.get("fp16", {}).get("enabled", False) is True:
        raise JobError(f"{path} turns on both bf16 and fp16", "a model trains in one of them", 'write "auto" for both')


def _batch(path: Path, config: Mapping[str, Any]) -> None:
    """Three numbers of which the first is a multiple of the others' product: the world size is the rest."""
    for key in NUMBERS:
        value = config.get(key, "auto")
        if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise JobError(f"{path}: {key} is {value!r}", 'it is a count of 1 or more, or "auto"', 'write "auto"')
    total, micro, accumulation = (config.get(key, "auto") for key in NUMBERS)
    if "auto" not in (total, micro, accumulation) and total % (micro * accumulation):
        raise JobError(
            f"{path}: train_batch_size {total} is no multiple of {micro} x {accumulation}",
            "train_batch_size = micro batch x accumulation x processes",
            'write "auto" for the three; the command line gives them',
        )


def _stage_three_only(path: Path, zero: Mapping[str, Any], stage: int) -> None:
    for key in ("offload_param", "stage3_gather_16bit_weights_on_model_save"):
        if not _off(zero.get(key, False)) and stage != 3:
            raise JobError(
                f"{path}: zero_optimization.{key} with stage {stage}",
                "only stage 3 splits the weights, so only there it means something",
                f"set stage to 3, or take {key} out",
            )


def _offload(path: Path, config: Mapping[str, Any], zero: Mapping[str, Any], stage: int) -> None:
    for key in ("offload_optimizer", "offload_param"):
        table = zero.get(key) or {}
        if table.get("device") == "nvme" and not table.get("nvme_path"):
            raise JobError(
                f"{path}: zero_optimization.{key} goes to nvme, and nvme_path is missing",
                "DeepSpeed would write to a folder named None",
                f'"nvme_path": a folder on the node\'s own disk, or "device": "cpu" in {key}',
            )
    if _off(zero.get("offload_optimizer", False)):
        return
    if stage == 0:
        raise JobError(
            f"{path}: zero_optimization.offload_optimizer with stage 0",
            "there the optimizer is not split, and not DeepSpeed's to move",
            "set stage to 1, 2 or 3, or take offload_optimizer out",
        )
    if "optimizer" not in config and config.get("zero_force_ds_cpu_optimizer", True):
        raise JobError(
            f"{path}: zero_optimization.offload_optimizer without an optimizer section",
            "the trainer would bring torch's optimizer, which DeepSpeed refuses to run on the CPU",
            'add the optimizer section of the preset zero2-offload, or "zero_force_ds_cpu_optimizer": false',
        )


def _universal(path: Path, config: Mapping[str, Any]) -> None:
    if config.get("checkpoint", {}).get("load_universal") is True:
        raise JobError(
            f"{path}: checkpoint.load_universal is set",
            "every start would look for a universal checkpoint, also those that resume from an ordinary one",
            "take it out: the script sets it when it resumes from a universal folder",
        )


def without_effect(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a line for each setting that is turned on and changes nothing with a model of transformers."""
    section = config.get("activation_checkpointing", {})
    known = ("partition_activations", "contiguous_memory_optimization", "cpu_checkpointing", "number_checkpoints")
    return tuple(
        f"activation_checkpointing.{key} changes nothing here: models of transformers recompute by torch, "
        "layer by layer, not by DeepSpeed"
        for key in known
        if section.get(key)
    )


def _off(wanted: Any) -> bool:
    return wanted in (False, None) or (isinstance(wanted, Mapping) and wanted.get("device") in (None, "none"))
