"""The done marker of a checkpoint: every file with its size and hash, written last."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training import files

MARKER = "complete.json"
PIECE_BYTES = 8 * 1024**2
# The rank that writes a file stands in its name: DeepSpeed's shards and transformers' random states.
OF_RANK = re.compile(r"(?:zero_pp_rank_|rng_state_)(\d+)")


@dataclass(frozen=True)
class Digest:
    """What was written to one file, or why that cannot be known."""

    size_bytes: int
    hash: str  # hexadecimal, by the marker's algorithm
    fault: str = ""


def algorithm() -> str:
    """Return the fastest hash at hand: xxh3_128 (datasets brings xxhash) reads at memory speed, blake2b does not.

    A flipped bit, not an enemy, is what it has to find.
    """
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return "blake2b"
    return "xxh3_128"


def hasher(name: str) -> Any:
    if name == "xxh3_128":
        import xxhash

        return xxhash.xxh3_128()
    return hashlib.new(name)


def digest(path: Path, name: str, sync: bool = False) -> Digest:
    """Return size and hash of a file; `sync` first sends to the disk what this machine still holds of it."""
    state, size_bytes = hasher(name), 0
    piece = memoryview(bytearray(PIECE_BYTES))
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


def digests(folder: Path, names: Iterable[str], algorithm_name: str, sync: bool, threads: int = 4) -> dict[str, Digest]:
    """Return the digest of each file, several at a time: both hashing and reading leave the interpreter alone."""
    names = list(names)
    work: Callable[[str], Digest] = lambda name: digest(folder / name, algorithm_name, sync)  # noqa: E731
    if len(names) < 2:
        return {name: work(name) for name in names}
    with ThreadPoolExecutor(min(threads, len(names))) as pool:
        return dict(zip(names, pool.map(work, names), strict=True))


def share(sizes: Mapping[str, int], rank: int, world_size: int, local_world_size: int) -> list[str]:
    """Return the files that one rank reads: those it wrote itself, and its part of what rank 0 wrote.

    What a node has written lies in its memory still, so the files of rank 0 are split among the ranks of its node.
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


def write(path: Path, found: Mapping[str, Digest], algorithm_name: str, facts: Mapping[str, Any]) -> None:
    """Write the done marker: from here on the checkpoint counts."""
    for folder in (path, *(entry for entry in path.rglob("*") if entry.is_dir())):
        files.sync_folder(folder)
    table = {
        **facts,
        "algorithm": algorithm_name,
        "files": {name: entry.size_bytes for name, entry in found.items()},
        "hashes": {name: entry.hash for name, entry in found.items()},
    }
    files.write_json(path / MARKER, table)


def read(path: Path) -> dict[str, Any]:
    """Return the marker. Raises OSError, ValueError or KeyError where there is none that can be used."""
    marker: dict[str, Any] = json.loads((path / MARKER).read_text(encoding="utf-8"))
    marker["files"], marker["step"], marker["world_size"]
    return marker


def missing_or_cut(path: Path) -> str | None:
    """Return what is wrong with the sizes of a checkpoint's files, or None. Cheap: no file is read."""
    try:
        expected: dict[str, int] = read(path)["files"]
    except FileNotFoundError:
        return f"it has no {MARKER}: the job ended while writing it"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MARKER} cannot be read ({error})"
    for name, size_bytes in expected.items():
        try:
            actual = (path / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if actual != size_bytes:
            return f"{name} has {actual} bytes, {size_bytes} were written"
    return None


def damaged(path: Path, rank: int = 0, world_size: int = 1, local_world_size: int = 1) -> str | None:
    """Return which of this rank's share of the files is not what was written, or None."""
    marker = read(path)
    hashes: dict[str, str] = marker.get("hashes", {})
    name = marker.get("algorithm", "")
    if hashes and name == "xxh3_128" and algorithm() != name:
        return None  # this image cannot compute it; the sizes are right
    mine = [file for file in share(marker["files"], rank, world_size, local_world_size) if file in hashes]
    for file, found in digests(path, mine, name, sync=False).items():
        if found.fault:
            return f"{file} cannot be read ({found.fault})"
        if found.hash != hashes[file]:
            return f"{file} is not what was written: its {name} is {found.hash}, not {hashes[file]}"
    return None
