"""Blocks of one length over a token cache: random access, and only the requested block is copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from training.token_cache import layout
from training.token_cache.layout import Array, TokenFile


class Tokens:
    """The documents `first` to `last` of a token cache."""

    def __init__(self, file: TokenFile, first: int = 0, last: int | None = None) -> None:
        self.file, self.first, self.last = file, first, file.documents if last is None else last

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def tokens(self) -> int:
        return int(self.file.document_ends[self.last] - self.file.document_ends[self.first])

    def document(self, number: int) -> Array:
        ends = self.file.document_ends
        return self.file.ids[ends[self.first + number] : ends[self.first + number + 1]]

    def split(self, percent: float) -> tuple[Tokens, Tokens]:
        """Return the first `percent` of the documents, and the others; the border is rounded as `datasets` does."""
        middle = self.first + round(len(self) * percent / 100)
        return Tokens(self.file, self.first, middle), Tokens(self.file, middle, self.last)

    def blocks(self, length: int) -> Blocks:
        """Return the blocks of `length` tokens; see Blocks."""
        return Blocks(self, length)


class Blocks:
    """A map-style dataset: row i is `input_ids` and `labels`, int64 (length,), tokens i*length to (i+1)*length.

    Blocks continue from one document to the next; the tokens after the last block are left out.
    """

    def __init__(self, tokens: Tokens, length: int) -> None:
        self.length, self.prefix = length, tokens.file.prefix
        self._ids: Array | None = tokens.file.ids
        ends = tokens.file.document_ends
        self.start = int(ends[tokens.first])
        self.count = (int(ends[tokens.last]) - self.start) // length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Array]:
        if not -len(self) <= number < len(self):
            raise IndexError(f"block {number} of {len(self)}")
        start = self.start + int(number) % self.count * self.length
        block = self.ids[start : start + self.length].astype(np.int64)
        return {"input_ids": block, "labels": block}

    @property
    def ids(self) -> Array:
        if self._ids is None:
            self._ids = layout.read(Path(self.prefix)).ids
        return self._ids

    def __getstate__(self) -> dict[str, Any]:
        """A worker of a DataLoader maps the file itself; its bytes are not sent."""
        return {**self.__dict__, "_ids": None}
