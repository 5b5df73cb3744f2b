"""A LoRA adapter on its base model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training.converting.shards import Shards
from training.converting.trained import Trained
from training.errors import JobError
from training.models import not_loaded


def base_name(trained: Trained) -> str:
    """Return the model that an adapter was trained on. Raises JobError if it is not named, or its folder is missing."""
    path = Path(trained.model) / "adapter_config.json"
    name = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not name or (Path(name).is_absolute() and not Path(name).is_dir()):
        raise JobError(
            f"the adapter's base model {name!r} is missing",
            f"{path} names this model, but it is not visible to this process",
            "save or mount the base model, and write its path into adapter_config.json",
        )
    return str(name)


def with_adapter(trained: Trained, shards: Shards | None, dtype: str) -> Any:
    """Return the base model with the adapter on it, with the weights of the shards if there are any."""
    from peft import PeftConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    base = base_name(trained)
    try:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise not_loaded("base model", base, error) from error
    if shards is None:
        return PeftModel.from_pretrained(model, trained.weights)
    _fit_vocabulary(model, shards)
    config = PeftConfig.from_pretrained(trained.model)
    config.inference_mode = True
    wrapped = get_peft_model(model, config)
    own = {name: value for name, value in wrapped.named_parameters() if _is_of_adapter(name)}
    missing = [name for name in own if name not in shards.weights]
    if missing:
        raise JobError(
            f"{trained.weights} is not a checkpoint of this adapter",
            f"{len(missing)} of the adapter's {len(own)} weights are missing, for example {missing[0]}",
            "give the checkpoint that was saved together with this adapter_config.json",
        )
    for name, value in own.items():
        value.data.copy_(shards.weights[name]())
    return wrapped


def _is_of_adapter(name: str) -> bool:
    return any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens"))


def _fit_vocabulary(model: Any, shards: Shards) -> None:
    """Widen the embedding where the training has added tokens: the adapter then brings the new rows."""
    rows = [len(read()) for name, read in shards.weights.items() if "embed_tokens.modules_to_save" in name]
    if rows and rows[0] != model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows[0])
