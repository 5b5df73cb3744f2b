"""The choices of one training: settled before its process group, said before its first step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from training.choices import caches, choices
from training.choices.choices import Choice
from training.choices.machine import Machine, look, prebuilt_operators
from training.processes import Processes
from training.settings import Settings


def settle(settings: Settings, peers: Processes) -> None:
    """Fill in what is open, where something quicker changes no result; point the caches of compilers.

    To be called once the arguments are read, before anything that compiles is imported.
    """
    for warning in caches.point(os.environ):
        if peers.first:
            print(f"warning: {warning}", flush=True)
    machine = look(os.environ, peers.world_size, peers.local_world_size, memory=False)
    if "attn_implementation" in settings.values:
        given = settings.given("attn_implementation")
        found = choices.attention(machine, settings.values, given)
        if not given and settings.get("attn_implementation") is None and found.value != "sdpa":
            settings.default({"attn_implementation": found.value}, f"script: {found.why}")
    if machine.torch >= (2, 4) and str(getattr(settings.get("optim"), "value", "")) == "adamw_torch":
        settings.default({"optim": "adamw_torch_fused"}, "script: one kernel, the same numbers")
    if machine.gpu and machine.cores_per_process >= choices.MANY_CORES:
        settings.default({"dataloader_num_workers": 2}, "script: a GPU, and cores to spare")


def report(settings: Settings, model: Any, peers: Processes, more: Iterable[Choice] = ()) -> list[Choice]:
    """Return each choice with its reason; rank 0 prints them, and below them what would be faster."""
    machine = look(os.environ, peers.world_size, peers.local_world_size)
    found = [*_all(machine, settings, model), *more]
    if peers.first:
        print("choices", *(f"  {choice}" for choice in found), sep="\n")
        for choice in found:
            if choice.faster:
                print(f"warning: {choice.name} is {choice.value}; faster: {choice.faster}")
        print(end="", flush=True)
    return found


def _all(machine: Machine, settings: Settings, model: Any) -> list[Choice]:
    values = settings.values
    asked = {**values, "attn_implementation": getattr(model.config, "_attn_implementation", None)}
    found = [
        choices.attention(machine, asked, settings.given("attn_implementation")),
        choices.precision(machine, values),
        choices.optimizer(values, _deepspeed(values)),
        choices.liger(machine, values),
        choices.compilation(machine, values),
        choices.packing(machine, values),
        choices.checkpointing(machine, values, activation_bytes(model.config, values)),
        choices.workers(machine, values),
        choices.transport(machine),
        choices.compiled(os.environ, prebuilt_operators()),
    ]
    return [choice for choice in found if choice is not None]


def _deepspeed(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    import json

    path = values.get("deepspeed")
    found: Mapping[str, Any] | None = json.loads(Path(path).read_text(encoding="utf-8")) if path else None
    return found


def activation_bytes(config: Any, values: Mapping[str, Any]) -> int | None:
    """Return about what the activations of a micro batch take, kept; None where the shape is not known.

    34 bytes per token, layer and hidden unit in half precision without the attention matrix, twice that in float32.
    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, equation 2.
    """
    length = values.get("max_length") or values.get("block_size")
    layers, width = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    if not (length and layers and width):
        return None
    size = 34 if values.get("bf16") or values.get("fp16") else 68
    return int(values["per_device_train_batch_size"]) * int(length) * int(layers) * int(width) * size
