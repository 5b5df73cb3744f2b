"""DeepSpeed's configuration: a preset by name or a file, checked before anything slow starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.errors import JobError, near_miss

PRESETS = Path(__file__).resolve().parents[2] / "deepspeed"

# DeepSpeed ignores a key that it does not know, so a misspelt one would silently change nothing.
# Source: DeepSpeed 0.19.8, runtime/config.py and runtime/constants.py.
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
    "use_node_local_storage", "wall_clock_breakdown", "wandb", "weight_quantization",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
))
# fmt: on


def presets() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PRESETS.glob("*.json")))


def resolve(name: str) -> Path:
    """Return the file of a preset such as `zero2`, or the path given. Raises JobError for neither."""
    if (PRESETS / f"{name}.json").is_file():
        return PRESETS / f"{name}.json"
    if Path(name).is_file():
        return Path(name)
    raise JobError(
        f"there is no DeepSpeed preset or file {name!r}{near_miss(name, list(presets()))}",
        f"the presets are {', '.join(presets())}",
        "--deepspeed zero2, or the path of a JSON file as the container sees it",
    )


def read(path: Path) -> Mapping[str, Any]:
    """Return the configuration. Raises JobError for broken JSON, unknown keys and contradictions."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        raise JobError(f"{where} is not JSON", error.msg, "mend the line; JSON has no comments") from error
    if not isinstance(config, dict):
        raise JobError(f"{path} holds no JSON object", "DeepSpeed's configuration is one", "begin with '{'")
    unlisted = [key for key in config if key not in TOP_LEVEL_KEYS]
    _refuse_unknown(path, "", config, TOP_LEVEL_KEYS | _read_by_this_version(unlisted))
    zero = config.get("zero_optimization", {})
    known = _zero_keys()
    if known:
        _refuse_unknown(path, "zero_optimization.", zero, known)
    _refuse_contradictions(path, config)
    return config


def stage(config: Mapping[str, Any]) -> int:
    return int(config.get("zero_optimization", {}).get("stage", 0))


def batch_conflict(path: Path, config: Mapping[str, Any], expected: Mapping[str, float | int]) -> None:
    """Raise JobError where the file fixes a number that the command line makes another."""
    for key, value in expected.items():
        written = config.get(key, "auto")
        if written != "auto" and written != value:
            raise JobError(
                f"{path} says {key} = {written}, the command line makes it {value}",
                "two places set the same number, and DeepSpeed stops when they differ",
                f'write "auto" for {key} in the file, or give the arguments that make {written}',
            )


def leave_out_what_is_not_built() -> None:
    """Keep DeepSpeed from compiling its all-reduce for CPUs at the first start; torch's own serves as well.

    It would need a compiler and minutes; and where it is killed meanwhile, torch leaves a lock behind, on which every
    later start of this user waits for good. Images have it built. Source: DeepSpeed 0.19.8, comm/torch.py.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops

    from deepspeed import ops

    name = "deepspeed_shm_comm"
    if get_accelerator().device_name() == "cpu" and not installed_ops.get(name):
        ops.__compatible_ops__[name] = False


def _read_by_this_version(keys: list[str]) -> frozenset[str]:
    """Return those keys that the installed DeepSpeed, newer or older than our list, has as a word in quotes."""
    import importlib.util

    found = importlib.util.find_spec("deepspeed") if keys else None
    if found is None or not found.origin:
        return frozenset()
    sources = [path.read_text(encoding="utf-8") for path in (Path(found.origin).parent / "runtime").rglob("*.py")]
    return frozenset(key for key in keys if any(f'"{key}"' in source or f"'{key}'" in source for source in sources))


def _zero_keys() -> frozenset[str]:
    """Return the keys that the installed DeepSpeed knows below `zero_optimization`; none where it cannot be asked."""
    try:
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    except ImportError:
        return frozenset()
    fields = getattr(DeepSpeedZeroConfig, "model_fields", None) or DeepSpeedZeroConfig.__fields__
    aliases = {field.alias for field in fields.values() if field.alias}
    return frozenset(fields) | frozenset(aliases)


def _refuse_unknown(path: Path, prefix: str, table: Mapping[str, Any], known: frozenset[str]) -> None:
    for key in table:
        if key not in known:
            raise JobError(
                f"{path}: DeepSpeed knows no key {prefix + key!r}{near_miss(key, sorted(known))}",
                "an unknown key changes nothing, so it is a mistake",
                "mend the name or take the key out",
            )


def _refuse_contradictions(path: Path, config: Mapping[str, Any]) -> None:
    bf16 = config.get("bf16", config.get("bfloat16", {})).get("enabled", False)
    if bf16 is True and config.get("fp16", {}).get("enabled", False) is True:
        raise JobError(f"{path} turns on both bf16 and fp16", "a model trains in one of them", 'write "auto" for both')
    zero = config.get("zero_optimization", {})
    for key in ("offload_param", "stage3_gather_16bit_weights_on_model_save"):
        wanted = zero.get(key, False)
        off = wanted is False or (isinstance(wanted, Mapping) and wanted.get("device") in (None, "none"))
        if not off and stage(config) != 3:
            raise JobError(
                f"{path}: zero_optimization.{key} with stage {stage(config)}",
                "only stage 3 splits the weights, so only there it means something",
                f"set stage to 3, or take {key} out",
            )
