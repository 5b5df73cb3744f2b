"""How the cache is made: pieces are encoded by a process per core, joined in order, and visible only when complete."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from training import files
from training.errors import JobError
from training.token_cache import encoding, layout, worker
from training.token_cache.documents import Piece
from training.token_cache.encoding import Encoder, TokenizerState

NAME = "text"  # text.bin, text.idx
JOBS = Path(__file__).resolve().parents[2]
Encode = Callable[[Piece, Path], Any]


def build(folder: Path, pieces: Sequence[Piece], state: TokenizerState, wanted: str, processes: int,
          about: dict[str, Any]) -> str:  # fmt: skip
    """Make `folder` with text.bin, text.idx and cache.json; return a line on how it was done."""
    started = time.monotonic()
    with files.whole_folder(folder) as partial:
        tries = encoding.back_ends(wanted)
        for number, back_end in enumerate(tries):
            try:
                with _encoders(partial, pieces, state, back_end, processes) as encode:
                    counts = _join(partial, pieces, state.type_code, encode, processes)
                break
            except encoding.Differs as error:
                if number + 1 == len(tries):
                    fix = "leave the choice to the script"
                    raise JobError(f"{back_end} cannot be used", str(error), fix) from error
                print(f"tokenizer back end: {tries[number + 1]}, since {error}", flush=True)
        return _finish(partial, back_end, counts, time.monotonic() - started, about)


def build_in_place(folder: Path, pieces: Sequence[Piece], state: TokenizerState, encoder: Encoder,
                   about: dict[str, Any]) -> str:  # fmt: skip
    """Do the same in this process, for an encoder that other processes cannot have."""
    started = time.monotonic()
    with files.whole_folder(folder) as partial:
        counts = _join(
            partial, pieces, state.type_code, lambda piece, path: worker.encode_piece(encoder, state, piece, path)
        )
        return _finish(partial, encoder.name, counts, time.monotonic() - started, about)


def _finish(partial: Path, back_end: str, counts: tuple[int, int], seconds: float, about: dict[str, Any]) -> str:
    documents, tokens = counts
    made = {"back_end": back_end, "documents": documents, "tokens": tokens, "seconds": round(seconds, 1)}
    files.write_json(partial / "cache.json", {**about, **made})
    size = sum(Path(path).stat().st_size for path in about["files"]) / 1e6
    return (
        f"{documents:,} documents, {size:,.1f} MB -> {tokens:,} tokens by {back_end} in {seconds:.1f} s"
        f" ({size / max(seconds, 1e-3):,.0f} MB/s)"
    )


def _join(partial: Path, pieces: Sequence[Piece], code: int, encode: Encode, threads: int = 1) -> tuple[int, int]:
    """Encode all pieces and put their ids behind each other; return the numbers of documents and tokens."""
    lengths: list[layout.Array] = []
    # Each thread waits for a process. Pieces that are encoded ahead of their turn wait in files of their own.
    with ThreadPoolExecutor(threads) as pool, (partial / f"{NAME}.bin").open("wb") as whole:
        paths = [partial / f"piece-{number:06}" for number in range(len(pieces))]
        futures = [pool.submit(encode, piece, path) for piece, path in zip(pieces, paths, strict=True)]
        try:
            for future, path in zip(futures, paths, strict=True):
                future.result()
                lengths.append(np.fromfile(path.with_suffix(".lengths"), "<i4"))
                _append(path.with_suffix(".ids"), whole)
                path.with_suffix(".lengths").unlink()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    counted = np.concatenate(lengths) if lengths else np.zeros(0, "<i4")
    layout.write_index(partial / f"{NAME}.idx", code, counted)
    return len(counted), int(counted.sum(dtype=np.int64))


def _append(path: Path, whole: IO[bytes]) -> None:
    with path.open("rb") as part:
        shutil.copyfileobj(part, whole, 1 << 20)
    path.unlink()


@contextlib.contextmanager
def _encoders(partial: Path, pieces: Sequence[Piece], state: TokenizerState, back_end: str,
              processes: int) -> Iterator[Encode]:  # fmt: skip
    """Yield a function that encodes a piece: in this process for a single one, else in processes of their own."""
    if len(pieces) < 2:
        encoder = encoding.make(state, back_end)
        yield lambda piece, path: worker.encode_piece(encoder, state, piece, path)
        return
    note = partial / "tokenizer-state.json"
    note.write_text(json.dumps(asdict(state)), encoding="utf-8")
    idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
    started = [_Process(note, back_end) for _ in range(min(processes, len(pieces)))]
    for process in started:
        idle.put(process)

    def encode(piece: Piece, path: Path) -> None:
        process = idle.get()
        try:
            process.ask({"piece": asdict(piece), "path": str(path)})
        finally:
            idle.put(process)

    try:
        yield encode
    finally:
        for process in started:
            process.end()
        note.unlink(missing_ok=True)


class _Process:
    """A process that encodes, and the pipe to it."""

    def __init__(self, note: Path, back_end: str) -> None:
        # One thread each: there are as many processes as cores.
        search = os.pathsep.join(filter(None, (str(JOBS), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": search}
        command = (sys.executable, "-m", "training.token_cache.worker")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment
        )
        self.first: dict[str, Any] | None = {"state": str(note), "back_end": back_end}

    def ask(self, request: dict[str, Any]) -> None:
        """Send a request and wait for the answer. Raises the error that it holds, or that the process has ended."""
        if self.first:
            first, self.first = self.first, None
            self._exchange(first)
        self._exchange(request)

    def _exchange(self, request: dict[str, Any]) -> None:
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self.process.wait()
            why = f"its exit code is {code}" + (": killed, as where memory runs out" if code == -9 else "")
            raise JobError("a process that encodes text has ended", why, "see its message above; more memory?")
        answer = json.loads(line)
        if "error" in answer:
            raise JobError(*answer["error"])
        if "differs" in answer:
            raise encoding.Differs(answer["differs"])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
