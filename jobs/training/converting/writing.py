"""Write a Hugging Face model shard by shard, with at most one of them in memory."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from training import files
from training.converting.shards import Stored
from training.errors import JobError

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
# Files of a checkpoint's folder that are not copied into the model.
NOT_OF_THE_MODEL = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.py", "README.md"),
    *("optimizer.*", "rng_state*", "trainer_state.json", "latest*", "complete.json", "adapter_config.json", ".*"),
    *("metrics.jsonl", "converted.json"),
)


def parse_size(text: str) -> int:
    """Return bytes of `5GB`, `500MB`, `2GiB`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", text.strip().upper())
    if not match or float(match[1]) <= 0:
        raise JobError(f"{text!r} is not a size", "a size is a number and KB, MB, GB, KiB, MiB or GiB", "5GB")
    return int(float(match[1]) * UNITS[match[2] or ""])


def plan(weights: Mapping[str, Stored], dtype: Any, max_shard_bytes: int) -> list[list[str]]:
    """Return the names of the weights of each shard; a weight that is larger than a shard gets one of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, stored in weights.items():
        size = size_bytes(stored, dtype)
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def size_bytes(stored: Stored, dtype: Any) -> int:
    count = 1
    for length in stored.shape:
        count *= length
    return count * int((dtype if stored.dtype.is_floating_point else stored.dtype).itemsize)


def check_room(folder: Path, needed_bytes: int) -> None:
    """Raise JobError if the disk is too full, before anything is written."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise JobError(
            f"{place} has {free / 1e9:.1f} GB free",
            f"the model needs {needed_bytes / 1e9:.1f} GB",
            "--output elsewhere",
        )


def write_weights(folder: Path, weights: Mapping[str, Stored], dtype: Any, max_shard_bytes: int) -> list[Path]:
    """Write the shards and, for more than one, their index; return the shards."""
    from safetensors.torch import save_file

    shards = plan(weights, dtype, max_shard_bytes)
    paths, places, total = [], {}, 0
    for number, names in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors = {each: cast(weights[each].read(), dtype) for each in names}
        save_file(tensors, str(folder / name), metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
        places.update(dict.fromkeys(names, name))
        paths.append(folder / name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        files.write_json(folder / "model.safetensors.index.json", index)
    return paths


def cast(tensor: Any, dtype: Any) -> Any:
    """Return a copy of the tensor; only floating-point numbers change their type."""
    wanted = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(dtype=wanted, copy=True).contiguous()


def read_back(paths: list[Path]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each written weight's name and a function that reads it."""
    from safetensors import safe_open

    for path in paths:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 -- not a mapping
                yield name, lambda name=name, file=file: file.get_tensor(name)  # type: ignore[misc]


def write_rest(source: Path, folder: Path, dtype: str) -> list[str]:
    """Copy config, generation config, tokenizer and chat template; return notes for the user."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not any(fnmatch(path.name, pattern) for pattern in NOT_OF_THE_MODEL):
            shutil.copyfile(path, folder / path.name)
    for path in source.glob("*.py"):  # a model's own code
        if path.name.startswith(("modeling_", "configuration_", "tokenization_")):
            shutil.copyfile(path, folder / path.name)
    notes = _config(folder / "config.json", dtype)
    if not (folder / "generation_config.json").is_file():
        _generation_config(folder)
        notes.append("the checkpoint has no generation_config.json: made one from config.json")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        notes.append("the checkpoint has no tokenizer: add one with --tokenizer FOLDER|NAME")
    return notes


def _config(path: Path, dtype: str) -> list[str]:
    """Set the type of the weights in config.json, and turn on the cache that a training turns off."""
    config = json.loads(path.read_text(encoding="utf-8"))
    # transformers 4.56 renamed torch_dtype; newer versions read the old name too.
    config["dtype" if "dtype" in config and "torch_dtype" not in config else "torch_dtype"] = dtype
    notes = []
    if config.get("use_cache") is False:
        config["use_cache"] = True
        notes.append("use_cache was off for activation checkpointing: turned on for generation")
    files.write_json(path, config)
    return notes


def _generation_config(folder: Path) -> None:
    from transformers import AutoConfig, GenerationConfig

    GenerationConfig.from_model_config(AutoConfig.from_pretrained(str(folder))).save_pretrained(str(folder))
