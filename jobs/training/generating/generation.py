"""A trained model answers."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.errors import JobError


def find_checkpoint(named: Path | None, environment: Mapping[str, str]) -> Path:
    """Return the folder of a model: the one named, else the final one of RUNNER_RUN. Raises JobError for neither."""
    if named is None:
        run = environment.get("RUNNER_RUN")
        if not run:
            raise JobError("no checkpoint is named", "RUNNER_RUN is not set either", "--checkpoint FOLDER")
        named = Path(run) / "checkpoints" / "final"
    if (named / "checkpoints" / "final").is_dir():  # a run folder
        named = named / "checkpoints" / "final"
    if not named.is_dir():
        raise JobError(
            f"there is no checkpoint {str(named)!r}", "no such folder", "name the folder `final` of a run that is done"
        )
    if not any((named / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise JobError(
            f"{str(named)!r} is no Hugging Face model",
            "it has neither config.json nor adapter_config.json",
            "name the folder `final`, or `checkpoint-N`, of a run",
        )
    return named


def answer(checkpoint: Path, arguments: argparse.Namespace) -> None:
    """Load the model and print the answer to each prompt as it is written."""
    import torch
    from transformers import AutoTokenizer, TextStreamer, set_seed
    from transformers.utils import logging

    logging.disable_progress_bar()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = _loaded(checkpoint, lambda: AutoTokenizer.from_pretrained(str(checkpoint)))
    model = _loaded(checkpoint, lambda: _model(checkpoint, arguments.dtype)).to(device).eval()
    print(f"generate: {checkpoint} on {device}, {model.dtype}", file=sys.stderr, flush=True)
    for prompt in arguments.prompt or [arguments.default_prompt]:
        set_seed(arguments.seed)
        inputs = _encode(tokenizer, prompt, arguments.plain).to(device)
        inputs.pop("token_type_ids", None)  # some tokenizers give it, no causal model takes it
        print(f"> {prompt}", file=sys.stderr, flush=True)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        started = time.monotonic()
        with torch.inference_mode():
            output = model.generate(
                **inputs, **sampling(arguments), pad_token_id=_padding(tokenizer), streamer=streamer
            )
        count = output.shape[1] - inputs["input_ids"].shape[1]
        print(f"{count} tokens in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `generate`; what only sampling reads is left out without it, since transformers warns."""
    common = {"max_new_tokens": arguments.max_new_tokens, "repetition_penalty": arguments.repetition_penalty}
    if arguments.temperature <= 0:
        return {**common, "do_sample": False}
    return {**common, "do_sample": True, "temperature": arguments.temperature, "top_p": arguments.top_p}


def _model(checkpoint: Path, dtype: str) -> Any:
    """Return the model in the type asked for; `auto` is the one it was saved in."""
    import torch
    import transformers

    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    # transformers 4.56 renamed torch_dtype.
    new = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (4, 56)
    keyword = {"dtype" if new else "torch_dtype": wanted}
    if (checkpoint / "adapter_config.json").is_file():
        from peft import AutoPeftModelForCausalLM

        return AutoPeftModelForCausalLM.from_pretrained(str(checkpoint), **keyword)
    return transformers.AutoModelForCausalLM.from_pretrained(str(checkpoint), **keyword)


def _loaded(checkpoint: Path, load: Any) -> Any:
    from safetensors import SafetensorError

    try:
        return load()
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise JobError(f"cannot load {str(checkpoint)!r}", lines[0], "is it whole? name another checkpoint") from error


def _encode(tokenizer: Any, prompt: str, plain: bool) -> Any:
    """Return input_ids and attention_mask: int64 (1, tokens)."""
    if plain or not tokenizer.chat_template:
        return tokenizer(prompt, return_tensors="pt")
    question = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def _padding(tokenizer: Any) -> int | None:
    found: int | None = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return found
