"""How ids are written: pieces are encoded by a process per core, in order, and files are visible only when complete."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from training import files
from training.errors import JobError
from training.processes import die_with_parent
from training.token_cache import documents, encoding, layout
from training.token_cache.documents import Piece
from training.token_cache.encoding import Encoder, TokenizerState
from training.token_cache.layout import Array

NAME = "text"  # text.bin, text.idx
_prepared: list[Any] = []  # in a process that encodes: what _start_process got, then the encoder


@dataclass(frozen=True)
class Counts:
    """What the index of one file needs, in order."""

    lengths: Array  # int32: ids of each sequence
    sequences: Array  # int32: sequences of each document

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))


def build(
    folder: Path, pieces: Sequence[Piece], state: TokenizerState, wanted: str, processes: int, about: dict[str, Any]
) -> str:
    """Make `folder` with text.bin, text.idx and cache.json; return a line on how it was done."""
    started = time.monotonic()
    with files.whole_folder(folder) as partial:
        back_end, (counts,) = write([partial / f"{NAME}.bin"], pieces, state, wanted, processes)
        layout.write_index(partial / f"{NAME}.idx", state.type_code, counts.lengths, counts.sequences)
        number, tokens, seconds = len(counts.sequences), counts.tokens, time.monotonic() - started
        made = {"back_end": back_end, "documents": number, "tokens": tokens, "seconds": round(seconds, 1)}
        files.write_json(partial / "cache.json", {**about, **made})
    size = sum(Path(path).stat().st_size for path in about["files"]) / 1e6
    return (
        f"{number:,} documents, {size:,.1f} MB -> {tokens:,} tokens by {back_end} in {seconds:.1f} s"
        f" ({size / max(seconds, 1e-3):,.0f} MB/s)"
    )


def write(
    paths: Sequence[Path],
    pieces: Sequence[Piece],
    state: TokenizerState,
    wanted: str,
    processes: int,
    progress: Callable[[int, int], None] = lambda documents, size_bytes: None,
) -> tuple[str, list[Counts]]:
    """Write the ids of each key to its file, overwriting it; return the back end that was used, and each file's counts.

    `progress` gets the number of documents and bytes of each piece. Raises JobError for text that cannot be read.
    """
    back_end, *others = encoding.back_ends(wanted)
    try:
        return back_end, _write(paths, pieces, state, back_end, processes, progress)
    except encoding.Differs as error:
        if not others:
            raise JobError(f"{back_end} cannot be used", str(error), "let the script choose the back end") from error
        print(f"using the tokenizer back end {others[0]}, because {error}", flush=True)
        return others[0], _write(paths, pieces, state, others[0], processes, progress)


def _write(
    paths: Sequence[Path],
    pieces: Sequence[Piece],
    state: TokenizerState,
    back_end: str,
    processes: int,
    progress: Callable[[int, int], None],
) -> list[Counts]:
    for path in paths:
        path.write_bytes(b"")
    # spawn: a fork would copy the threads' locks, and a GPU's state
    context = multiprocessing.get_context("spawn")
    start = (state, back_end, [str(path) for path in paths], Turns(context, len(paths)))
    pool = ProcessPoolExecutor(processes, context, _start_process, start)
    lengths: list[list[Array]] = [[np.zeros(0, "<i4")] for _ in paths]
    sequences: list[list[Array]] = [[np.zeros(0, "<i4")] for _ in paths]
    try:
        if processes < 2 or (len(pieces) == 1 and "." not in pieces[0].kind):  # in this process
            _prepared[:] = start
            results: Iterator[Any] = itertools.starmap(_encode, enumerate(documents.expanded(pieces)))
        else:
            results = _in_order(pool, documents.expanded(pieces), 2 * processes)
        for size_bytes, counts in results:
            for key, (some_lengths, some_sequences) in enumerate(counts):
                lengths[key].append(some_lengths)
                sequences[key].append(some_sequences)
            progress(len(counts[0][1]), size_bytes)
    except BrokenProcessPool as error:
        why = f"{error}; a killed process often ran out of memory"
        raise JobError(
            "a process that tokenizes text has died",
            why,
            "read its message above; if memory ran out: --preprocessing_num_workers N (megatron-data: --workers N)",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
    return [Counts(np.concatenate(lengths[key]), np.concatenate(sequences[key])) for key in range(len(paths))]


def _in_order(pool: ProcessPoolExecutor, pieces: Iterable[Piece], ahead: int) -> Iterator[Any]:
    """Yield the results in order. Only `ahead` pieces wait at a time, because a piece can carry its lines."""
    waiting: deque[Future[Any]] = deque()
    for number, piece in enumerate(pieces):
        waiting.append(pool.submit(_encode, number, piece))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


class Turns:
    """Where the ids of a piece begin in each file: known when all pieces before it are encoded."""

    def __init__(self, context: Any, files: int) -> None:
        self.changed = context.Condition()
        self.places = context.RawArray("q", files + 1)  # the number of the next piece, then the end of each file

    def take(self, number: int, sizes: Sequence[int]) -> list[int]:
        """Wait for the turn of the piece, and return where its bytes begin in each file."""
        with self.changed:
            self.changed.wait_for(lambda: self.places[0] == number)
            starts = list(self.places[1:])
            self.places[:] = [number + 1, *(start + size for start, size in zip(starts, sizes, strict=True))]
            self.changed.notify_all()
        return starts


def _start_process(*start: Any) -> None:
    die_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as cores
    _prepared[:] = start


def _encode(number: int, piece: Piece) -> tuple[int, list[tuple[Array, Array]]]:
    """Write the ids of a piece's documents. Return its bytes, and lengths and sequences for each file as in Counts."""
    state, back_end, paths, turns = _prepared[:4]
    made: list[list[tuple[Array, Array, Array]]] = [[] for _ in paths]
    sizes = [0] * len(paths)
    try:
        if len(_prepared) == 4:
            _prepared.append(encoding.make(state, back_end))
        encoder: Encoder = _prepared[4]
        dtype = layout.CODES[state.type_code]
        try:
            for columns in documents.columns(piece):
                for key, values in enumerate(columns):
                    made[key].append(encoding.encode_documents(encoder, values, state.end, dtype))
        except (TypeError, UnicodeError) as error:
            raise documents.not_unicode(piece) or error from error
        sizes = [sum(ids.nbytes for ids, _, _ in parts) for parts in made]
    finally:  # also after an error, since the other processes wait
        starts = turns.take(number, sizes)
    for path, start, parts in zip(paths, starts, made, strict=True):
        with Path(path).open("r+b") as file:
            file.seek(start)
            for ids, _, _ in parts:
                file.write(ids.data)
    none = np.zeros(0, "<i4")
    return piece.size_bytes, [
        (np.concatenate([none, *(part[1] for part in parts)]), np.concatenate([none, *(part[2] for part in parts)]))
        for parts in made
    ]
