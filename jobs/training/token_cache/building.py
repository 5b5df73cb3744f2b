"""How the cache is made: pieces are encoded by a process per core, joined in order, and visible only when complete."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from training import files
from training.errors import JobError
from training.token_cache import documents, encoding, layout
from training.token_cache.documents import Piece
from training.token_cache.encoding import Encoder, TokenizerState

NAME = "text"  # text.bin, text.idx
_prepared: list[Any] = []  # in a process that encodes: state and back end, then the encoder


def build(
    folder: Path, pieces: Sequence[Piece], state: TokenizerState, wanted: str, processes: int, about: dict[str, Any]
) -> str:
    """Make `folder` with text.bin, text.idx and cache.json; return a line on how it was done."""
    started = time.monotonic()
    with files.whole_folder(folder) as partial:
        back_end, *others = encoding.back_ends(wanted)
        try:
            counts = _join(partial, pieces, state, back_end, processes)
        except encoding.Differs as error:
            if not others:
                raise JobError(
                    f"{back_end} cannot be used", str(error), "let the script choose the back end"
                ) from error
            back_end = others[0]
            print(f"using the tokenizer back end {back_end}, because {error}", flush=True)
            counts = _join(partial, pieces, state, back_end, processes)
        number, tokens = counts
        seconds = time.monotonic() - started
        made = {"back_end": back_end, "documents": number, "tokens": tokens, "seconds": round(seconds, 1)}
        files.write_json(partial / "cache.json", {**about, **made})
    size = sum(Path(path).stat().st_size for path in about["files"]) / 1e6
    return (
        f"{number:,} documents, {size:,.1f} MB -> {tokens:,} tokens by {back_end} in {seconds:.1f} s"
        f" ({size / max(seconds, 1e-3):,.0f} MB/s)"
    )


def _join(
    partial: Path, pieces: Sequence[Piece], state: TokenizerState, back_end: str, processes: int
) -> tuple[int, int]:
    """Encode all pieces and put their ids behind each other; return the numbers of documents and tokens."""
    lengths: list[layout.Array] = []
    paths = [partial / f"piece-{number:06}" for number in range(len(pieces))]
    # spawn: a fork would copy the threads' locks, and a GPU's state
    pool = ProcessPoolExecutor(
        min(processes, len(pieces)), multiprocessing.get_context("spawn"), _start_process, (state, back_end)
    )
    try:
        if len(pieces) < 2:  # in this process
            _prepared[:] = [state, back_end]
            counts: Any = map(_encode, pieces, paths)
        else:
            counts = pool.map(_encode, pieces, paths)
        with (partial / f"{NAME}.bin").open("wb") as whole:
            for count, path in zip(counts, paths, strict=True):
                lengths.append(count)
                with path.open("rb") as part:
                    shutil.copyfileobj(part, whole, 1 << 20)
                path.unlink()
    except BrokenProcessPool as error:
        why = f"{error}; a killed process often ran out of memory"
        raise JobError(
            "a process that tokenizes text has died",
            why,
            "read its message above; if memory ran out, use fewer processes: --preprocessing_num_workers N",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
    counted = np.concatenate(lengths) if lengths else np.zeros(0, "<i4")
    layout.write_index(partial / f"{NAME}.idx", state.type_code, counted)
    return len(counted), int(counted.sum(dtype=np.int64))


def _start_process(state: TokenizerState, back_end: str) -> None:
    import ctypes
    import signal

    die_with_parent = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(die_with_parent, int(signal.SIGKILL))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as cores
    _prepared[:] = [state, back_end]


def _encode(piece: Piece, path: Path) -> layout.Array:
    """Write the ids of a piece's documents, and return their lengths."""
    state, back_end = _prepared[:2]
    if len(_prepared) == 2:
        _prepared.append(encoding.make(state, back_end))
    encoder: Encoder = _prepared[2]
    lengths: list[layout.Array] = []
    with path.open("wb") as file:
        for texts in documents.read(piece):
            ids, counts = encoding.close_documents(*encoder.encode(texts), state.end)
            file.write(ids.astype(layout.CODES[state.type_code]).tobytes())
            lengths.append(counts)
    return np.concatenate(lengths).astype("<i4") if lengths else np.zeros(0, "<i4")
