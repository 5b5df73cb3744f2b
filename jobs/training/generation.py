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

from training.converting import adapters, models
from training.converting.shards import open_shards
from training.converting.trained import Trained
from training.errors import JobError


@dataclass(frozen=True)
class Prompt:
    """A text, or a conversation that ends with the user's turn."""

    text: str
    messages: tuple[dict[str, Any], ...] = ()

    @property
    def shown(self) -> str:
        return self.text or str(self.messages[-1].get("content", ""))


def answer(trained: Trained, arguments: argparse.Namespace) -> None:
    """Load the model and print the answer to each prompt as it is written, or with --json an object for each."""
    import torch
    from transformers import TextStreamer, set_seed
    from transformers.utils import logging

    prompts = requested(arguments)
    device = choose_device(arguments.device, arguments.dtype)
    logging.disable_progress_bar()
    for note in trained.notes:
        print(f"generate: {note}", file=sys.stderr)
    tokenizer = load_tokenizer(trained, arguments.tokenizer, arguments.trust_remote_code)
    inputs = [encode(tokenizer, prompt, arguments) for prompt in prompts]
    model = load_model(trained, arguments.dtype, device, arguments.trust_remote_code)
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


def load_model(trained: Trained, dtype: str, device: str, trust_remote_code: bool = False) -> Any:
    """Return the model on the device, `auto` is the type in its config."""
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
        raise JobError(failed.what, failed.why, "--tokenizer FOLDER|NAME, the one of the training") from error


def choose_device(wanted: str | None, dtype: str) -> str:
    """Return the device: a GPU where there is one. Raises JobError for a device that is missing or lacks the type."""
    import torch

    device = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise JobError(f"no device {device!r}", str(error).splitlines()[0], "cpu, cuda or cuda:1") from error
    count = torch.cuda.device_count()
    if parsed.type == "cuda" and (parsed.index or 0) >= count:
        why = f"this process sees {count} GPUs" if count else "no GPU is visible to this process"
        raise JobError(f"no device {device!r}", why, "drop --device, or name one of them")
    if parsed.type == "cuda" and dtype == "bfloat16" and not torch.cuda.is_bf16_supported():
        raise JobError("this GPU has no bf16", torch.cuda.get_device_name(parsed), "--dtype float16")
    return device


def requested(arguments: argparse.Namespace) -> list[Prompt]:
    """Return the prompts of the command line, then those of the file; the default one where there are none."""
    check(arguments)
    prompts = [Prompt(text) for text in arguments.prompt or ()]
    if any(not prompt.text.strip() for prompt in prompts):
        raise JobError("a prompt is empty", "--prompt has no text", "write at least one word")
    prompts += read_file(arguments.prompts_file) if arguments.prompts_file else []
    return prompts or [Prompt(arguments.default_prompt)]


def check(arguments: argparse.Namespace) -> None:
    """Raise JobError for numbers that generate would refuse after the model has been loaded."""
    limits = {
        "max_new_tokens": (arguments.max_new_tokens >= 1, "1 or more"),
        "temperature": (arguments.temperature >= 0, "0 (always the most likely token) or more"),
        "top_p": (0 < arguments.top_p <= 1, "more than 0, at most 1"),
        "top_k": (arguments.top_k >= 0, "0 (all tokens) or more"),
        "repetition_penalty": (arguments.repetition_penalty > 0, "more than 0; 1 is none"),
    }
    for name, (right, what) in limits.items():
        if not right:
            raise JobError(
                f"--{name} {getattr(arguments, name)} is out of range", f"it must be {what}", f"--{name} VALUE: {what}"
            )


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
            "a conversation needs a chat template",
            "--plain is given" if arguments.plain else "the tokenizer has no chat template",
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
                "the tokenizer does not belong to the model",
                f"it returns token {largest}; the model has {text.vocab_size}",
                "--tokenizer FOLDER|NAME, the one of the training",
            )


def _padding(tokenizer: Any) -> int | None:
    found: int | None = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return found


def read_file(path: Path) -> list[Prompt]:
    """Return the prompts of a file: a line each, or with .jsonl an object with `prompt` or `messages` each."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(
            f"cannot read the prompts in {str(path)!r}", str(error), "a text file, or .jsonl, as this process sees it"
        ) from error
    found = [_of_line(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise JobError(f"{str(path)!r} has no prompts", "all lines are empty", "write one prompt per line")
    return found


def _of_line(line: str, path: Path, number: int) -> Prompt:
    if path.suffix not in (".jsonl", ".json"):
        return Prompt(line)
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise JobError(f"{path}:{number} is not JSON", str(error), "one object per line") from error
    if isinstance(entry, str):
        return Prompt(entry)
    text = entry.get("prompt") if isinstance(entry, dict) else None
    if isinstance(text, str):
        return Prompt(text)
    messages = (entry.get("messages") if isinstance(entry, dict) else None) or text
    if isinstance(messages, list) and messages and all(isinstance(each, dict) and "role" in each for each in messages):
        if messages[-1]["role"] == "assistant":  # a row of a training set: the model is to write the answer
            messages = messages[:-1]
        if messages:
            return Prompt("", tuple(messages))
    raise JobError(
        f"{path}:{number} has neither `prompt` nor `messages`",
        f"its keys are {', '.join(map(str, entry)) if isinstance(entry, dict) else 'none: it is not an object'}",
        '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}',
    )
