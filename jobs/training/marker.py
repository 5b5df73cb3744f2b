"""complete.json of a checkpoint: every file with its size and hash, written last."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from training import files

MARKER = "complete.json"
ALGORITHM = "xxh3_128"  # finds accidents only
PIECE_BYTES = 8 * 1024**2
# The rank that writes a file is in its name: DeepSpeed's shards and transformers' random states.
OF_RANK = re.compile(r"(?:zero_pp_rank_|rng_state_)(\d+)")


@dataclass(frozen=True)
class Digest:
    """Size and hash of one file, or why it could not be read."""

    size_bytes: int
    hash: str  # hexadecimal
    fault: str = ""


def digest(path: Path, sync: bool) -> Digest:
    """Return size and hash of a file; with `sync`, write it to the disk first."""
    import xxhash  # a requirement of datasets

    state = xxhash.xxh3_128()
    size_bytes, piece = 0, memoryview(bytearray(PIECE_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            if sync:
                os.fsync(file.fileno())
            while count := file.readinto(piece):
                state.update(piece[:count])
                size_bytes += count
    except OSError as error:
        return Digest(size_bytes, "", error.strerror or str(error))
    return Digest(size_bytes, state.hexdigest())


def digests(folder: Path, names: Iterable[str], sync: bool) -> dict[str, Digest]:
    """Return the digest of each file; several threads work at the same time."""
    names = list(names)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(partial(digest, sync=sync), [folder / name for name in names])
        return dict(zip(names, found, strict=True))


def share(sizes: Mapping[str, int], rank: int, world_size: int, local_world_size: int) -> list[str]:
    """Return the files that one rank reads: those that it wrote, and its part of those that rank 0 wrote.

    A node still has in memory what it wrote, so rank 0's files are divided between the ranks of its node.
    """
    load = [0] * max(1, min(local_world_size, world_size))
    mine = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        of_rank = OF_RANK.search(name)
        owner = int(of_rank[1]) % world_size if of_rank else load.index(min(load))
        if owner < len(load):
            load[owner] += sizes[name]
        if owner == rank:
            mine.append(name)
    return mine


def write(path: Path, found: Mapping[str, Digest], facts: Mapping[str, Any]) -> None:
    """Write the marker: from here on the checkpoint is complete."""
    for folder in (path, *(entry for entry in path.rglob("*") if entry.is_dir())):
        files.sync_folder(folder)
    table = {
        **facts,
        "algorithm": ALGORITHM,
        "files": {name: entry.size_bytes for name, entry in found.items()},
        "hashes": {name: entry.hash for name, entry in found.items()},
    }
    files.write_json(path / MARKER, table)


def read(path: Path) -> dict[str, Any]:
    """Return the marker. Raises OSError, ValueError or KeyError if there is none that can be used."""
    marker: dict[str, Any] = json.loads((path / MARKER).read_text(encoding="utf-8"))
    marker["files"], marker["hashes"], marker["step"], marker["world_size"]
    return marker


def missing_or_cut(path: Path) -> str | None:
    """Return what is wrong with the sizes of a checkpoint's files, or None. No file is read."""
    try:
        expected: dict[str, int] = read(path)["files"]
    except FileNotFoundError:
        return f"{MARKER} is missing: the checkpoint is incomplete, or another program wrote it"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"cannot read {MARKER} ({error})"
    for name, size_bytes in expected.items():
        try:
            actual = (path / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if actual != size_bytes:
            return f"{name} has {actual} bytes, but {size_bytes} were written"
    return None


def damaged(path: Path, rank: int = 0, world_size: int = 1, local_world_size: int = 1) -> str | None:
    """Return which file of this rank's share differs from what was written, or None. Every byte is read."""
    marker = read(path)
    hashes: dict[str, str] = marker["hashes"]
    mine = share(marker["files"], rank, world_size, local_world_size)
    for file, found in digests(path, mine, sync=False).items():
        if found.fault:
            return f"cannot read {file} ({found.fault})"
        if found.hash != hashes[file]:
            return f"{file} has changed: its {ALGORITHM} is {found.hash}, not {hashes[file]}"
    return None
