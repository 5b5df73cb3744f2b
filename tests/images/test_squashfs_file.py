"""What is known of a squashfs file stands in its sidecar."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from runner.images.squashfs_file import Squashfs, as_json, read_squashfs, sidecar, with_sha256


def test_a_missing_sha256_is_computed_once_and_kept(tmp_path: Path) -> None:
    """In a folder of somebody else's it is computed, and nothing is written."""
    path = tmp_path / "a-1.sqsh"
    path.write_bytes(b"hsqs")
    unknown = Squashfs(path, tmp_path / "a.sqsh", "0" * 64, "", 4, "amd64")
    sidecar(path).write_text(as_json(unknown))
    known = with_sha256(unknown)
    assert known == replace(unknown, sha256=hashlib.sha256(b"hsqs").hexdigest()) == read_squashfs(path)
    path.write_bytes(b"hsqS")
    assert with_sha256(known) is known
    sidecar(path).unlink()
    sidecar(path).mkdir()  # cannot be written
    assert with_sha256(unknown).sha256 == hashlib.sha256(b"hsqS").hexdigest()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a-1.json", "a-1.sqsh"]
