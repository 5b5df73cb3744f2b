"""Load a checkpoint in any form as a model of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training.converting.shards import Shards, open_shards
from training.converting.trained import ZERO, Trained
from training.errors import JobError
from training.models import not_loaded


def load(trained: Trained, dtype: str, device: str = "cpu", trust_remote_code: bool = False) -> tuple[Any, str]:
    """Return the model, ready to answer, and what its weights came from; an adapter is on its base, not merged.

    `dtype` is float32, bfloat16, float16 or auto: the type in the model's config.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    shards = open_shards(Path(trained.weights)) if trained.kind == ZERO else None
    what = shards.what if shards else "as saved"
    if trained.adapter:
        what = f"on {base_name(trained)}"
    try:
        if shards:
            model = _filled(trained, shards, dtype, trust_remote_code)
        else:
            kind: Any = AutoModelForCausalLM
            if trained.adapter:
                import peft

                kind = peft.AutoPeftModelForCausalLM
            model = kind.from_pretrained(trained.weights, trust_remote_code=trust_remote_code, dtype=dtype)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise not_loaded("model", trained.weights, error) from error
    return model.to(device).eval(), what


def base_name(trained: Trained) -> str:
    """Return the model that an adapter was trained on. Raises JobError if it is not named, or its folder is missing."""
    path = Path(trained.model) / "adapter_config.json"
    name = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not name or (Path(name).is_absolute() and not Path(name).is_dir()):
        raise JobError(
            f"the adapter's base model {name!r} is missing",
            f"{path} does not name an existing folder of the base model",
            "save or mount the base model, and write its path into adapter_config.json",
        )
    return str(name)


def dtype_name(trained: Trained, trust_remote_code: bool = False) -> str:
    """Return the type of the weights that the config names; that of an adapter's base model."""
    from transformers import AutoConfig

    name = base_name(trained) if trained.adapter else trained.model
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise not_loaded("config", name, error) from error
    return str(getattr(config, "dtype", None) or "float32").replace("torch.", "")


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise not_loaded("tokenizer", name, error) from error


def _filled(trained: Trained, shards: Shards, dtype: str, trust_remote_code: bool) -> Any:
    """Return the model of a config with the weights of the shards. Raises JobError if they do not fit together."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(trained.model, trust_remote_code=trust_remote_code)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    wanted = getattr(torch, dtype_name(trained, trust_remote_code) if dtype == "auto" else dtype)
    known, weights = model.state_dict().keys(), {}
    strange = [name for name in shards.weights if name not in known and not name.endswith("inv_freq")]
    for name in shards.weights.keys() & known:
        tensor = shards.weights[name]()
        weights[name] = tensor.to(wanted) if tensor.is_floating_point() else tensor
    try:
        model.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:  # shapes
        raise _of_another_model(trained, str(error).splitlines()[-1].strip()) from error
    model.tie_weights()
    missing = [name for name, value in model.state_dict().items() if value.is_meta]
    for names, fault in ((missing, "are missing"), (strange, "do not belong to the model")):
        if names:
            raise _of_another_model(trained, f"{len(names)} weights {fault}, such as {names[0]}")
    return model


def _of_another_model(trained: Trained, why: str) -> JobError:
    what = f"{trained.weights} is not a checkpoint of the model that config.json describes"
    return JobError(what, why, "give the configuration of the trained model: --config FOLDER|NAME")
