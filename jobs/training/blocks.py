"""Blocks of equal length out of documents: all of them in their order, end to end, the last tokens left over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.utils.data import IterableDataset, Subset, get_worker_info

from training import text
from training.errors import JobError
from training.processes import once
from training.text import Text
from training.token_cache import cache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from training.course import Course

DOCUMENTS_AT_ONCE = 100


def prepare(course: Course, tokenizer: PreTrainedTokenizerBase) -> tuple[Any, Any]:
    """Return the blocks to train on and those to evaluate on; None for what is not asked for."""
    settings = course.settings
    train, held_out = text.find(course)
    most = (settings["max_train_samples"], settings["max_eval_samples"])
    if settings["streaming"]:
        streams = [
            Stream(found, tokenizer, settings["block_size"], settings["append_eos"], limit) if found else None
            for found, limit in zip((train, held_out), most, strict=True)
        ]
        return (streams[0] if settings["do_train"] else None), (streams[1] if settings["do_eval"] else None)
    tokens = _open(course, train, tokenizer) if train and (settings["do_train"] or held_out is None) else None
    if train and train.files and tokens is not None:  # of rows the share was taken before they were tokenized
        tokens = tokens.split(settings["data_percentage"])[0]
    held = _open(course, held_out, tokenizer) if held_out and settings["do_eval"] else None
    if held is None and settings["do_eval"] and tokens is not None:
        held, tokens = tokens.split(settings["validation_split_percentage"])
    return (
        _cut(course, tokens, "train", most[0]) if settings["do_train"] else None,
        _cut(course, held, "validation", most[1]) if settings["do_eval"] else None,
    )


def _open(course: Course, found: Text, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the tokens of a text, made once by rank 0."""
    settings, folder = course.settings, course.run.cache
    if found.files:
        corpus = cache.Corpus(found.files, found.column, settings["keep_linebreaks"])
    else:
        corpus = once(course.peers, lambda: cache.of_rows(found.rows, found.column, folder))
    with course.long_work():
        return cache.open_tokens(
            corpus,
            tokenizer,
            folder,
            course.peers,
            end_of_document=settings["append_eos"],
            processes=settings["preprocessing_num_workers"],
            anew=settings["overwrite_cache"],
        )


def _cut(course: Course, tokens: Any, split: str, most: int | None) -> Any:
    """Return the blocks of a split, no more than asked for; say how many. Raises JobError where there is not one."""
    length = course.settings["block_size"]
    made = tokens.blocks(length)
    if len(made) == 0:
        raise JobError(
            f"the text for {split} is shorter than one block",
            f"{len(tokens)} documents hold {tokens.tokens} tokens, a block is {length}",
            "a smaller --block_size, or more text",
        )
    used = min(len(made), most or len(made))
    if course.peers.first:
        left = tokens.tokens - used * length
        print(f"{split}: {len(tokens):,} documents, {used:,} blocks of {length} tokens, {left:,} left over", flush=True)
    return made if used == len(made) else Subset(made, range(used))


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The same blocks, made while they are asked for; several workers share them out one by one."""

    def __init__(
        self, found: Text, tokenizer: PreTrainedTokenizerBase, length: int, append_eos: bool, most: int | None
    ) -> None:
        self.found, self.tokenizer, self.length, self.most = found, tokenizer, length, most
        self.end = [tokenizer.eos_token_id] if append_eos else []

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        mine, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        left, number = numpy.empty(0, dtype=numpy.int64), 0
        for ids in self._tokenized():
            left = numpy.concatenate((left, ids))
            whole = len(left) // self.length
            for index in range(whole):
                if self.most is not None and number + index >= self.most:
                    return
                if (number + index) % workers == mine:
                    block = torch.from_numpy(left[index * self.length : (index + 1) * self.length].copy())
                    yield {"input_ids": block, "labels": block}
            left, number = left[whole * self.length :], number + whole

    def _tokenized(self) -> Iterator[Any]:
        """Yield the token ids of some documents at a time, int64."""
        for batch in self.found.rows.iter(batch_size=DOCUMENTS_AT_ONCE):
            words = [document for document in batch[self.found.column] if document]
            if words:
                found = self.tokenizer(words, return_attention_mask=False, verbose=False)["input_ids"]
                yield numpy.concatenate([numpy.asarray([*ids, *self.end], dtype=numpy.int64) for ids in found])
