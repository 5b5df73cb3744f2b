"""Models and tokenizers: one small enough for a laptop, made on the spot, or by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.errors import JobError
from training.processes import Processes, once
from training.run import RunFolder
from training.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def tiny_llama(tokenizer: PreTrainedTokenizerBase, length: int, seed: int) -> PreTrainedModel:
    """Return a Llama of about 3 million parameters with fresh weights, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=max(length, 512),
        tie_word_embeddings=False,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def demo_tokenizer(folder: Path, vocabulary: int, run: RunFolder, peers: Processes) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the tiny model; rank 0 trains it on the documentation in `folder`."""
    from transformers import AutoTokenizer

    from training import demo as corpus
    from training import demo_tokenizer as tokenizer

    path = once(peers, lambda: tokenizer.build(run.cache, corpus.texts(folder), folder.name, vocabulary))
    made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path))
    return made


def parameters(model: PreTrainedModel) -> int:
    """Return the count of weights; under ZeRO-3 a rank holds a part, and DeepSpeed knows the whole as `ds_numel`."""
    return sum(getattr(weight, "ds_numel", weight.numel()) for weight in model.parameters())


def load_tokenizer(name: str, settings: Settings, kind: str) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer. Raises JobError where it is not there, or has no template for conversations."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, revision=settings.get("model_revision"), trust_remote_code=bool(settings.get("trust_remote_code"))
        )
    except (OSError, ValueError) as error:
        raise not_found("tokenizer", name, error) from error
    if kind == "messages" and not tokenizer.chat_template and not settings.get("chat_template_path"):
        raise JobError(
            f"the tokenizer of {name!r} has no chat template",
            "the dataset holds conversations, and nothing says how to write one as text",
            "--chat_template_path FILE.jinja or an instruct model's name",
        )
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise JobError(
            f"the tokenizer of {name!r} has neither a padding nor an end token",
            "batches need the one, and answers the other",
            "--eos_token TOKEN, one of its vocabulary",
        )
    return tokenizer


def prepare_loading(name: str, settings: Settings, config: Any) -> None:
    """Tell TRL how to load the model; refuse sequences that it has no positions for."""
    from transformers import AutoConfig

    remote_code = bool(settings.get("trust_remote_code"))
    try:
        shape = AutoConfig.from_pretrained(name, revision=settings.get("model_revision"), trust_remote_code=remote_code)
    except (OSError, ValueError) as error:
        raise not_found("model", name, error) from error
    positions = getattr(shape, "max_position_embeddings", None)
    if positions and config.max_length and config.max_length > positions:
        raise JobError(
            f"--max_length {config.max_length} is longer than the model",
            f"{name!r} has {positions} positions",
            f"--max_length {positions} or less",
        )
    loading: dict[str, Any] = {
        "revision": settings.get("model_revision"),
        "attn_implementation": settings.get("attn_implementation"),
    }
    # transformers 4.56 renamed torch_dtype.
    dtype_name = "dtype" if "dtype" in settings.values else "torch_dtype"
    loading[dtype_name] = settings.get(dtype_name)
    given = {key: value for key, value in loading.items() if value is not None}
    config.model_init_kwargs = {**given, **(config.model_init_kwargs or {})}


def not_found(part: str, name: str, error: Exception) -> JobError:
    """Return the error of a model or tokenizer that cannot be loaded, with what the library says of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    offline = os.environ.get("HF_HUB_OFFLINE") == "1"
    return JobError(
        f"cannot load the {part} of {name!r}",
        lines[0] if lines else type(error).__name__,
        "HF_HUB_OFFLINE=1 is set: bring it into the cache first, or name a folder that the container sees"
        if offline
        else "check the name on the hub, or give a folder as the container sees it",
    )
