"""Which files of a repository on the hub a job reads, and where a file with a URL is in the cache."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training.errors import JobError

# Weights in other formats, which nothing here loads where there are safetensors; and copies of another layout.
OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.ot", "*.onnx", "*.gguf", "*.tflite", "*.mlmodel")
OTHER_FOLDERS = ("original/*", "onnx/*", "openvino/*", "coreml/*", "flax/*", "gguf/*")
TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken")
DATA_SUFFIXES = (".parquet", ".json", ".jsonl", ".csv", ".txt", ".arrow", ".gz", ".zst", ".zip")


def choose(kind: str, part: str, listed: Mapping[str, int], card: Mapping[str, Any]) -> dict[str, int]:
    """Return the files that a job reads, with their sizes, of those `listed`; `card` is the repository's."""
    names = [name for name in listed if not name.startswith(".")]
    if kind == "model":
        if part == "tokenizer":
            names = [name for name in names if "/" not in name and matches(name, TOKENIZER_FILES)]
        elif any(name.endswith(".safetensors") for name in names):
            names = [name for name in names if not matches(name, (*OTHER_FORMATS, *OTHER_FOLDERS))]
    elif part:
        patterns = configuration(card, part)
        if patterns:
            data = [name for name in names if name.lower().endswith(DATA_SUFFIXES) and not name.endswith(".md")]
            names = [name for name in names if name not in data or matches(name, patterns)]
    return {name: listed[name] for name in sorted(names)}


def configuration(card: Mapping[str, Any], part: str) -> tuple[str, ...]:
    """Return the patterns of a dataset's configuration as its card says them; none where it does not."""
    for entry in card.get("configs") or ():
        if entry.get("config_name") == part:
            found: list[str] = []
            for item in as_list(entry.get("data_files")):
                found += [str(path) for path in as_list(item.get("path") if isinstance(item, Mapping) else item)]
            return tuple(pattern.replace("**", "*").removeprefix("./") for pattern in found)
    return ()


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def local(word: str | None) -> str | None:
    """Return the path of URL#sha256=CHECKSUM in the cache, where `runner prefetch` puts it; other words stay.

    Raises JobError if the file is not in the cache.
    """
    url, mark, checksum = (word or "").rpartition("#sha256=")
    if not mark or "://" not in url:
        return word
    homes = (os.environ.get("HF_HOME"), os.environ.get("RUNNER_CACHE", "") + "/huggingface")
    for home in filter(None, homes):
        for path in (Path(home) / "hub" / "files" / "snapshots" / checksum.lower()).glob("[!.]*"):
            return str(path)
    raise JobError(f"{url} is not in the cache", "a job does not download files", "run `runner prefetch JOB` with the"
                   " same arguments")  # fmt: skip
