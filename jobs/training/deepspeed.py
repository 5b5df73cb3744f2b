"""DeepSpeed's configuration: a preset by name or a file, made to agree with the arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import files
from training.errors import JobError, near_miss

if TYPE_CHECKING:
    from transformers import TrainingArguments

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
# Values of a file that are also arguments: the trainer stops if the two differ.
ARGUMENTS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_batch_size": "global_batch_size",  # after the accumulation, which it excludes
    "gradient_clipping": "max_grad_norm",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas.0": "adam_beta1",
    "optimizer.params.betas.1": "adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
}
BATCH = tuple(ARGUMENTS)[:3]
# Types of a section whose params are the ARGUMENTS above.
TYPES = {"optimizer": ("adam", "adamw"), "scheduler": ("warmuplr", "warmupdecaylr")}
EXCLUDED = {
    "gradient_accumulation_steps": "global_batch_size",
    "global_batch_size": "gradient_accumulation_steps",
}
# Keys that would break a run, and why they are left out.
DROPPED = {
    "checkpoint.load_universal": "the script loads a universal checkpoint when the number of processes has changed",
    "checkpoint.use_node_local_storage": "the next attempt may run on other nodes, so all shards go to the run folder",
}
_OWN = "it is a setting of DeepSpeed's activation checkpointing, but the trainer uses torch's"
# Keys without effect, where they are set, and why.
NO_EFFECT = {
    **{f"activation_checkpointing.{key}": _OWN for key in (
        "partition_activations", "contiguous_memory_optimization", "cpu_checkpointing", "number_checkpoints",
        "synchronize_checkpoint_boundary", "profile")},
    "zero_optimization.allgather_bucket_size": "only ZeRO-1 and ZeRO-2 read it",
}  # fmt: skip


def take_arguments(settings: Settings) -> None:
    """Make arguments of the file's values. Raises JobError for an argument that the user has set to another value.

    Call it before anything is derived from these arguments.
    """
    name = settings.get("deepspeed")
    if not name or str(name).lower() == "none":
        return
    path = resolve(str(name))
    config = read(path)
    micro = settings.get("micro_batch")
    for key, argument in ARGUMENTS.items():
        value = value_of(config, key)
        if value in (None, "auto") or argument not in settings.values:
            continue
        if micro is not None and (key.startswith("train_micro") or (micro == "auto" and key in BATCH)):
            _refuse_another(path, key, value, "--micro_batch", int(micro) if str(micro).isdigit() else micro)
        elif settings.given(argument) and not settings.sources[argument].startswith("DeepSpeed file"):
            _refuse_another(path, key, value, f"--{argument}", settings[argument])
        elif key in BATCH and settings.given(EXCLUDED.get(argument, "")):
            pass  # one is computed from the other: `settle` compares the result with the file
        else:
            settings.derive(argument, value, f"DeepSpeed file {path.name}: {key}")
    for chosen, other in (("bf16", "fp16"), ("fp16", "bf16")):
        if value_of(config, f"{chosen}.enabled") is True and settings.given(other) and settings.get(other):
            raise JobError(
                f"{path} sets {chosen}.enabled = true, but --{other} is {settings[other]}",
                "a training run can use only one of the two precisions",
                f'give --{other} false, or write "auto" for {chosen}.enabled in the file',
            )


def settle(settings: Settings, batch: Batch, run: RunFolder) -> tuple[str, ...]:
    """Replace a preset's name by the path of the file; `none` turns DeepSpeed off. Return notes for the user.

    A section activation_checkpointing turns on the trainer's own. Keys of DROPPED are left out of a copy in the
    attempt's folder, which gets the keys of arguments that the user has given and that the file leaves out: the trainer
    passes an argument on only where the file says "auto".
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
    if "activation_checkpointing" in config and not any(settings.given(key) for key in CHECKPOINTING):
        # The older name only warns: set the newest one.
        newest = next(key for key in CHECKPOINTING if key in settings.values)
        settings.default({newest: True}, f"{path.name}: activation_checkpointing")
    notes = unknown_keys(path, config)
    notes += [
        f"{path.name}: {key} has no effect: {why}"
        for key, why in NO_EFFECT.items()
        if value_of(config, key) and (not key.startswith("zero") or stage(config) == 3)
    ]
    dropped = [key for key in DROPPED if value_of(config, key)]
    source, used = settings.sources["deepspeed"], dict(config)
    if dropped:
        notes += [f"{path.name}: {key} is ignored: {DROPPED[key]}" for key in dropped]
        kept = {key: value for key, value in config["checkpoint"].items() if f"checkpoint.{key}" not in dropped}
        used["checkpoint"] = kept
    used = _with_arguments(used, settings)
    if "gradient_clipping" not in config:
        norm = settings["max_grad_norm"]
        if settings.given("max_grad_norm"):
            used["gradient_clipping"] = norm
        elif norm != default_clipping():
            usual = f"clipped to {default_clipping():g}" if default_clipping() else "not clipped"
            why = "it does not set gradient_clipping, and that is the default of this DeepSpeed"
            notes.append(
                f"{path.name}: gradients are {usual}: {why}; to clip them to {norm:g}: --max_grad_norm {norm:g}"
            )
    if used != config:
        path = run.attempt / "deepspeed.json"
        files.write_json(path, used)
    settings.derive("deepspeed", str(path), f"{source} {name!r}" if str(path) != name else source)
    return tuple(notes)


def default_clipping() -> float:
    """Return to which norm DeepSpeed clips gradients if its file does not say: 1 in new versions; 0: not at all."""
    try:
        from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
    except ImportError:  # another DeepSpeed, or none
        return 0.0
    return float(GRADIENT_CLIPPING_DEFAULT)


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


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, or None; a number in the key is a place in a list."""
    value: Any = config
    for word in key.split("."):
        if isinstance(value, list):
            value = value[int(word)] if word.isdigit() and int(word) < len(value) else None
        else:
            value = value.get(word) if isinstance(value, Mapping) else None
    return value


def stage(config: Mapping[str, Any]) -> int:
    return int(config.get("zero_optimization", {}).get("stage", 0))


def stage_of(config: TrainingArguments) -> int | None:
    """Return the ZeRO stage of the training arguments, None without DeepSpeed."""
    plugin = getattr(config, "deepspeed_plugin", None) if config.deepspeed else None
    return stage(plugin.hf_ds_config.config) if plugin else None


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
                f"{path} sets {key} = {written}, but the settings and the number of processes result in {value}",
                "DeepSpeed stops if the two values differ",
                f'write "auto" for {key} in the file, or change the settings or the number of processes',
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


def _with_arguments(config: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Return the configuration with "auto" for params of its optimizer or scheduler that only an argument sets."""
    for key, argument in ARGUMENTS.items():
        section, *names = key.split(".")
        fits = str(value_of(config, f"{section}.type")).lower() in TYPES.get(section, ())
        if fits and settings.given(argument) and value_of(config, key) is None:
            table = config[section]
            config = {**config, section: {**table, "params": {**(table.get("params") or {}), names[1]: "auto"}}}
    return config


def _refuse_another(path: Path, key: str, value: Any, argument: str, given: Any) -> None:
    if given != value:
        raise JobError(
            f"{path} sets {key} = {json.dumps(value)}, but {argument} is {given}",
            "the trainer stops if the two values differ",
            f'write "auto" for {re.sub(r"[.][0-9]+$", "", key)} in the file, or give {argument} {json.dumps(value)}',
        )
