"""A trained model answers."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from training.converting.trained import Trained
from training.errors import JobError
from training.generating import loading
from training.generating.prompts import Prompt, read_file


def answer(trained: Trained, arguments: argparse.Namespace) -> None:
    """Load the model and print the answer to each prompt as it is written, or with --json an object for each."""
    import torch
    from transformers import TextStreamer, set_seed
    from transformers.utils import logging

    prompts = asked(arguments)
    device = loading.choose_device(arguments.device, arguments.dtype)
    logging.disable_progress_bar()
    for note in trained.notes:
        print(f"generate: {note}", file=sys.stderr)
    tokenizer = loading.load_tokenizer(trained, arguments.tokenizer, arguments.trust_remote_code)
    inputs = [encode(tokenizer, prompt, arguments) for prompt in prompts]
    model = loading.load_model(trained, arguments.dtype, device, arguments.trust_remote_code)
    fit(inputs, prompts, model.config, arguments.max_new_tokens)
    print(f"generate: {trained} on {device}, {model.dtype}", file=sys.stderr, flush=True)
    settings = sampling(arguments)
    for prompt, tokens in zip(prompts, inputs, strict=True):
        set_seed(arguments.seed)
        tokens = tokens.to(device)
        print(f"> {prompt.shown}", file=sys.stderr, flush=True)
        streamer = None if arguments.json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        started = time.monotonic()
        with torch.inference_mode():
            output = model.generate(**tokens, **settings, pad_token_id=_padding(tokenizer), streamer=streamer)
        new = output[0, tokens["input_ids"].shape[1] :]
        seconds = time.monotonic() - started
        if arguments.json:
            text = tokenizer.decode(new, skip_special_tokens=True)
            print(json.dumps({"prompt": prompt.shown, "answer": text, "tokens": len(new)}), flush=True)
        print(f"{len(new)} tokens in {seconds:.1f} s", file=sys.stderr, flush=True)


def asked(arguments: argparse.Namespace) -> list[Prompt]:
    """Return the prompts of the command line, then those of the file; the default one where there are none."""
    check(arguments)
    prompts = [Prompt(text) for text in arguments.prompt or ()]
    if any(not prompt.text.strip() for prompt in prompts):
        raise JobError("a prompt is empty", "--prompt '' asks nothing", "give it a word to go on from")
    prompts += read_file(arguments.prompts_file) if arguments.prompts_file else []
    return prompts or [Prompt(arguments.default_prompt)]


def check(arguments: argparse.Namespace) -> None:
    """Raise JobError for numbers that generate would refuse after the model has been loaded."""
    limits = {
        "max_new_tokens": (arguments.max_new_tokens >= 1, "1 or more"),
        "temperature": (arguments.temperature >= 0, "0 (always the likeliest token) or more"),
        "top_p": (0 < arguments.top_p <= 1, "more than 0, at most 1"),
        "top_k": (arguments.top_k >= 0, "0 (all tokens) or more"),
        "repetition_penalty": (arguments.repetition_penalty > 0, "more than 0; 1 is none"),
    }
    for name, (right, what) in limits.items():
        if not right:
            raise JobError(f"--{name} {getattr(arguments, name)} cannot be", f"it is {what}", f"--{name} VALUE: {what}")


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `generate`; what only sampling reads is left out without it, since transformers warns."""
    common = {
        "max_new_tokens": arguments.max_new_tokens,
        "repetition_penalty": arguments.repetition_penalty,
        "use_cache": True,  # a training with activation checkpointing leaves it off in the config
    }
    if arguments.temperature <= 0:
        return {**common, "do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    drawn = {"temperature": arguments.temperature, "top_p": arguments.top_p, "top_k": arguments.top_k}
    return {**common, "do_sample": True, **drawn}


def encode(tokenizer: Any, prompt: Prompt, arguments: argparse.Namespace) -> Any:
    """Return input_ids and attention_mask: int64 (1, tokens)."""
    templated = bool(tokenizer.chat_template) and not arguments.plain
    if prompt.messages and not templated:
        raise JobError(
            "a conversation cannot be asked",
            "--plain is given" if arguments.plain else "the tokenizer has no chat template",
            "prompts as plain text",
        )
    if not templated:
        encoded = tokenizer(prompt.text, return_tensors="pt")
    else:
        said = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
        if arguments.system and said[0]["role"] != "system":
            said = [{"role": "system", "content": arguments.system}, *said]
        encoded = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    encoded.pop("token_type_ids", None)  # some tokenizers give it, no causal model takes it
    if encoded["input_ids"].shape[1] == 0:
        raise JobError("a prompt is empty", "the tokenizer makes no token of it", "give it a word to go on from")
    return encoded


def fit(inputs: Sequence[Any], prompts: Sequence[Prompt], config: Any, new_tokens: int) -> None:
    """Raise JobError where a prompt and its answer are longer than the model, or words are not in its vocabulary."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None)
    for prompt, tokens in zip(prompts, inputs, strict=True):
        length = tokens["input_ids"].shape[1]
        if positions and length + new_tokens > positions:
            raise JobError(
                f"the prompt {prompt.shown[:40]!r} and its answer are longer than the model",
                f"{length} + {new_tokens} tokens; the model has {positions} positions",
                f"--max_new_tokens {positions - length} or less" if length < positions else "a shorter prompt",
            )
        largest = int(tokens["input_ids"].max())
        if largest >= text.vocab_size:
            raise JobError(
                "the tokenizer is not the model's",
                f"it gives token {largest}, the model has {text.vocab_size}",
                "--tokenizer FOLDER|NAME of the one it was trained with",
            )


def _padding(tokenizer: Any) -> int | None:
    found: int | None = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return found
