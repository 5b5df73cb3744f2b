"""PREFIX_KEY_document.bin and .idx of each key: made in parts, joined, and visible only when complete.

Both files of all keys are written under other names. The .idx files get their names last: without it, nothing reads a
.bin file. PREFIX.json says what the files were made from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import glob
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from training import files
from training.errors import JobError
from training.token_cache import building, documents, layout
from training.token_cache.building import Counts
from training.token_cache.documents import Piece
from training.token_cache.encoding import TokenizerState

PIECE_BYTES = 8 << 20
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Job:
    """All that decides the files."""

    prefix: Path
    keys: tuple[str, ...]
    inputs: tuple[Path, ...]
    state: TokenizerState
    parts: int

    @property
    def identity(self) -> dict[str, Any]:
        """What PREFIX.json records: the same files are not made again, and others are not overwritten."""
        stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in self.inputs]
        described = [stats, self.keys, dataclasses.astuple(self.state), self.parts]
        digest = hashlib.sha256(repr(described).encode()).hexdigest()[:20]
        return {"identity": digest, "inputs": [str(path) for path in self.inputs], "json_keys": list(self.keys)}


def named(words: Sequence[str]) -> tuple[Path, ...]:
    """Return the files that paths and patterns name, those of a pattern by name. Raises JobError if one names none."""
    found: list[Path] = []
    for word in words:
        paths = [Path(path).absolute() for path in sorted(glob.glob(word, recursive=True))]  # noqa: PTH207
        if not paths:
            raise JobError(
                f"no file matches {word!r}",
                "the path must exist inside the container",
                "check the path, and mount the files' folder",
            )
        found += paths
    for path in found:
        if documents.kind_of(path).partition(".")[0] != "jsonl":
            raise JobError(f"cannot read {str(path)!r}", "the text must be JSON lines", "write one object per line")
    return tuple(dict.fromkeys(found))


def prefix(start: Path, key: str) -> Path:
    return start.with_name(f"{start.name}_{key}_document")


def make(job: Job, part: int | None, workers: int, progress: Progress) -> bool:
    """Write the files of all keys, or one part of them; return whether all parts are complete.

    Raises JobError if other files would be overwritten, and for a folder that cannot be written to.
    """
    try:
        return _make(job, part, workers, progress)
    except OSError as error:
        fix = "check the space and the permissions, or give another --output-prefix"
        raise JobError(f"cannot write {job.prefix}", str(error), fix) from error


def _make(job: Job, part: int | None, workers: int, progress: Progress) -> bool:
    identity = job.identity
    record = job.prefix.with_name(f"{job.prefix.name}.json")
    if _is_done(job, record, identity):
        print(f"the output files are already complete: see {record}")
        return True
    job.prefix.parent.mkdir(parents=True, exist_ok=True)
    if job.parts == 1:
        _one(job, job.prefix, 0, workers, progress, record, identity)
        return True
    folder = job.prefix.with_name(f"{job.prefix.name}.parts-{identity['identity']}")
    folder.mkdir(exist_ok=True)
    starts = [folder / str(number) for number in range(job.parts)]
    for number in range(job.parts) if part is None else [part]:
        _one(job, starts[number], number, workers, progress)
    missing = [number for number, start in enumerate(starts) if not _complete(job, start)]
    if missing:
        print(f"part {part} is complete; missing parts: {', '.join(map(str, missing))}")
        return False
    try:
        _join(job, starts, record, identity)
    except FileNotFoundError:
        if not _is_done(job, record, identity):  # another task has joined the parts, and removed them
            raise
    shutil.rmtree(folder, ignore_errors=True)
    return True


def _is_done(job: Job, record: Path, identity: dict[str, Any]) -> bool:
    """Return whether the files were made. Raises JobError if other files have their names."""
    try:
        own = json.loads(record.read_text(encoding="utf-8")) == identity
    except (OSError, ValueError):
        own = False
    if own:
        return _complete(job, job.prefix)
    for path in _names(job, job.prefix):
        if path.exists():
            raise JobError(
                f"{path} exists already",
                "it was made from other files or with other arguments",
                "give another --output-prefix, or delete the old files",
            )
    return False


def _names(job: Job, start: Path) -> list[Path]:
    """The .bin files of all keys, then the .idx files."""
    ends = itertools.product((".bin", ".idx"), job.keys)
    return [prefix(start, key).with_name(f"{prefix(start, key).name}{end}") for end, key in ends]


def _complete(job: Job, start: Path) -> bool:
    return all(path.exists() for path in _names(job, start))


def _one(job: Job, start: Path, number: int, workers: int, progress: Progress, *about: Any) -> None:
    """Make the files of one part unless they exist."""
    with _partial(job, start, *about) as partial:
        if partial:
            bins = partial[: len(job.keys)]
            _, counts = building.write(bins, list(_pieces(job, number)), job.state, "auto", workers, progress)
            for path, count in zip(partial[len(job.keys) :], counts, strict=True):
                layout.write_index(path, job.state.type_code, count.lengths, count.sequences)


def _join(job: Job, starts: Sequence[Path], record: Path, identity: dict[str, Any]) -> None:
    with _partial(job, job.prefix, record, identity) as partial:
        for key, (bin_path, index) in enumerate(zip(partial[: len(job.keys)], partial[len(job.keys) :], strict=True)):
            parts = [_names(job, start)[key :: len(job.keys)] for start in starts]
            with bin_path.open("wb") as whole:
                for part, _ in parts:
                    with part.open("rb") as file:
                        shutil.copyfileobj(file, whole, 16 << 20)
            counts = [layout.read_counts(path) for _, path in parts]
            joined = Counts(*(np.concatenate(arrays) for arrays in zip(*counts, strict=True)))
            layout.write_index(index, job.state.type_code, joined.lengths, joined.sequences)


@contextlib.contextmanager
def _partial(job: Job, start: Path, record: Path | None = None, identity: Any = None) -> Iterator[list[Path]]:
    """Yield the names under which to write; the files get their own names if the block succeeds.

    Yields nothing if another process has made the files. Raises JobError while one writes them.
    """
    names = _names(job, start)
    partial = [path.with_name(f"{path.name}.partial") for path in names]
    with partial[0].open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            why, fix = f"it has locked {partial[0]}", "wait for it, or give another --output-prefix"
            raise JobError("another process writes these files", why, fix) from error
        except OSError:
            pass  # some file systems have no locks
        if _complete(job, start):
            partial[0].unlink(missing_ok=True)
            yield []
            return
        yield partial
        for path in partial:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if record is not None:
            files.write_json(record, identity)
        for path, name in zip(partial, names, strict=True):
            path.replace(name)
        files.sync_folder(start.parent)


def _pieces(job: Job, number: int) -> Iterator[Piece]:
    """Yield the pieces of a part: the lines that start in its share of all bytes; a compressed file is not divided."""
    sizes = [path.stat().st_size for path in job.inputs]
    first, last = (sum(sizes) * part // job.parts for part in (number, number + 1))
    for path, size, end in zip(job.inputs, sizes, itertools.accumulate(sizes), strict=True):
        kind, start = documents.kind_of(path), end - size
        piece = Piece(str(path), kind, 0, None, job.keys[0], True, job.keys)
        if "." in kind:
            if first <= start < last:
                yield piece
            continue
        low, high = (min(max(place - start, 0), size) for place in (first, last))
        bounds = documents.line_starts(path, [*range(low, high, PIECE_BYTES), high])
        for place, stop in itertools.pairwise(bounds):
            yield dataclasses.replace(piece, start=place, stop=stop)
