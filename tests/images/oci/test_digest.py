"""The digest of a file, at the sizes around one piece that is read ahead."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from runner.images.oci.digest import _PIECE, sha256_of


@pytest.mark.parametrize("size", [0, 1, _PIECE - 1, _PIECE, _PIECE + 1, 3 * _PIECE + 5])
def test_it_is_that_of_the_bytes(size: int, tmp_path: Path) -> None:
    content = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(content)
    assert sha256_of(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_what_cannot_be_read_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        sha256_of(tmp_path)
