"""The model and the tokenizer of clm: weights to continue from, or a model from scratch out of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from training import models
from training.errors import JobError, near_miss

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from training.clm_arguments import ModelArguments


def load_tokenizer(model_args: ModelArguments, append_eos: bool) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `--tokenizer_name`, else the model's. Raises JobError without the end token it needs."""
    name = model_args.tokenizer_name or model_args.model_name_or_path or ""
    tokenizer = models.load_tokenizer(name, use_fast=model_args.use_fast_tokenizer, **hub_options(model_args))
    if append_eos and tokenizer.eos_token_id is None:
        raise JobError(
            f"the tokenizer of {name!r} has no end token",
            "--append_eos puts an end token after each document",
            "remove --append_eos",
        )
    return tokenizer


def configuration(model_args: ModelArguments) -> PretrainedConfig:
    """Return the model's configuration. Raises JobError if it is not found or an override is wrong."""
    from transformers import CONFIG_MAPPING

    name, kind = model_args.model_name_or_path or model_args.config_name, model_args.model_type
    if name:
        shape = models.configuration(name, **hub_options(model_args))
    elif kind in CONFIG_MAPPING:
        shape = CONFIG_MAPPING[kind]()
    else:
        raise JobError(
            f"there is no model type {kind!r}{near_miss(str(kind), CONFIG_MAPPING.keys())}",
            "this version of transformers does not support that type",
            "--model_type gpt2, llama, qwen3 ...",
        )
    if model_args.config_overrides:
        try:
            shape.update_from_string(model_args.config_overrides)
        except (ValueError, TypeError) as error:
            fix = "for example --config_overrides n_embd=1024,n_head=16,n_layer=24"
            raise JobError(f"cannot apply --config_overrides {model_args.config_overrides}", str(error), fix) from error
    return shape


def load(model_args: ModelArguments, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """Return the model, with room for every token; from scratch it has the same weights on every rank."""
    import torch
    from transformers import AutoModelForCausalLM, set_seed

    name, dtype = model_args.model_name_or_path, str(model_args.dtype)
    options: dict[str, Any] = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype)}
    if model_args.attn_implementation:
        options["attn_implementation"] = model_args.attn_implementation
    shape = configuration(model_args)
    set_seed(seed)
    try:
        if name:
            options.update(hub_options(model_args))
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, config=shape, **options)
        else:
            options["trust_remote_code"] = model_args.trust_remote_code
            for mark in ("bos_token_id", "eos_token_id", "pad_token_id"):  # the type's own are of another vocabulary
                setattr(shape, mark, getattr(tokenizer, mark))
            model = AutoModelForCausalLM.from_config(shape, **options)
    except (OSError, ValueError, ImportError) as error:
        raise models.not_loaded("model", name or models.name_of(shape), error) from error
    if len(tokenizer) > model.config.get_text_config().vocab_size:
        model.resize_token_embeddings(len(tokenizer))
    return model


def hub_options(model_args: ModelArguments) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that say where and how to download."""
    given = {"revision": model_args.model_revision, "token": model_args.token, "cache_dir": model_args.cache_dir}
    options = {name: value for name, value in given.items() if value is not None}
    return {"trust_remote_code": model_args.trust_remote_code, **options}
