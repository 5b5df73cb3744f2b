"""DeepSpeed's configuration: a preset by name or a file, made to agree with the arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import files
from training.errors import JobError, near_miss

if TYPE_CHECKING:
    from training.batch import Batch
    from training.run import RunFolder
    from training.settings import Settings

PRESETS = Path(__file__).resolve().parents[1] / "deepspeed"
# transformers 5.23 renamed gradient_checkpointing.
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
# Sections and keys that the scripts use or document; others get a warning only.
TOP_LEVEL = frozenset(
    (
        *("activation_checkpointing", "aio", "amp", "bf16", "bfloat16", "checkpoint", "comms_logger", "compile"),
        *("communication_data_type", "data_types", "dump_state", "elasticity", "flops_profiler", "fp16"),
        *("gradient_accumulation_steps", "gradient_clipping", "gradient_predivide_factor", "memory_breakdown"),
        *("optimizer", "prescale_gradients", "scheduler", "sparse_gradients", "steps_per_print", "tensorboard"),
        *("torch_autocast", "train_batch_size", "train_micro_batch_size_per_gpu", "wall_clock_breakdown", "wandb"),
        *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization"),
    )
)
# Keys that would break a run, and why they are left out.
DROPPED = {
    "load_universal": "the script loads a universal checkpoint when the number of processes has changed",
    "use_node_local_storage": "the next attempt may run on other nodes, so all shards go to the run folder",
}


def settle(settings: Settings, batch: Batch, run: RunFolder) -> tuple[str, ...]:
    """Replace a preset's name by the path of the file; `none` turns DeepSpeed off. Return notes for the user.

    bf16 and fp16 of the file become the arguments, since the trainer refuses a difference. A section
    activation_checkpointing turns on the trainer's own. Keys of DROPPED are left out of a copy in the attempt's folder.
    """
    name = settings.get("deepspeed")
    if not name or str(name).lower() == "none":
        settings.derive("deepspeed", None, settings.sources.get("deepspeed", "library default"))
        return ()
    path = resolve(str(name))
    config = read(path)
    expected: dict[str, Any] = {
        "train_batch_size": batch.sequences,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": settings["max_grad_norm"],
    }
    batch_conflict(path, config, expected)
    _take_precision(path, config, settings)
    if "activation_checkpointing" in config and not any(settings.given(key) for key in CHECKPOINTING):
        # The older name only warns: set the newest one.
        newest = next(key for key in CHECKPOINTING if key in settings.values)
        settings.default({newest: True}, f"{path.name}: activation_checkpointing")
    notes = unknown_keys(path, config)
    dropped = [key for key in DROPPED if config.get("checkpoint", {}).get(key)]
    source = settings.sources["deepspeed"]
    if dropped:
        notes += [f"{path.name}: checkpoint.{key} is ignored: {DROPPED[key]}" for key in dropped]
        kept = {key: value for key, value in config["checkpoint"].items() if key not in dropped}
        path = run.attempt / "deepspeed.json"
        files.write_json(path, {**config, "checkpoint": kept})
    settings.derive("deepspeed", str(path), f"{source} {name!r}" if str(path) != name else source)
    return tuple(notes)


def presets() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PRESETS.glob("*.json")))


def resolve(name: str) -> Path:
    """Return the file of a preset such as `zero2`, or the path given. Raises JobError for neither."""
    if (PRESETS / f"{name}.json").is_file():
        return PRESETS / f"{name}.json"
    if Path(name).is_file():
        return Path(name)
    raise JobError(
        f"there is no DeepSpeed preset or file {name!r}{near_miss(name, presets())}",
        f"the presets are {', '.join(presets())}",
        "--deepspeed zero2, or the path of a JSON file inside the container",
    )


def read(path: Path) -> dict[str, Any]:
    """Return the configuration. Raises JobError for what is not a JSON object."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        raise JobError(
            f"{where} is not valid JSON", error.msg, "fix that line (JSON does not allow comments)"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(
            f"cannot read {path}", str(error), "give the path of a text file inside the container"
        ) from error
    if not isinstance(config, dict):
        raise JobError(
            f"{path} is not a JSON object",
            "a DeepSpeed configuration must be a JSON object",
            "write the settings as {…}",
        )
    return config


def stage(config: Mapping[str, Any]) -> int:
    return int(config.get("zero_optimization", {}).get("stage", 0))


def unknown_keys(path: Path, config: Mapping[str, Any]) -> list[str]:
    """Return a note for each key at the top or in zero_optimization that is not known: DeepSpeed ignores most typos."""
    known = {"": (config, TOP_LEVEL)}
    try:
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

        fields = DeepSpeedZeroConfig.model_fields
        names = frozenset(fields) | {field.alias for field in fields.values() if field.alias}
        known["zero_optimization."] = (config.get("zero_optimization", {}), names)
    except (ImportError, AttributeError):  # another DeepSpeed, or none
        pass
    return [
        f"{path.name}: DeepSpeed may not know the key {prefix + key!r}{near_miss(key, sorted(names))}"
        for prefix, (table, names) in known.items()
        for key in table
        if key not in names
    ]


def batch_conflict(path: Path, config: Mapping[str, Any], expected: Mapping[str, float | int]) -> None:
    """Raise JobError if the file sets a number that the command line sets to another."""
    for key, value in expected.items():
        written = config.get(key, "auto")
        if written != "auto" and written != value:
            raise JobError(
                f"{path} sets {key} = {written}, but the command line sets it to {value}",
                "DeepSpeed stops if the two values differ",
                f'write "auto" for {key} in the file, or give arguments that result in {written}',
            )


def skip_unbuilt_shm_comm() -> None:
    """Keep DeepSpeed from compiling its all-reduce for CPUs at the first start; torch's own works as well.

    It needs a compiler and minutes. If it is killed meanwhile, torch leaves a lock behind on which every later start
    waits forever. Images have it built. Source: DeepSpeed 0.19.8, comm/torch.py.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops

    from deepspeed import ops

    name = "deepspeed_shm_comm"
    if get_accelerator().device_name() == "cpu" and not installed_ops.get(name):
        ops.__compatible_ops__[name] = False


def _take_precision(path: Path, config: Mapping[str, Any], settings: Settings) -> None:
    for name in ("bf16", "fp16"):
        enabled = config.get(name, {}).get("enabled", "auto")
        if enabled == "auto":
            continue
        if settings.given(name) and bool(settings.get(name)) != enabled:
            raise JobError(
                f"{path} sets {name}.enabled = {str(enabled).lower()}, but --{name} is {settings[name]}",
                "the trainer stops if the two values differ",
                f'write "auto" for {name}.enabled in the file, or remove --{name}',
            )
        settings.derive(name, enabled, f"{path.name}: {name}.enabled")
