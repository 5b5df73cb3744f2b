"""Blocks of equal length out of documents: all of them in their order, end to end, the last tokens left over."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from training import files
from training.clm.text import Text
from training.processes import Processes, once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DOCUMENTS_AT_ONCE = 1000


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """`length` tokens each, mapped from a file: input_ids, int64 (length)."""

    def __init__(self, tokens: Any, length: int) -> None:
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.tokens[index * self.length : (index + 1) * self.length]
        return {"input_ids": torch.from_numpy(ids.astype(numpy.int64))}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The same blocks, made while they are asked for; several workers share them out one by one."""

    def __init__(
        self, text: Text, tokenizer: PreTrainedTokenizerBase, length: int, append_eos: bool, most: int | None
    ) -> None:
        self.text, self.tokenizer, self.length, self.append_eos = text, tokenizer, length, append_eos
        self.most = most

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        mine, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        left, number = numpy.empty(0, dtype=numpy.int64), 0
        for ids in tokenized(self.text, self.tokenizer, self.append_eos):
            left = numpy.concatenate((left, ids))
            whole = len(left) // self.length
            for index in range(whole):
                if self.most is not None and number + index >= self.most:
                    return
                if (number + index) % workers == mine:
                    block = left[index * self.length : (index + 1) * self.length]
                    yield {"input_ids": torch.from_numpy(block.copy())}
            left, number = left[whole * self.length :], number + whole


def build(
    text: Text, tokenizer: PreTrainedTokenizerBase, length: int, append_eos: bool, cache: Path, peers: Processes
) -> Blocks:
    """Return the blocks; rank 0 tokenizes once per text, tokenizer and options, and all ranks map the same file."""
    path = cache / f"tokens-{_key(text, tokenizer, append_eos)}.npy"

    def make() -> None:
        if not path.is_file():
            chunks = list(tokenized(text, tokenizer, append_eos))
            partial = files.unfinished(path)
            with partial.open("wb") as file:
                numpy.save(file, numpy.concatenate(chunks or [numpy.empty(0)]).astype(numpy.uint32))
            partial.replace(path)

    once(peers, make)
    return Blocks(numpy.load(path, mmap_mode="r"), length)


def tokenized(text: Text, tokenizer: PreTrainedTokenizerBase, append_eos: bool) -> Iterator[Any]:
    """Yield the token ids of some documents at a time, as int64 arrays."""
    rows = text.rows.select_columns([text.column])
    for batch in rows.iter(batch_size=DOCUMENTS_AT_ONCE):
        words = [document for document in batch[text.column] if document]
        if words:
            found = tokenizer(words, return_attention_mask=False, verbose=False)["input_ids"]
            end = [tokenizer.eos_token_id] if append_eos else []
            yield numpy.concatenate([numpy.asarray([*ids, *end], dtype=numpy.int64) for ids in found])


def _key(text: Text, tokenizer: PreTrainedTokenizerBase, append_eos: bool) -> str:
    rules: Mapping[str, Any] = {
        "rows": text.rows._fingerprint,
        "column": text.column,
        "tokenizer": json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else repr(tokenizer),
        "append_eos": append_eos,
    }
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()[:16]
