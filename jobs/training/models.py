"""Models and tokenizers: by name, or from scratch out of a configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.errors import JobError, near_miss
from training.settings import Settings

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

OFFLINE = ("1", "true", "yes", "on")


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in OFFLINE


def name_of(settings: Settings) -> str:
    """Return the name that the user gave the model."""
    return str(settings.get("model_name_or_path") or settings.get("config_name") or settings.get("model_type"))


def load_tokenizer(settings: Settings) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `--tokenizer_name`, else the model's. Raises JobError if it cannot be loaded."""
    from transformers import AutoTokenizer

    name = settings.get("tokenizer_name") or settings["model_name_or_path"]
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, use_fast=settings.get("use_fast_tokenizer", True), **_hub_arguments(settings)
        )
    except (OSError, ValueError) as error:
        raise not_loaded("tokenizer", str(name), error) from error
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, settings: Settings, needs_template: bool) -> None:
    """Raise JobError if the chat template is missing, or the tokenizer cannot end a sequence."""
    name, template = settings["model_name_or_path"], settings.get("chat_template_path")
    if template and template.endswith(".jinja") and not Path(template).is_file():
        raise JobError(
            f"there is no chat template {template!r}",
            "the file must be visible in the container",
            "check the name, and mount the file's folder",
        )
    if needs_template and not tokenizer.chat_template and not template:
        raise JobError(
            f"the tokenizer of {name!r} has no chat template",
            "the dataset contains conversations, and only a chat template can turn them into text",
            "--chat_template_path FILE.jinja, or --chat_template_path NAME of an instruct model",
        )
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise JobError(
            f"the tokenizer of {name!r} has neither a padding nor an end token",
            "batches need a padding token, and answers need an end token",
            "give --eos_token TOKEN with a token from the tokenizer's vocabulary",
        )


def configuration(settings: Settings) -> PretrainedConfig:
    """Return the model's configuration. Raises JobError if it is not found or an override is wrong."""
    from transformers import CONFIG_MAPPING, AutoConfig

    name = settings.get("model_name_or_path") or settings.get("config_name")
    if name:
        try:
            shape: PretrainedConfig = AutoConfig.from_pretrained(name, **_hub_arguments(settings))
        except (OSError, ValueError) as error:
            raise not_loaded("model", name, error) from error
    else:
        kind = settings["model_type"]
        if kind not in CONFIG_MAPPING:
            raise JobError(
                f"there is no model type {kind!r}{near_miss(kind, CONFIG_MAPPING.keys())}",
                "this version of transformers does not support that type",
                "--model_type gpt2, llama, qwen3 ...",
            )
        shape = CONFIG_MAPPING[kind]()
    if settings.get("config_overrides"):
        try:
            shape.update_from_string(settings["config_overrides"])
        except (ValueError, TypeError) as error:
            fix = "for example --config_overrides n_embd=1024,n_head=16,n_layer=24"
            raise JobError(
                f"cannot apply --config_overrides {settings['config_overrides']}", str(error), fix
            ) from error
    return shape


def positions_of(shape: PretrainedConfig) -> int | None:
    return getattr(shape, "max_position_embeddings", None)


def check_length(flag: str, length: int | None, shape: PretrainedConfig, name: str) -> None:
    """Raise JobError for sequences longer than the model has positions for."""
    positions = positions_of(shape)
    if positions and length and length > positions:
        raise JobError(
            f"{flag} {length} is more than the model supports",
            f"{name!r} has {positions} positions",
            f"{flag} {positions} or less",
        )


def load(settings: Settings, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """Return the model of clm, with room for every token; from scratch it has the same weights on every rank."""
    import torch
    from transformers import AutoModelForCausalLM, set_seed

    name, word = settings["model_name_or_path"], settings["dtype"]
    options: dict[str, Any] = {"trust_remote_code": settings["trust_remote_code"]}
    if settings["attn_implementation"]:
        options["attn_implementation"] = settings["attn_implementation"]
    options["dtype"] = word if word == "auto" else getattr(torch, word)
    shape = configuration(settings)
    set_seed(seed)
    try:
        if name:
            options.update(_hub_arguments(settings))
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, config=shape, **options)
        else:
            for mark in ("bos_token_id", "eos_token_id", "pad_token_id"):  # the type's own are of another vocabulary
                setattr(shape, mark, getattr(tokenizer, mark))
            model = AutoModelForCausalLM.from_config(shape, **options)
    except (OSError, ValueError, ImportError) as error:
        raise not_loaded("model", name_of(settings), error) from error
    if len(tokenizer) > model.config.get_text_config().vocab_size:
        model.resize_token_embeddings(len(tokenizer))
    return model


def loading_options(settings: Settings) -> dict[str, Any]:
    """Return the arguments with which TRL is to load the model."""
    dtype = "dtype" if "dtype" in settings.values else "torch_dtype"  # renamed by transformers 4.56
    given = {"revision": settings.get("model_revision"), "attn_implementation": settings.get("attn_implementation")}
    given[dtype] = settings.get(dtype)
    return {key: value for key, value in given.items() if value is not None}


def has_experts(model: PreTrainedModel) -> bool:
    """Return whether some weights may have no part in a step."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any(getattr(model.config.get_text_config(), name, None) for name in names)


def parameters(model: PreTrainedModel) -> int:
    """Return the count of weights; under ZeRO-3 a rank has a part, and `ds_numel` is the whole."""
    return sum(getattr(weight, "ds_numel", weight.numel()) for weight in model.parameters())


def not_loaded(part: str, name: str, error: Exception) -> JobError:
    """Return the error of a model or tokenizer that cannot be loaded, with the first line of the library's."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return JobError(
        f"cannot load the {part} of {name!r}",
        lines[0] if lines else type(error).__name__,
        "HF_HUB_OFFLINE=1 is set: run `runner prefetch` first, or give the path of a folder inside the container"
        if is_offline() and not name.startswith((".", "/"))
        else "check the name on the hub, or give the path of a folder inside the container",
    )


def _hub_arguments(settings: Settings) -> dict[str, Any]:
    given = {"revision": settings.get("model_revision"), "token": settings.get("token")}
    given["cache_dir"] = settings.get("cache_dir")
    return {
        "trust_remote_code": bool(settings.get("trust_remote_code")),
        **{name: value for name, value in given.items() if value is not None},
    }
