"""The tokenizers of Megatron's `--tokenizer-type`, as the state from which other processes make them.

Source: Megatron-LM, main of 2026-08, megatron/core/tokenizers/text/libraries.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from training.errors import JobError
from training.processes import die_with_parent
from training.token_cache.encoding import TokenizerState
from training.token_cache.layout import dtype_code

END = "<|endoftext|>"  # the end token of GPT-2


def load(arguments: argparse.Namespace) -> TokenizerState:
    """Return the tokenizer of the arguments. Raises JobError if it cannot be loaded."""
    if arguments.tokenizer_type == "GPT2BPETokenizer":
        return _gpt2(arguments)
    if not arguments.tokenizer_model:
        why = f"{arguments.tokenizer_type} needs a tokenizer"
        raise JobError("--tokenizer-model is missing", why, "give --tokenizer-model PATH")
    if arguments.tokenizer_type == "SentencePieceTokenizer":
        return _sentencepiece(arguments)
    # in another process, which gives the memory of transformers back
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), die_with_parent) as pool:
        return pool.submit(_hugging_face, arguments).result()


def _gpt2(arguments: argparse.Namespace) -> TokenizerState:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    for flag, path in (("--vocab-file", arguments.vocab_file), ("--merge-file", arguments.merge_file)):
        _need(flag, path)
    try:
        tokenizer = Tokenizer(models.BPE.from_file(arguments.vocab_file, arguments.merge_file))
    except BaseException as error:  # tokenizers raises Exception itself, and a panic of Rust is not even that
        if isinstance(error, KeyboardInterrupt):
            raise
        what = f"cannot read {arguments.vocab_file!r} and {arguments.merge_file!r} as a vocabulary"
        raise JobError(what, str(error), "give GPT-2's vocab.json and merges.txt") from error
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    end = tokenizer.token_to_id(END) if arguments.append_eod else None
    return TokenizerState(tokenizer.to_str(), False, end, dtype_code(tokenizer.get_vocab_size()))


def _sentencepiece(arguments: argparse.Namespace) -> TokenizerState:
    _need("--tokenizer-model", arguments.tokenizer_model)
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        what, why = "Python has no package sentencepiece", "SentencePieceTokenizer needs it"
        raise JobError(
            what, why, "use an image that has sentencepiece, or --tokenizer-type HuggingFaceTokenizer"
        ) from error
    model = Path(arguments.tokenizer_model).read_bytes()
    try:
        tokenizer = SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        what = f"{arguments.tokenizer_model!r} is not a model of SentencePiece"
        raise JobError(what, str(error), "give the file tokenizer.model") from error
    end = tokenizer.eos_id() if arguments.append_eod else None
    if end == -1:
        raise _no_end(arguments)
    return TokenizerState("", False, end, dtype_code(tokenizer.get_piece_size()), model)


def _hugging_face(arguments: argparse.Namespace) -> TokenizerState:
    from transformers import AutoTokenizer

    from training.models import not_loaded
    from training.token_cache import cache, identity

    files = {"vocab_file": arguments.vocab_file, "merges_file": arguments.merge_file}
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            arguments.tokenizer_model, **{name: path for name, path in files.items() if path}
        )
    except (OSError, ValueError) as error:
        raise not_loaded("tokenizer", arguments.tokenizer_model, error) from error
    state = identity.state_of(tokenizer, False)
    cache.refuse_own_rules(tokenizer, state)
    if arguments.append_eod:
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        if end is None:
            raise _no_end(arguments)
        state = dataclasses.replace(state, end=end)
    if arguments.tokenizer_hf_no_include_special_tokens:
        state = dataclasses.replace(state, text=json.dumps({**json.loads(state.text), "post_processor": None}))
    return state


def _need(flag: str, path: str | None) -> None:
    if not path:
        raise JobError(f"{flag} is missing", "the tokenizer is made from this file", f"give {flag} PATH")
    if not Path(path).is_file():
        raise JobError(f"{flag}: there is no file {path!r}", "the path must exist inside the container",
                       "check the path, and mount the file's folder")  # fmt: skip


def _no_end(arguments: argparse.Namespace) -> JobError:
    why = f"--append-eod puts an end token after each document, and {arguments.tokenizer_model!r} has none"
    return JobError("the tokenizer has no end token", why, "leave out --append-eod, or use another tokenizer")
