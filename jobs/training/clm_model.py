"""The model of `clm`: by name, or from scratch out of a configuration; and its tokenizer."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from training import dataset as reading
from training import models as loading
from training.course_arguments import TINY_MODEL
from training.errors import JobError, near_miss
from training.settings import Settings

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from training.course import Course

LONGEST_BY_DEFAULT = 1024


def settle_block_size(settings: Settings) -> None:
    """Set the block size where it is not given; raise JobError where it is longer than the model."""
    if settings["model_name_or_path"] == TINY_MODEL:
        settings.default({"block_size": settings["block_size"] or 128}, "script")
        return
    shape = configuration(settings)
    positions = getattr(shape, "max_position_embeddings", None)
    wanted = settings["block_size"]
    if wanted is None:
        longest = min(positions or LONGEST_BY_DEFAULT, LONGEST_BY_DEFAULT)
        settings.derive("block_size", longest, f"script: the model takes {positions or 'any length'}")
    elif positions and wanted > positions:
        raise JobError(
            f"--block_size {wanted} is longer than the model",
            f"{name_of(settings)!r} has {positions} positions",
            f"--block_size {positions} or less",
        )


def name_of(settings: Settings) -> str:
    """Return what the user calls the model."""
    return str(settings["model_name_or_path"] or settings["config_name"] or settings["model_type"])


def configuration(settings: Settings) -> PretrainedConfig:
    """Return the shape of the model. Raises JobError where it is not found or an override is wrong."""
    from transformers import CONFIG_MAPPING, AutoConfig

    name = settings["model_name_or_path"] or settings["config_name"]
    if name:
        try:
            shape: PretrainedConfig = AutoConfig.from_pretrained(name, **_from(settings))
        except (OSError, ValueError) as error:
            raise loading.not_found("model", name, error) from error
    else:
        kind = settings["model_type"]
        if kind not in CONFIG_MAPPING:
            raise JobError(
                f"there is no model type {kind!r}{near_miss(kind, list(CONFIG_MAPPING.keys()))}",
                "this version of transformers has none of that name",
                "--model_type gpt2, llama, qwen3 ...",
            )
        shape = CONFIG_MAPPING[kind]()
    if settings["config_overrides"]:
        override(shape, settings["config_overrides"])
    return shape


def override(shape: PretrainedConfig, text: str) -> None:
    """Set `name=value,...` on a configuration, each value of the kind that was there. Raises JobError."""
    for part in text.split(","):
        name, equals, word = (piece.strip() for piece in part.partition("="))
        known = [*shape.to_dict(), *shape.attribute_map]
        if not equals or name not in known:
            raise JobError(
                f"--config_overrides: {part!r} changes nothing{near_miss(name, known)}",
                "each part is NAME=VALUE" if not equals else f"a {shape.model_type} configuration has no {name!r}",
                "e.g. --config_overrides n_embd=1024,n_head=16,n_layer=24",
            )
        before = getattr(shape, name)
        value = _value(word)
        if isinstance(before, float) and type(value) is int:
            value = float(value)
        if before is not None and type(value) is not type(before):
            raise JobError(
                f"--config_overrides: {name}={word}",
                f"{name} is {before!r}, so a {type(before).__name__} is wanted",
                f"{name}={before}",
            )
        setattr(shape, name, value)


def _value(word: str) -> Any:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def load_tokenizer(course: Course) -> PreTrainedTokenizerBase:
    """Return the tokenizer. Raises JobError where it is not there."""
    from transformers import AutoTokenizer

    settings = course.settings
    name = settings["tokenizer_name"] or settings["model_name_or_path"]
    if name == TINY_MODEL:
        folder = reading.python_docs(course.run.cache, course.peers)[1]
        return loading.demo_tokenizer(folder, settings["vocabulary_size"], course.run, course.peers)
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, use_fast=settings["use_fast_tokenizer"], **_from(settings)
        )
    except (OSError, ValueError) as error:
        raise loading.not_found("tokenizer", name, error) from error
    if settings["append_eos"] and found.eos_token_id is None:
        raise JobError(
            f"the tokenizer of {name!r} has no end token", "--append_eos needs one", "leave --append_eos out"
        )
    return found


def make(course: Course, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return the model, with room for every token; from scratch it has the same weights on every rank."""
    import torch
    from transformers import AutoModelForCausalLM, set_seed

    settings = course.settings
    name = settings["model_name_or_path"]
    if name == TINY_MODEL:
        return loading.tiny_llama(tokenizer, settings["block_size"], course.config.seed)
    options: dict[str, Any] = {"trust_remote_code": settings["trust_remote_code"]}
    if settings["attn_implementation"]:
        options["attn_implementation"] = settings["attn_implementation"]
    word = settings["dtype"]
    options["dtype"] = word if word == "auto" else getattr(torch, word)
    shape = configuration(settings)
    set_seed(course.config.seed)
    try:
        if name:
            options.update(_from(settings), **_memory(settings))
            made: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, config=shape, **options)
        else:
            _take_marks(shape, tokenizer)
            made = AutoModelForCausalLM.from_config(shape, **options)
    except (OSError, ValueError, ImportError) as error:
        raise loading.not_found("model", name_of(settings), error) from error
    _make_room(made, tokenizer)
    return made


def _take_marks(shape: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a model from scratch the tokenizer's marks; those of its type are another vocabulary's."""
    for mark in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(shape, mark, getattr(tokenizer, mark))


def _memory(settings: Settings) -> dict[str, Any]:
    """Return what keeps a second copy out of memory while loading; transformers 5 always does so."""
    import transformers

    told = settings["low_cpu_mem_usage"] and int(transformers.__version__.split(".")[0]) < 5
    return {"low_cpu_mem_usage": True} if told else {}


def has_experts(made: PreTrainedModel) -> bool:
    """Return whether some weights may have no part in a step."""
    return any(getattr(made.config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _make_room(made: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add rows for tokens that the tokenizer has and the model has not. Under ZeRO-3 the rows are gathered first."""
    have = made.config.get_text_config().vocab_size
    if len(tokenizer) > have:
        made.resize_token_embeddings(len(tokenizer))


def _from(settings: Settings) -> dict[str, Any]:
    given = {"revision": settings["model_revision"], "token": settings["token"], "cache_dir": settings["cache_dir"]}
    return {
        "trust_remote_code": settings["trust_remote_code"],
        **{name: value for name, value in given.items() if value is not None},
    }
