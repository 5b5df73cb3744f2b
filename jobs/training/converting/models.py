"""A model built from a config and from weights that are read one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.converting.shards import Shards, Stored
from training.converting.trained import Trained
from training.errors import JobError


@dataclass(frozen=True)
class Expected:
    """The weights that a model needs: each once, and the other names of those that it uses twice."""

    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, tuple[str, ...]]
    optional: frozenset[str]  # buffers, which can be made from the config


def blank(trained: Trained, trust_remote_code: bool = False) -> Any:
    """Return the model of a config, without memory for its weights. Raises JobError if the config cannot be loaded."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(trained.model, trust_remote_code=trust_remote_code)
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise unreadable("config", trained.model, error) from error
    return model


def expected(model: Any) -> Expected:
    """Return the names and shapes of a model's weights."""
    tied = tied_names(model)
    shapes: dict[str, tuple[int, ...]] = {}
    aliases: dict[str, list[str]] = {}
    for name, value in model.state_dict().items():
        if name in tied:
            aliases.setdefault(tied[name], []).append(name)
        else:
            shapes[name] = tuple(value.shape)
    buffers = frozenset(name for name, _ in model.named_buffers())
    return Expected(shapes, {name: tuple(others) for name, others in aliases.items()}, buffers)


def tied_names(model: Any) -> dict[str, str]:
    """Return the weights that are another weight, by name: an output head that is the input embedding."""
    known = getattr(model, "all_tied_weights_keys", None)  # transformers 5
    if known is not None:
        return dict(known)
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return {}
    source = _name_of(model, model.get_input_embeddings())
    target = _name_of(model, model.get_output_embeddings())
    return {f"{target}.weight": f"{source}.weight"} if source and target else {}


def _name_of(model: Any, module: Any) -> str | None:
    return next((name for name, each in model.named_modules() if each is module), None) if module is not None else None


def match(wanted: Expected, shards: Shards, where: str) -> dict[str, Stored]:
    """Return the stored weight for each that the model needs. Raises JobError if they do not fit together."""
    found = {}
    for name in wanted.shapes:
        names = (name, *wanted.aliases.get(name, ()))
        stored = next((shards.weights[each] for each in names if each in shards.weights), None)
        if stored is not None:
            found[name] = stored
    known = {*wanted.shapes, *(name for names in wanted.aliases.values() for name in names)}
    missing = [name for name in wanted.shapes if name not in found and name not in wanted.optional]
    strange = [name for name in shards.weights if name not in known and not name.endswith("inv_freq")]
    named = ((missing, "weights are missing"), (strange, "do not belong to it"))
    faults = [f"{len(names)} {word}, such as {names[0]}" for names, word in named if names]
    for name, stored in found.items():
        if not faults and stored.shape != wanted.shapes[name]:
            faults.append(f"{name} has shape {_shape(stored.shape)}, and {_shape(wanted.shapes[name])} by the config")
    if faults:
        raise JobError(
            f"{where} is not a checkpoint of the model that config.json describes",
            "; ".join(faults),
            "--config FOLDER|NAME of the model that was trained",
        )
    return found


def filled(model: Any, weights: Mapping[str, Stored], dtype: Any, device: str = "cpu") -> Any:
    """Return the blank model with its weights in `dtype` on a device, ready to answer."""
    from accelerate.utils import set_module_tensor_to_device

    for name, stored in weights.items():
        tensor = stored.read()
        wanted = dtype if tensor.is_floating_point() else None
        set_module_tensor_to_device(model, name, device, value=tensor, dtype=wanted, clear_cache=False)
    model.tie_weights()
    return model.to(device).eval()


def dtype_name(config: Any) -> str:
    """Return the type of the weights that a config names."""
    return str(getattr(config, "dtype", None) or "float32").replace("torch.", "")


def torch_type(name: str) -> Any:
    import torch

    return getattr(torch, name)


def unreadable(part: str, name: str, error: Exception) -> JobError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return JobError(
        f"cannot load the {part} of {name!r}",
        lines[0] if lines else type(error).__name__,
        "name another one if it is incomplete" if Path(name).is_dir() else "check the name, or give a folder",
    )


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a single number"
