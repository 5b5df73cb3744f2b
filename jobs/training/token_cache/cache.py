"""The token cache of a corpus: found, or made by rank 0 while the others wait."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from training import files
from training.errors import JobError
from training.processes import Processes, once_slowly
from training.token_cache import building, documents, encoding, identity, layout
from training.token_cache.blocks import Tokens
from training.token_cache.encoding import TokenizerState

FORMAT = 1  # change it with the rules by which documents are read: caches of other formats are not used
PIECE_BYTES = 8 << 20
# The partial folder of a build is removed when nothing was written to it for so long.
ABANDONED_SECONDS = 900.0


@dataclass(frozen=True)
class Corpus:
    """Text as files: .jsonl, .json, .txt, .csv (each also .gz), .parquet, or the .arrow files of `datasets`."""

    files: tuple[Path, ...]
    column: str = "text"
    line_ends: bool = True  # a line of a .txt file is a document, with its line end


def of_rows(rows: Any, column: str, cache: Path) -> Corpus:
    """Return the corpus of a loaded `datasets.Dataset`: its Arrow files, or a copy if it has only some of their rows.

    Call it on rank 0 only: it may write.
    """
    paths = tuple(Path(file["filename"]) for file in rows.cache_files)
    if column not in rows.column_names:
        raise JobError(
            f"the dataset has no column {column!r}", f"its columns are {rows.column_names}", "choose one of its columns"
        )
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
    processes: Processes,
    *,
    end_of_document: bool = False,
    back_end: str = "auto",
    workers: int | None = None,
    rebuild: bool = False,
    beat: Callable[[], None] = lambda: None,
) -> Tokens:
    """Return the tokens of a corpus, the same file on every rank; rank 0 makes it if it does not exist.

    `tokenizer` is one of transformers; ids are those of `tokenizer(text)`, with its end token after each document if
    `end_of_document`. `cache` is the folder that runs share. `workers`: as many as there are cores if None. `beat` is
    called while the others wait for rank 0. Raises JobError for text that cannot be read.
    """

    def make() -> Path:
        state = identity.state_of(tokenizer, end_of_document)
        return _make(corpus, tokenizer, state, cache, Options(back_end, workers, rebuild))

    folder = once_slowly(processes, make, beat)
    found = Tokens(layout.read(folder / building.NAME))
    if processes.first:
        print(f"tokens: {found.tokens:,} of {len(found):,} documents, {found.file.ids.dtype}, {folder}", flush=True)
    return found


@dataclass(frozen=True)
class Options:
    """How a cache is made; not part of its key, since the ids are the same."""

    back_end: str = "auto"
    workers: int | None = None
    rebuild: bool = False


def _make(corpus: Corpus, tokenizer: Any, state: TokenizerState, cache: Path, how: Options) -> Path:
    if not corpus.files:
        raise JobError("there is no text", "the list of files is empty", "give at least one file")
    for path in corpus.files:
        documents.kind_of(path)
    options = {"format": FORMAT, "column": corpus.column, "line_ends": corpus.line_ends}
    options["kinds"] = [documents.kind_of(path) for path in corpus.files]
    key = identity.key(identity.content(corpus.files, cache / "identities"), state, options)
    folder = cache / f"tokens-{key}"
    if how.rebuild or not _whole(folder):
        with _alone(cache, folder.name):
            _sweep(cache)
            if how.rebuild:
                _set_aside(folder)
            if not _whole(folder):
                _build(folder, corpus, tokenizer, state, how, options)
    return folder


def _whole(folder: Path) -> bool:
    """Return whether there is a good cache; a damaged one is removed."""
    if not folder.is_dir():
        return False
    try:
        layout.read(folder / building.NAME)
        return True
    except (layout.BrokenCache, OSError, ValueError) as error:
        print(f"the token cache {folder} is damaged ({error}), so it is rebuilt", flush=True)
        _set_aside(folder)
        return False


def _set_aside(folder: Path) -> None:
    """Remove a cache; a job that has mapped it keeps its files."""
    aside = files.unfinished(folder)
    with contextlib.suppress(OSError):
        folder.rename(aside)
        shutil.rmtree(aside)


def _build(folder: Path, corpus: Corpus, tokenizer: Any, state: TokenizerState, how: Options,
           options: dict[str, Any]) -> None:  # fmt: skip
    processes = how.workers or len(os.sched_getaffinity(0))
    size_bytes = sum(path.stat().st_size for path in corpus.files)
    share = size_bytes // (4 * processes) + 1
    pieces = documents.plan(corpus.files, corpus.column, corpus.line_ends, max(1 << 20, min(PIECE_BYTES, share)))
    about = {**options, "files": [str(path.absolute()) for path in corpus.files]}
    refuse_own_rules(tokenizer, state)
    print(f"tokenized {building.build(folder, pieces, state, how.back_end, processes, about)}", flush=True)


def refuse_own_rules(tokenizer: Any, state: TokenizerState) -> None:
    """Raise JobError if the tokenizer's Python class gives other ids than the `tokenizers` object inside."""
    inner = encoding.HuggingFace(state).encode(encoding.HARD)
    outer = tokenizer(list(encoding.HARD), return_attention_mask=False)["input_ids"]
    if not all(map(np.array_equal, inner, outer)):
        why = f"{type(tokenizer).__name__} has rules in Python, and returns other ids than its tokenizer.json"
        raise JobError(
            "this tokenizer cannot tokenize the text in advance",
            why,
            "use another tokenizer; for clm, --streaming works with this one",
        )


@contextlib.contextmanager
def _alone(cache: Path, name: str) -> Iterator[None]:
    """Hold the lock of a name, so that two builders do the work once; some file systems have no locks."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".{name}.lock").open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sweep(cache: Path) -> None:
    """Remove what killed builds have left, once it is old."""
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
