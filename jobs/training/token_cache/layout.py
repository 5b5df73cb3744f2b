"""Megatron's indexed dataset: NAME.bin with the ids of all documents, one after the other, and NAME.idx with where.

NAME.idx, little-endian: `MMIDIDX\\0\\0`, version 1 (uint64), the code of the ids' type (uint8), number of sequences and
length of the document table (uint64 each), then the sequences' lengths (int32), their places in NAME.bin in bytes
(int64), and the document table (int64): the first sequence of each document, and the end. Here a document is one
sequence, or none if it has no tokens. Source: Megatron-LM, core_r0.16, megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

MARK, VERSION = b"MMIDIDX\x00\x00", 1
CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
HEAD = struct.Struct("<QBQQ")
# Megatron's own limit: below it two bytes hold an id, and some codes are left for it.
TWO_BYTES_BELOW = 65500
Array: TypeAlias = "np.ndarray[Any, Any]"


class BrokenCache(Exception):
    """The files are not what was written: shorter, longer, or of another kind."""


def dtype_code(vocabulary: int) -> int:
    """Return the code of the smallest type that Megatron takes for a vocabulary: uint16 or int32."""
    return 8 if vocabulary < TWO_BYTES_BELOW else 4


def write_index(path: Path, code: int, lengths: Array) -> None:
    """Write NAME.idx for documents of these lengths (int32), in order; those of length 0 have no sequence."""
    sequences = np.ascontiguousarray(lengths[lengths > 0], dtype="<i4")
    places = np.zeros(len(sequences), "<i8")
    np.cumsum(sequences[:-1], dtype="<i8", out=places[1:])
    places *= np.dtype(CODES[code]).itemsize
    documents = np.zeros(len(lengths) + 1, "<i8")
    np.cumsum(lengths > 0, dtype="<i8", out=documents[1:])
    with path.open("wb") as file:
        file.write(MARK + HEAD.pack(VERSION, code, len(sequences), len(documents)))
        for part in (sequences, places, documents):
            file.write(part.tobytes())


@dataclass(frozen=True)
class TokenFile:
    """NAME.bin and NAME.idx, mapped into memory, not read."""

    prefix: Path
    ids: Array  # all ids, in the order of the documents
    document_ends: Array  # int64 (documents + 1,): ids before each document, and all of them

    @property
    def documents(self) -> int:
        return len(self.document_ends) - 1


def read(prefix: Path) -> TokenFile:
    """Return the mapped files `prefix`.bin and `prefix`.idx. Raises BrokenCache where they do not fit each other."""
    index, start = _map(prefix.with_suffix(".idx"), "u1"), len(MARK) + HEAD.size
    if len(index) < start or index[: len(MARK)].tobytes() != MARK:
        raise BrokenCache(f"{prefix}.idx does not begin with {MARK!r}")
    version, code, sequences, documents = HEAD.unpack(index[len(MARK) : start].tobytes())
    if version != VERSION or code not in CODES or len(index) != start + 12 * sequences + 8 * documents:
        raise BrokenCache(f"{prefix}.idx is incomplete, or has another version")
    lengths = _part(index, start, sequences, "<i4")
    table = _part(index, start + 12 * sequences, documents, "<i8")
    ends = np.zeros(sequences + 1, "<i8")
    np.cumsum(lengths, dtype="<i8", out=ends[1:])
    ids = _map(prefix.with_suffix(".bin"), CODES[code])
    if len(ids) != ends[-1]:
        raise BrokenCache(f"{prefix}.bin has {len(ids)} ids, but {ends[-1]} were written")
    return TokenFile(prefix, ids, ends[table])


def _map(path: Path, dtype: str) -> Array:
    size_bytes = path.stat().st_size
    if size_bytes % np.dtype(dtype).itemsize:
        raise BrokenCache(f"{path} ends in the middle of an id")
    return np.memmap(path, dtype, mode="r") if size_bytes else np.zeros(0, dtype)


def _part(index: Array, start: int, count: int, dtype: str) -> Array:
    return index[start : start + count * np.dtype(dtype).itemsize].view(dtype)
