"""Megatron's indexed dataset: NAME.bin with the ids of all documents, one after the other, and NAME.idx with where.

NAME.idx, little-endian: `MMIDIDX\\0\\0`, version 1 (uint64), the code of the ids' type (uint8), number of sequences and
length of the document table (uint64 each), then the sequences' lengths (int32), their places in NAME.bin in bytes
(int64), and the document table (int64): the first sequence of each document, and the end. A document without tokens has
no sequence. Source: Megatron-LM, core_r0.16, megatron/core/datasets/indexed_dataset.py.
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


def write_index(path: Path, code: int, lengths: Array, counts: Array | None = None) -> None:
    """Write NAME.idx for sequences of these lengths (int32), in order; those of length 0 are left out.

    `counts` is each document's number of sequences that have tokens; without it, each length is one document.
    """
    sequences = np.ascontiguousarray(lengths[lengths > 0], dtype="<i4")
    counts = lengths > 0 if counts is None else counts
    places = np.zeros(len(sequences), "<i8")
    np.cumsum(sequences[:-1], dtype="<i8", out=places[1:])
    places *= np.dtype(CODES[code]).itemsize
    documents = np.zeros(len(counts) + 1, "<i8")
    np.cumsum(counts, dtype="<i8", out=documents[1:])
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
    code, lengths, table = _index(prefix.with_suffix(".idx"))
    ends = np.zeros(len(lengths) + 1, "<i8")
    np.cumsum(lengths, dtype="<i8", out=ends[1:])
    ids = _map(prefix.with_suffix(".bin"), CODES[code])
    if len(ids) != ends[-1]:
        raise BrokenCache(f"{prefix}.bin has {len(ids)} ids, but {ends[-1]} were written")
    return TokenFile(prefix, ids, ends[table])


def read_counts(path: Path) -> tuple[Array, Array]:
    """Return the lengths of the sequences, and each document's number of sequences. Raises BrokenCache."""
    _, lengths, table = _index(path)
    return lengths, np.diff(table).astype("<i4")


def _index(path: Path) -> tuple[int, Array, Array]:
    """Return the code of the type, the lengths, and the document table."""
    index, start = _map(path, "u1"), len(MARK) + HEAD.size
    if len(index) < start or index[: len(MARK)].tobytes() != MARK:
        raise BrokenCache(f"{path} does not begin with {MARK!r}")
    version, code, sequences, documents = HEAD.unpack(index[len(MARK) : start].tobytes())
    if version != VERSION or code not in CODES or len(index) != start + 12 * sequences + 8 * documents:
        raise BrokenCache(f"{path} is incomplete, or has another version")
    return code, _part(index, start, sequences, "<i4"), _part(index, start + 12 * sequences, documents, "<i8")


def _map(path: Path, dtype: str) -> Array:
    size_bytes = path.stat().st_size
    if size_bytes % np.dtype(dtype).itemsize:
        raise BrokenCache(f"{path} ends in the middle of an id")
    return np.memmap(path, dtype, mode="r") if size_bytes else np.zeros(0, dtype)


def _part(index: Array, start: int, count: int, dtype: str) -> Array:
    return index[start : start + count * np.dtype(dtype).itemsize].view(dtype)
