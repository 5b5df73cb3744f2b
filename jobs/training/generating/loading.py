"""A trained model in memory, whichever form it was saved in."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from training.converting import adapters, models
from training.converting.shards import open_shards
from training.converting.trained import Trained
from training.errors import JobError


def load_model(trained: Trained, dtype: str, device: str, trust_remote_code: bool = False) -> Any:
    """Return the model on the device, ready to answer; `auto` is the type that the config names."""
    shards = open_shards(trained.kind, Path(trained.weights)) if trained.sharded else None
    if shards:
        print(f"generate: {shards.what}, {len(shards.weights)} weights", file=sys.stderr, flush=True)
    if trained.adapter:
        return adapters.with_adapter(trained, shards, dtype).to(device)
    if shards:
        model = models.blank(trained, trust_remote_code)
        weights = models.match(models.expected(model), shards, trained.weights)
        name = models.dtype_name(model.config) if dtype == "auto" else dtype
        return models.filled(model, weights, models.torch_type(name), device)
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(trained.weights, trust_remote_code=trust_remote_code, dtype=dtype)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise models.unreadable("model", trained.weights, error) from error
    return model.to(device).eval()


def load_tokenizer(trained: Trained, named: str | None, trust_remote_code: bool = False) -> Any:
    from transformers import AutoTokenizer

    name = named or trained.model
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if trained.adapter and named is None:
            return load_tokenizer(trained, adapters.base_name(trained), trust_remote_code)
        failed = models.unreadable("tokenizer", name, error)
        raise JobError(failed.what, failed.why, "--tokenizer FOLDER|NAME of the one it was trained with") from error


def choose_device(wanted: str | None, dtype: str) -> str:
    """Return the device: a GPU where there is one. Raises JobError for one that is not there or has not the type."""
    import torch

    device = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise JobError(f"there is no device {device!r}", str(error).splitlines()[0], "cpu, cuda or cuda:1") from error
    count = torch.cuda.device_count()
    if parsed.type == "cuda" and (parsed.index or 0) >= count:
        why = f"this process sees {count} GPUs" if count else "this process sees no GPU"
        raise JobError(f"there is no device {device!r}", why, "leave --device out, or name one of them")
    if parsed.type == "cuda" and dtype == "bfloat16" and not torch.cuda.is_bf16_supported():
        raise JobError("this GPU has no bf16", torch.cuda.get_device_name(parsed), "--dtype float16")
    return device
