"""Models and tokenizers of the hub or of a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.errors import JobError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from trl import ModelConfig, SFTConfig

OFFLINE = ("1", "true", "yes", "on")


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in OFFLINE


def name_of(config: PretrainedConfig) -> str:
    """Return the name or folder from which a model was made; its type if it was made from scratch."""
    return str(config.name_or_path or config.model_type)


def load_tokenizer(name: str, **options: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer; `options` are those of `from_pretrained`. Raises JobError if it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise not_loaded("tokenizer", name, error) from error
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str, template: str | None, needs_template: bool) -> None:
    """Raise JobError if the chat template is missing, or the tokenizer cannot end a sequence.

    `template`: a name or file, which replaces the tokenizer's own.
    """
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
            "add an eos_token to the model's tokenizer_config.json",
        )


def configuration(name: str, **options: Any) -> PretrainedConfig:
    """Return the model's configuration; `options` are those of `from_pretrained`. Raises JobError if there is none."""
    from transformers import AutoConfig

    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise not_loaded("model", name, error) from error
    return found


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


def hub_options(model_args: ModelConfig, training_args: SFTConfig) -> dict[str, Any]:
    """Return TRL's arguments of `from_pretrained` that say what to download; TRL 1 moved trust_remote_code."""
    trusted = getattr(training_args, "trust_remote_code", None) or getattr(model_args, "trust_remote_code", None)
    return {"revision": model_args.model_revision, "trust_remote_code": bool(trusted)}


def loading_options(model_args: ModelConfig, training_args: SFTConfig) -> dict[str, Any]:
    """Return the arguments with which TRL is to load the model; those that the user has given come last."""
    dtype = "dtype" if hasattr(model_args, "dtype") else "torch_dtype"  # renamed by transformers 4.56
    options = {**hub_options(model_args, training_args), dtype: getattr(model_args, dtype)}
    if model_args.attn_implementation is not None:
        options["attn_implementation"] = model_args.attn_implementation
    return {**options, **(training_args.model_init_kwargs or {})}


def has_experts(config: PretrainedConfig) -> bool:
    """Return whether some weights may have no part in a step."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any(getattr(config.get_text_config(), name, None) for name in names)


def parameters(model: PreTrainedModel) -> int:
    """Return the count of weights; under ZeRO-3 a rank has a part, and `ds_numel` is the whole."""
    return sum(getattr(weight, "ds_numel", weight.numel()) for weight in model.parameters())


def not_loaded(part: str, name: str, error: Exception) -> JobError:
    """Return the error of a model or tokenizer that cannot be loaded, with the first line of the library's."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return JobError(
        f"cannot load the {part} of {name!r}",
        lines[0] if lines else type(error).__name__,
        "fix the problem named above; if it was not found: runner prefetch JOB (HF_HUB_OFFLINE is set), or give a path"
        if is_offline() and not name.startswith((".", "/"))
        else f"fix the problem named above; if the {part} was not found, check its name, or give another path",
    )
