"""Blocks of equal length out of documents: end to end, in order; the tokens after the last block are left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.utils.data import IterableDataset, Subset, get_worker_info

from training import text
from training.errors import JobError
from training.processes import once_slowly
from training.text import Text
from training.token_cache import cache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TrainingArguments

    from training.clm_arguments import DataArguments, ModelArguments
    from training.job import Job

DOCUMENTS_AT_ONCE = 100


def prepare(
    data: DataArguments,
    model: ModelArguments,
    training: TrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
    job: Job,
) -> tuple[Any, Any]:
    """Return the blocks to train on and those to evaluate on; None for what is not asked for."""
    train, held_out = text.find(data, model, training, job.processes, job.heartbeat.beat)
    most = (data.max_train_samples, data.max_eval_samples)
    if data.streaming:
        streams = [
            Stream(found, tokenizer, data.block_size or 0, data.append_eos, limit) if found else None
            for found, limit in zip((train, held_out), most, strict=True)
        ]
        return (streams[0] if training.do_train else None), (streams[1] if training.do_eval else None)
    tokens = _tokens(data, train, tokenizer, job) if train and (training.do_train or held_out is None) else None
    if train and train.files and tokens is not None:  # of rows, the share was taken before
        tokens = tokens.split(data.data_percentage)[0]
    held = _tokens(data, held_out, tokenizer, job) if held_out and training.do_eval else None
    if held is None and training.do_eval and tokens is not None:
        held, tokens = tokens.split(data.validation_split_percentage)
    return (
        _cut(data, tokens, "train", most[0], job) if training.do_train else None,
        _cut(data, held, "validation", most[1], job) if training.do_eval else None,
    )


def _tokens(data: DataArguments, found: Text, tokenizer: PreTrainedTokenizerBase, job: Job) -> Any:
    """Return the tokens of a text, made once by rank 0."""
    folder = job.run.cache
    if found.files:
        corpus = cache.Corpus(found.files, found.column, data.keep_linebreaks)
    else:
        rows, column = found.rows, found.column  # of a share of the rows, a copy is written, which takes time
        corpus = once_slowly(job.processes, lambda: cache.of_rows(rows, column, folder), job.heartbeat.beat)
    return cache.open_tokens(
        corpus,
        tokenizer,
        folder,
        job.processes,
        end_of_document=data.append_eos,
        workers=data.preprocessing_num_workers,
        rebuild=data.overwrite_cache,
        beat=job.heartbeat.beat,
    )


def _cut(data: DataArguments, tokens: Any, split: str, most: int | None, job: Job) -> Any:
    """Return the blocks of a split, at most as many as asked for; print how many. Raises JobError if there is none."""
    length = data.block_size or 0
    made = tokens.blocks(length)
    if len(made) == 0:
        raise JobError(
            f"the text for {split} is shorter than one block",
            f"its {len(tokens)} documents have {tokens.tokens} tokens together, and a block has {length}",
            "use a smaller --block_size, or more text",
        )
    used = min(len(made), most or len(made))
    if job.processes.first:
        left = tokens.tokens - used * length
        print(
            f"{split}: {len(tokens):,} documents, {used:,} blocks of {length} tokens, {left:,} tokens left out",
            flush=True,
        )
    return made if used == len(made) else Subset(made, range(used))


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The same blocks, made while they are read; several workers take turns."""

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
            words = [document for document in batch[self.found.column] if document is not None]
            if words:
                found = self.tokenizer(words, return_attention_mask=False, verbose=False)["input_ids"]
                # as in the cache, an empty document has no tokens: some tokenizers would begin it with a start token
                whole = [[*ids, *self.end] if len(ids) else [] for ids in found]
                yield numpy.concatenate([numpy.asarray(ids, dtype=numpy.int64) for ids in whole])
