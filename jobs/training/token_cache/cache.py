"""The token cache of a corpus: found, or made by rank 0 while the others wait."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from training import files
from training.errors import JobError
from training.processes import Processes, once
from training.token_cache import building, documents, encoding, identity, layout
from training.token_cache.blocks import Tokens
from training.token_cache.encoding import TokenizerState

FORMAT = 1  # raise it when the rules change by which documents are read: older caches are then left alone
PIECE_BYTES = 8 << 20
# What a build that was killed has left behind goes when nobody has written to it for so long.
ABANDONED_SECONDS = 900.0
BEAT_SECONDS = 20.0


@dataclass(frozen=True)
class Corpus:
    """Text as files: .jsonl, .json, .txt, .csv (each also .gz), .parquet, or the .arrow files of `datasets`."""

    files: tuple[Path, ...]
    column: str = "text"
    line_ends: bool = True  # a line of a .txt file is a document, with its line end


def of_rows(rows: Any, column: str, cache: Path) -> Corpus:
    """Return the corpus of a loaded `datasets.Dataset`: its Arrow files, or a copy where rows were picked from them.

    To be called on rank 0 before the others, since it may write.
    """
    paths = tuple(Path(file["filename"]) for file in rows.cache_files)
    if column not in rows.column_names:
        raise JobError(f"the dataset has no column {column!r}", f"it has {rows.column_names}", "name one of these")
    if paths and rows._indices is None and _rows_in(paths) == len(rows):
        return Corpus(paths, column)
    copy = cache / "rows" / f"{rows._fingerprint}-{column}.parquet"
    if not copy.is_file():
        copy.parent.mkdir(parents=True, exist_ok=True)
        partial = files.unfinished(copy)
        rows.select_columns([column]).to_parquet(str(partial))
        partial.replace(copy)
    return Corpus((copy,), column)


def open_tokens(
    corpus: Corpus,
    tokenizer: Any,
    cache: Path,
    peers: Processes,
    *,
    end_of_document: bool = False,
    back_end: str = "auto",
    processes: int | None = None,
    anew: bool = False,
) -> Tokens:
    """Return the tokens of a corpus, the same file on every rank; rank 0 makes it where it is not there yet.

    `tokenizer` is one of transformers; ids are those of `tokenizer(text)`, and with `end_of_document` its end token
    behind each. `cache` is the folder that runs share; `anew` does not look for what is there. `processes`: as many as
    there are cores where None. Raises JobError for text that cannot be read.
    """

    def make() -> Path:
        state = identity.state_of(tokenizer, end_of_document)
        return _make(corpus, tokenizer, state, cache, Wish(back_end, processes, anew))

    folder = _once_for_long(peers, make)
    found = Tokens(layout.read(folder / building.NAME))
    if peers.first:
        print(f"tokens: {found.tokens:,} of {len(found):,} documents, {found.file.ids.dtype}, {folder}", flush=True)
    return found


@dataclass(frozen=True)
class Wish:
    """How a cache is to be made; no part of its key, since the ids are the same."""

    back_end: str = "auto"
    processes: int | None = None
    anew: bool = False


def _make(corpus: Corpus, tokenizer: Any, state: TokenizerState, cache: Path, wish: Wish) -> Path:
    if not corpus.files:
        raise JobError("there is no text", "the list of files is empty", "name a file")
    for path in corpus.files:
        documents.kind_of(path)
    options = {"format": FORMAT, "column": corpus.column, "line_ends": corpus.line_ends}
    options["kinds"] = [documents.kind_of(path) for path in corpus.files]
    key = identity.key(identity.content(corpus.files, cache / "identities"), state, options)
    folder = cache / f"tokens-{key}"
    if wish.anew or not _whole(folder):
        with _alone(cache, folder.name):
            _sweep(cache)
            if wish.anew:
                _set_aside(folder)
            if not _whole(folder):
                _build(folder, corpus, tokenizer, state, wish, options)
    return folder


def _whole(folder: Path) -> bool:
    """True where a good cache is there; a damaged one is set aside and removed."""
    if not folder.is_dir():
        return False
    try:
        layout.read(folder / building.NAME)
        return True
    except (layout.BrokenCache, OSError, ValueError) as error:
        print(f"the token cache {folder} is damaged ({error}): it is made anew", flush=True)
        _set_aside(folder)
        return False


def _set_aside(folder: Path) -> None:
    """Take a cache away; a job that has mapped it keeps its files."""
    aside = files.unfinished(folder)
    with contextlib.suppress(OSError):
        folder.rename(aside)
        shutil.rmtree(aside)


def _build(folder: Path, corpus: Corpus, tokenizer: Any, state: TokenizerState, wish: Wish,
           options: dict[str, Any]) -> None:  # fmt: skip
    processes = wish.processes or len(os.sched_getaffinity(0))
    size_bytes = sum(path.stat().st_size for path in corpus.files)
    share = size_bytes // (4 * processes) + 1
    pieces = documents.plan(corpus.files, corpus.column, corpus.line_ends, max(1 << 20, min(PIECE_BYTES, share)))
    about = {**options, "files": [str(path.absolute()) for path in corpus.files]}
    if identity.is_fast(state) and _speaks_for_itself(tokenizer, state):
        line = building.build(folder, pieces, state, wish.back_end, processes, about)
    else:
        line = building.build_in_place(folder, pieces, state, encoding.Slow(tokenizer), about)
    print(f"tokenized {line}", flush=True)


def _speaks_for_itself(tokenizer: Any, state: TokenizerState) -> bool:
    """True where transformers adds nothing of its own to the tokenizer inside."""
    inner = encoding.HuggingFace(state).encode(encoding.HARD)
    outer = encoding.Slow(tokenizer).encode(encoding.HARD)
    return all(np.array_equal(ours, theirs) for ours, theirs in zip(inner, outer, strict=True))


@contextlib.contextmanager
def _alone(cache: Path, name: str) -> Iterator[None]:
    """Hold the lock of a name, where the file system has locks: two builders do the work once."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".{name}.lock").open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sweep(cache: Path) -> None:
    """Remove what builds that were killed have left, once it is old."""
    for path in cache.glob(".tokens-*.partial"):
        with contextlib.suppress(OSError):
            newest = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
            if time.time() - newest > ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _rows_in(paths: Sequence[Path]) -> int:
    import pyarrow

    total = 0
    for path in paths:
        with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
            total += sum(batch.num_rows for batch in stream)
    return total


def _once_for_long(peers: Processes, make: Any) -> Path:
    """Return what rank 0 makes, on every rank; collectives in between keep a long wait from ending as a time-out."""
    if peers.world_size == 1:
        return Path(make())
    result: list[Any] = []

    def work() -> None:
        try:
            result.append(make())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=work, daemon=True)
    if peers.first:
        thread.start()

    def beat() -> bool:
        thread.join(BEAT_SECONDS)
        return not thread.is_alive()

    while not once(peers, beat):
        pass

    def answer() -> Path:
        if isinstance(result[0], BaseException):
            raise result[0]
        return Path(result[0])

    return once(peers, answer)
