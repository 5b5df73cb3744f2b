"""Whether a checkpoint is of the model that is to be trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from training.errors import JobError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Keys of a configuration that decide shapes, in the words of Llama and its kin, GPT-2 and T5.
SHAPES = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "head_dim", "n_embd", "n_layer", "n_head", "n_inner", "d_model", "num_layers", "d_ff"),
    *("num_experts", "num_local_experts"),
)


def check(checkpoint: Path, model: PreTrainedModel) -> None:
    """Raise JobError if the checkpoint is of another model; DeepSpeed's own message is pages of shapes."""
    found = _difference(checkpoint, model)
    if found:
        raise JobError(
            f"the checkpoint {checkpoint} belongs to another model",
            found,
            "use the checkpoint's model, start a new run, or train from step 0: --resume_from_checkpoint false",
        )


def _difference(path: Path, model: PreTrainedModel) -> str | None:
    adapter = (path / "adapter_config.json").is_file()
    if adapter != hasattr(model, "peft_config"):
        kinds = ("a LoRA adapter", "a whole model")
        return f"the checkpoint has {kinds[not adapter]}, but this run trains {kinds[adapter]}"
    if (path / "config.json").is_file():
        there = json.loads((path / "config.json").read_text(encoding="utf-8"))
        here = model.config.to_dict()
        differing = [key for key in SHAPES if key in there and key in here and there[key] != here[key]]
        if differing:
            return ", ".join(
                f"{key} is {there[key]} in the checkpoint, but {here[key]} in this run" for key in differing
            )
    saved = shapes_of_files(path)
    for name, parameter in model.named_parameters():
        name = name.replace(".default.", ".")
        shape = list(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 keeps the whole shape here
        if list(saved.get(name, shape)) != shape:
            return f"{name} has the shape {list(saved[name])} in the checkpoint, but {shape} in this run"
    return None


def shapes_of_files(path: Path) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of each tensor of the safetensors files, from their headers."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names = opened.keys()
            shapes.update({name: tuple(opened.get_slice(name).get_shape()) for name in names})
    return shapes
