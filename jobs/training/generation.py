"""Answers of a trained model to prompts: of the command line, or of a file."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.converting import models
from training.converting.trained import Trained
from training.errors import JobError


@dataclass(frozen=True)
class Prompt:
    """A text; in a conversation, that of its last turn, which is the user's."""

    text: str
    messages: tuple[dict[str, Any], ...] = ()


def answer(trained: Trained, arguments: argparse.Namespace) -> None:
    """Load the model and print the answer to each prompt as it is written, or with --json an object for each."""
    import torch
    from transformers import TextStreamer, set_seed
    from transformers.utils import logging

    prompts = [Prompt(text) for text in arguments.prompt or ()]
    prompts += read_file(arguments.prompts_file) if arguments.prompts_file else []
    prompts = prompts or [Prompt(arguments.default_prompt)]
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    logging.disable_progress_bar()
    for note in trained.notes:
        print(f"generate: {note}", file=sys.stderr)
    tokenizer = load_tokenizer(trained, arguments)
    inputs = [encode(tokenizer, prompt, arguments) for prompt in prompts]
    model, what = models.load(trained, arguments.dtype, device, arguments.trust_remote_code)
    fit(inputs, prompts, model.config, arguments.max_new_tokens)
    print(f"generate: {trained}, {what}, on {device}, {model.dtype}", file=sys.stderr, flush=True)
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    for prompt, tokens in zip(prompts, inputs, strict=True):
        set_seed(arguments.seed)
        tokens = tokens.to(device)
        print(f"> {prompt.text}", file=sys.stderr, flush=True)
        streamer = None if arguments.json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        started = time.monotonic()
        with torch.inference_mode():
            output = model.generate(**tokens, **sampling(arguments), pad_token_id=padding, streamer=streamer)
        new = output[0, tokens["input_ids"].shape[1] :]
        seconds = time.monotonic() - started
        if arguments.json:
            text = tokenizer.decode(new, skip_special_tokens=True)
            print(json.dumps({"prompt": prompt.text, "answer": text, "tokens": len(new)}), flush=True)
        print(f"{len(new)} tokens in {seconds:.1f} s", file=sys.stderr, flush=True)


def load_tokenizer(trained: Trained, arguments: argparse.Namespace) -> Any:
    """Return the named tokenizer, else the checkpoint's, else that of an adapter's base model."""
    name = arguments.tokenizer or trained.model
    if arguments.tokenizer is None and trained.adapter and not any(Path(name).glob("tokenizer*")):
        name = models.base_name(trained)
    return models.load_tokenizer(name, arguments.trust_remote_code)


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `generate`; what only sampling reads is left out without it, since transformers warns."""
    common = {
        "max_new_tokens": arguments.max_new_tokens,
        "repetition_penalty": arguments.repetition_penalty,
        "use_cache": True,  # activation checkpointing leaves it off in the config
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
            "a conversation needs a chat template",
            "--plain turns the template off" if arguments.plain else "the tokenizer has no chat template",
            "write the prompts as plain text",
        )
    if not templated:
        encoded = tokenizer(prompt.text, return_tensors="pt")
    else:
        turns = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
        if arguments.system and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": arguments.system}, *turns]
        encoded = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    encoded.pop("token_type_ids", None)  # some tokenizers give it, no causal model takes it
    if encoded["input_ids"].shape[1] == 0:
        raise JobError("a prompt is empty", "the tokenizer returns no tokens for it", "write at least one word")
    return encoded


def fit(inputs: Sequence[Any], prompts: Sequence[Prompt], config: Any, new_tokens: int) -> None:
    """Raise JobError if a prompt and its answer are longer than the model, or the tokenizer has other tokens."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    for prompt, tokens in zip(prompts, inputs, strict=True):
        length = tokens["input_ids"].shape[1]
        if positions and length + new_tokens > positions:
            raise JobError(
                f"the prompt {prompt.text[:40]!r} and its answer are too long for the model",
                f"they have {length} + {new_tokens} tokens, and the model has {positions} positions",
                f"--max_new_tokens {positions - length} or less" if length < positions else "use a shorter prompt",
            )
        largest = int(tokens["input_ids"].max())
        if largest >= text.vocab_size:
            raise JobError(
                "the tokenizer does not belong to the model",
                f"the tokenizer returns token {largest}, but the model has only {text.vocab_size} tokens",
                "give the tokenizer used in training: --tokenizer FOLDER|NAME",
            )


def read_file(path: Path) -> list[Prompt]:
    """Return the prompts of a file: a line each, or with .jsonl an object with `prompt` or `messages` each."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines also cuts at U+2028, inside a text
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(
            f"cannot read the prompts in {str(path)!r}", str(error), "give a text file, or a .jsonl file"
        ) from error
    objects = path.suffix in (".jsonl", ".json")
    return [
        _of_object(line, f"{path}:{number}") if objects else Prompt(line)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def _of_object(line: str, place: str) -> Prompt:
    try:
        entry = json.loads(line)
        found = entry["messages"] if "messages" in entry else entry["prompt"]
        if isinstance(found, str):
            return Prompt(found)
        if found[-1]["role"] == "assistant":  # a row of a training set: the model is to write the answer
            found = found[:-1]
        return Prompt(found[-1]["content"], tuple(found))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise JobError(
            f"{place} is not a prompt",
            f"{type(error).__name__}: {error}",
            'write {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}',
        ) from error
