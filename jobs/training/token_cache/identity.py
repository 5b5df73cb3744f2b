"""The key of a cache: the bytes of the data, the tokenizer, the options."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from training import files
from training.errors import JobError
from training.token_cache.encoding import TokenizerState
from training.token_cache.layout import dtype_code

CHUNK_BYTES = 32 << 20
# A file changed twice within its clock's tick keeps its time: one that is younger than this is read again.
SETTLED_SECONDS = 2.0


def content(paths: Sequence[Path], memory: Path) -> list[str]:
    """Return a digest of each file's bytes; `memory` keeps those of files whose size and times are the same."""
    return [_remembered(path, memory) for path in paths]


def digest(path: Path) -> str:
    """Return the SHA-256 of the digests of a file's chunks: chunks are read at the same time."""
    with path.open("rb") as file:
        starts = range(0, max(1, os.fstat(file.fileno()).st_size), CHUNK_BYTES)

        def chunk(start: int) -> bytes:
            return hashlib.sha256(os.pread(file.fileno(), CHUNK_BYTES, start)).digest()

        with ThreadPoolExecutor(min(len(starts), len(os.sched_getaffinity(0)))) as pool:
            return hashlib.sha256(b"".join(pool.map(chunk, starts))).hexdigest()


def key(contents: Sequence[str], state: TokenizerState, options: dict[str, Any]) -> str:
    """Return the name of a cache: another one for other data, another tokenizer or other options."""
    described = [list(contents), state.text, state.special_tokens_as_text, state.end, state.type_code, options]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:20]


def state_of(tokenizer: Any, end_of_document: bool) -> TokenizerState:
    """Return what decides a tokenizer's ids. Raises JobError if it is written in Python, or lacks an end token."""
    end = tokenizer.eos_token_id if end_of_document else None
    if end_of_document and end is None:
        why = "--append_eos puts an end token after each document"
        raise JobError("the tokenizer has no end token", why, "leave out --append_eos, or use a tokenizer with one")
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None or not hasattr(inner, "to_str"):
        raise JobError(
            "the tokenizer is not a fast tokenizer",
            f"{type(tokenizer).__name__} is written in Python, and would take days for a large text",
            "use a model with a tokenizer.json, without --use_slow_tokenizer; for clm, --streaming works with this one",
        )
    truncation, padding = inner.truncation, inner.padding
    inner.no_truncation()
    inner.no_padding()
    text = inner.to_str()
    if truncation:
        inner.enable_truncation(**truncation)
    if padding:
        inner.enable_padding(**padding)
    as_text = bool(getattr(tokenizer, "split_special_tokens", False))
    return TokenizerState(text, as_text, end, dtype_code(len(tokenizer)))


def _remembered(path: Path, memory: Path) -> str:
    state = path.stat()
    mark: list[Any] = [str(path.absolute()), state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
    note = memory / f"{hashlib.sha256(mark[0].encode()).hexdigest()[:20]}.json"
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
        if known["file"] == mark:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    settled = time.time() - state.st_mtime > SETTLED_SECONDS
    found = digest(path)
    if path.stat().st_mtime_ns != state.st_mtime_ns or path.stat().st_size != state.st_size:
        why = "its size or modification time is different"
        raise JobError(f"{path} changed while it was read", why, "start again when the file is complete")
    if settled:
        files.write_json(note, {"file": mark, "sha256": found})
    return found
