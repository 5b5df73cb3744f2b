"""DeepSpeed's configuration: a preset by name or a file, checked before anything slow starts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import deepspeed_contradictions as contradictions
from training import known_keys
from training.errors import JobError, near_miss

if TYPE_CHECKING:
    from training.batch import Batch
    from training.run import RunFolder
    from training.settings import Settings

PRESETS = Path(__file__).resolve().parents[1] / "deepspeed"
# transformers 5.23 renamed gradient_checkpointing.
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")


def settle(settings: Settings, batch: Batch, run: RunFolder) -> tuple[str, ...]:
    """Put the path of the checked file in the place of a preset's name; `none` turns DeepSpeed off.

    A file with a section activation_checkpointing turns the trainer's own on, where the user has not said otherwise.
    Returns lines about what in the file changes nothing. Raises JobError before anything slow has started.
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
    _refuse_node_local(path, config, settings, run)
    if "activation_checkpointing" in config and not any(settings.given(key) for key in CHECKPOINTING):
        # The older name is a way to say the newer one, and warns: only the newest that there is gets the value.
        newest = next(key for key in CHECKPOINTING if key in settings.values)
        settings.default({newest: True}, f"{path.name}: activation_checkpointing")
    source = settings.sources["deepspeed"]
    settings.derive("deepspeed", str(path), f"{source} {name!r}" if str(path) != name else source)
    return contradictions.without_effect(config)


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


def read(path: Path) -> dict[str, Any]:
    """Return the configuration. Raises JobError for broken JSON, keys given twice or unknown, and contradictions."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=lambda pairs: _once(path, pairs))
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        raise JobError(f"{where} is not JSON", error.msg, "mend the line; JSON has no comments") from error
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{path} cannot be read", str(error), "give a text file that the container sees") from error
    if not isinstance(config, dict):
        raise JobError(f"{path} holds no JSON object", "DeepSpeed's configuration is one", "begin with '{'")
    known_keys.refuse_unknown(path, config)
    contradictions.refuse(path, config)
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


def _once(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise JobError(f"{path}: the key {name!r} stands twice in one table", "JSON keeps the last", "take one out")
    return dict(pairs)


def _refuse_node_local(path: Path, config: Mapping[str, Any], settings: Settings, run: RunFolder) -> None:
    """Refuse shards on the nodes' own disks in a run that may restart elsewhere: the others' would be gone.

    Where the checkpoints lie in the run folder after all, nothing is lost: then every node's shards are in it.
    """
    wanted = config.get("checkpoint", {}).get("use_node_local_storage") is True or settings.get("save_on_each_node")
    folder = os.path.realpath(str(settings.get("output_dir") or run.checkpoints))
    shared = os.path.commonpath((folder, os.path.realpath(run.path))) == os.path.realpath(run.path)
    if not wanted or run.by_hand or shared:
        return
    raise JobError(
        f"{path}: checkpoint.use_node_local_storage, and checkpoints go to {folder}",
        "this run restarts, maybe on other nodes, which do not have these shards",
        f"leave --output_dir out: {run.checkpoints} is seen by every node; or set use_node_local_storage to false",
    )
