"""Which keys a DeepSpeed configuration may hold, section by section.

DeepSpeed ignores most keys that it does not know, so a misspelt one would silently change nothing.
Source: DeepSpeed 0.19.8, runtime/config.py, runtime/constants.py, runtime/precision_config.py,
runtime/activation_checkpointing/config.py; the keys below `zero_optimization` are asked of the installed version.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from training.errors import JobError, near_miss

# fmt: off
TOP_LEVEL_KEYS = frozenset((
    "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "bfloat16", "checkpoint",
    "checkpoint_parallel_write_pipeline", "comms_logger", "communication_data_type", "compile",
    "compression_training", "csv_monitor", "curriculum_learning", "data_efficiency", "data_types",
    "dataloader_drop_last", "disable_allgather", "dump_state", "eigenvalue", "elasticity", "flops_profiler", "fp16",
    "gradient_accumulation_steps", "gradient_clipping", "gradient_predivide_factor", "graph_harvesting",
    "hybrid_engine", "memory_breakdown", "nebula", "optimizer", "pipeline", "prescale_gradients",
    "progressive_layer_drop", "quantize_training", "scheduler", "seq_parallel_communication_data_type",
    "sparse_attention", "sparse_gradients", "steps_per_print", "tensor_parallel", "tensorboard", "timers",
    "torch_autocast", "train_batch_size", "train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism",
    "wall_clock_breakdown", "wandb", "weight_quantization",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
))
_FP16 = ("enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
         "consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads")
_BF16 = ("enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads",
         "bf16_optimizer_states")
_OFFLOAD = ("device", "nvme_path", "buffer_count", "pin_memory")
_ADAM = ("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "torch_adam", "adam_w_mode", "foreach",
         "fp32_optimizer_states", "freeze_step")
SECTION_KEYS: Mapping[str, frozenset[str]] = {name: frozenset(keys) for name, keys in {
    "activation_checkpointing": ("partition_activations", "number_checkpoints", "contiguous_memory_optimization",
                                 "synchronize_checkpoint_boundary", "profile", "cpu_checkpointing"),
    "bf16": _BF16,
    "bfloat16": _BF16,
    "checkpoint": ("tag_validation", "load_universal", "use_node_local_storage", "parallel_write", "writer"),
    "checkpoint.parallel_write": ("pipeline_stage",),
    "fp16": _FP16,
    "optimizer": ("type", "params", "legacy_fusion"),
    "scheduler": ("type", "params"),
    "zero_optimization.offload_optimizer": (*_OFFLOAD, "pipeline_read", "pipeline_write", "pipeline", "fast_init",
                                            "ratio", "super_offload", "cpuadam_cores_perc"),
    "zero_optimization.offload_param": (*_OFFLOAD, "buffer_size", "max_in_cpu"),
}.items()}
# fmt: on


def refuse_unknown(path: Path, config: Mapping[str, Any]) -> None:
    """Raise JobError for the first key that nothing reads, or that stands in the wrong place."""
    _refuse(path, "", config, TOP_LEVEL_KEYS)
    zero = _table(path, config, "zero_optimization")
    known = _zero_keys()
    if known:
        _refuse(path, "zero_optimization.", zero, known)
    for section, keys in SECTION_KEYS.items():
        table = _table(path, config, section)
        _refuse(path, f"{section}.", table, keys)
    optimizer = _table(path, config, "optimizer")
    if str(optimizer.get("type", "")).lower() in ("adam", "adamw"):
        _refuse(path, "optimizer.params.", _table(path, config, "optimizer.params"), frozenset(_ADAM))


def _table(path: Path, config: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    """Return the section (`a.b`) as a table, empty where it is not there. Raises JobError where it is no table."""
    found: Any = config
    for name in section.split("."):
        found = found.get(name)
        if found is None:
            return {}
        if not isinstance(found, Mapping):
            raise JobError(
                f"{path}: {section} is {found!r}, no table", "it holds keys of its own", f'write "{name}": {{...}}'
            )
    table: Mapping[str, Any] = found
    return table


def _refuse(path: Path, prefix: str, table: Mapping[str, Any], known: frozenset[str]) -> None:
    unlisted = [key for key in table if key not in known]
    elsewhere = {key: home for key in unlisted if (home := _home(key)) and f"{home}." != prefix}
    for key, home in elsewhere.items():
        where = prefix.rstrip(".") or "the top level"
        raise JobError(
            f"{path}: {key} stands in {where}; DeepSpeed reads it in {home}",
            "there it changes nothing",
            f"move it into {home}",
        )
    read = _read_by_this_version(tuple(unlisted))
    for key in unlisted:
        if key not in read:
            raise JobError(
                f"{path}: DeepSpeed knows no key {prefix + key!r}{near_miss(key, sorted(known))}",
                "an unknown key changes nothing, so it is a mistake",
                "mend the name or take the key out",
            )


def _home(key: str) -> str:
    """Return the one section that a key belongs to; nothing where none or several have it."""
    homes = [section for section, keys in SECTION_KEYS.items() if key in keys and section != "bfloat16"]
    if key in _zero_keys():
        homes.append("zero_optimization")
    return homes[0] if len(homes) == 1 else ""


def _read_by_this_version(keys: Iterable[str]) -> frozenset[str]:
    """Return those keys that the installed DeepSpeed, newer or older than our list, has as a word in quotes."""
    import importlib.util

    found = importlib.util.find_spec("deepspeed") if keys else None
    if found is None or not found.origin:
        return frozenset()
    sources = [path.read_text(encoding="utf-8") for path in (Path(found.origin).parent / "runtime").rglob("*.py")]
    return frozenset(key for key in keys if any(f'"{key}"' in source or f"'{key}'" in source for source in sources))


@functools.lru_cache(maxsize=1)
def _zero_keys() -> frozenset[str]:
    """Return the keys that the installed DeepSpeed knows below `zero_optimization`; none where it cannot be asked."""
    try:
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    except ImportError:
        return frozenset()
    fields = getattr(DeepSpeedZeroConfig, "model_fields", None) or DeepSpeedZeroConfig.__fields__
    aliases = {field.alias for field in fields.values() if field.alias}
    return frozenset(fields) | frozenset(aliases)
