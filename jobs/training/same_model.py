"""A checkpoint of another model is refused before it is loaded: DeepSpeed's own message is pages of shapes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.errors import JobError
from training.resume import Checkpoint

# What makes the shapes, in the words of Llama and its kin, GPT-2, T5.
SHAPES = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "head_dim", "n_embd", "n_layer", "n_head", "n_inner", "d_model", "num_layers", "d_ff"),
    *("num_experts", "num_local_experts"),
)


def refuse_other_model(checkpoint: Checkpoint | None, model: Any) -> None:
    """Raise JobError where the checkpoint's model and this one differ in kind or shapes; None is fine."""
    if checkpoint is None:
        return
    found = _difference(checkpoint.path, model)
    if found:
        raise JobError(
            f"the checkpoint {checkpoint.path} is of another model",
            found,
            "start the run anew in another folder, or --resume_from_checkpoint false, or give back the old model",
        )


def _difference(path: Path, model: Any) -> str | None:
    adapter = (path / "adapter_config.json").is_file()
    peft = hasattr(model, "peft_config")
    if adapter != peft:
        kinds = ("a LoRA adapter", "a whole model")
        return f"it holds {kinds[not adapter]}, this training is of {kinds[not peft]}"
    config = path / "config.json"
    if config.is_file():
        there, here = json.loads(config.read_text(encoding="utf-8")), model.config.to_dict()
        differing = [key for key in SHAPES if key in there and key in here and there[key] != here[key]]
        if differing:
            return ", ".join(f"{key} is {there[key]} there and {here[key]} here" for key in differing)
    return shapes_differ(shapes_of_files(path), shapes_of(model))


def shapes_differ(there: Mapping[str, tuple[int, ...]], here: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return the first weight that differs; only names that both have count, since transformers renames some layers."""
    for name in sorted(there.keys() & here.keys()):
        if there[name] != here[name]:
            return f"{name} is {list(there[name])} there and {list(here[name])} here"
    return None


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by its name in a file; those that ZeRO-3 has split count as whole."""
    named = ((name.replace(".default.", "."), parameter) for name, parameter in model.named_parameters())
    return {name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in named}


def shapes_of_files(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the safetensors files, from their headers alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in path.glob("*.safetensors"):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        shapes.update({name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"})
    return shapes
