"""Datasets: a name on the hub, a folder or a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.errors import JobError, near_miss
from training.models import is_offline
from training.processes import Processes, Result, once_slowly

if TYPE_CHECKING:
    from trl import ScriptArguments

READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


def load_on_all(script_args: ScriptArguments, split: str, processes: Processes, beat: Callable[[], None]) -> Any:
    """Return a split on each rank; rank 0 loads it first, so that the others find its cache."""
    streaming = script_args.dataset_streaming
    arguments = (script_args.dataset_name, script_args.dataset_config, split, streaming)
    return load(*arguments) if streaming else first_on_rank_0(lambda: load(*arguments), processes, beat)


def first_on_rank_0(load: Callable[[], Result], processes: Processes, beat: Callable[[], None]) -> Result:
    """Return on each rank what `load` returns; the others call it when rank 0 has filled the cache.

    A download can take longer than a collective may wait, or the batch script, which takes it for a hang.
    """
    if processes.world_size == 1:
        return once_slowly(processes, load, beat)

    def fill_cache() -> None:
        load()

    once_slowly(processes, fill_cache, beat)
    return load()


def load(name: str, config: str | None, split: str, streaming: bool = False) -> Any:
    """Return one split. Raises JobError if it is not there or empty."""
    found = load_splits(name, config, streaming)
    if split not in found:
        raise JobError(
            f"the dataset {name!r} has no split {split!r}{near_miss(split, found)}",
            f"its splits are {', '.join(found)}",
            "choose a split: --dataset_train_split NAME or --dataset_test_split NAME, or set --eval_strategy no",
        )
    return found[split]


def load_splits(name: str, config: str | None, streaming: bool = False, **options: Any) -> Mapping[str, Any]:
    """Return all splits by name; `options` are those of `datasets.load_dataset`. Raises JobError."""
    import datasets

    path = Path(name)
    if path.is_file() and path.stat().st_size == 0:
        raise JobError(f"the dataset {name!r} is empty", "the file has 0 bytes", "check how the file was written")
    try:
        if path.is_dir() and any((path / mark).exists() for mark in ("state.json", "dataset_dict.json")):
            saved = datasets.load_from_disk(name)
            return saved if isinstance(saved, Mapping) else {"train": saved}
        if path.is_file():
            reader = READERS.get(path.suffix.lower())
            if reader is None:
                raise JobError(
                    f"cannot read {name!r}",
                    f"the name of the file must end in one of {', '.join(READERS)}",
                    "convert the file to one of these formats",
                )
            splits: Mapping[str, Any] = datasets.load_dataset(reader, data_files=name, streaming=streaming, **options)
        else:
            splits = datasets.load_dataset(
                fetched(name) or full_name(name), name=config, streaming=streaming, **options
            )
        return splits
    except UnicodeDecodeError as error:
        raise not_utf8(name, error) from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetGenerationError) as error:
        if isinstance(error.__cause__, UnicodeDecodeError):
            raise not_utf8(name, error.__cause__) from error
        raise not_loaded(name, error) from error


def full_name(name: str) -> str:
    """Return the name with its owner: the hub still redirects `wikitext`, but huggingface_hub 2 no longer reads it."""
    if "/" in name or is_offline():
        return name
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(name).id)
    except Exception:  # of the HTTP library, which differs between versions; `load_dataset` reports what is wrong
        return name


def fetched(name: str) -> str | None:
    """Return the folder of a dataset of the hub that was fetched, if there is no network: `datasets` cannot use it.

    Source: huggingface_hub, "Understand caching".
    """
    if not is_offline():
        return None
    home = os.environ.get("HF_HOME") or Path(os.environ.get("HOME") or "/") / ".cache" / "huggingface"
    repository = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub") / f"datasets--{name.replace('/', '--')}"
    try:
        commit = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    folder = repository / "snapshots" / commit
    return str(folder) if folder.is_dir() else None


def not_utf8(name: str, error: UnicodeDecodeError) -> JobError:
    return JobError(
        f"{name!r} is not UTF-8",
        str(error),
        "convert it to UTF-8; `file` may tell its encoding; for Latin-1: iconv -f LATIN1 -t UTF-8 OLD > NEW",
    )


def not_loaded(name: str, error: Exception) -> JobError:
    """Return the error of a dataset, with the first line of the library's, or of its cause."""
    cause = error.__cause__ or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    path = Path(name)
    if path.exists():
        fix = "check that the file has rows and is not cut off" if path.is_file() else "check the files in that folder"
    elif path.suffix.lower() in READERS or name.startswith((".", "/")):
        fix = f"give the path inside the container, and mount the folder of {name!r}"
    elif is_offline():
        fix = "fix the problem named above; if it was not found: run `runner prefetch JOB` (HF_HUB_OFFLINE=1 is set)"
    else:
        fix = "fix the problem named above; if it was not found, check its name, or give a path inside the container"
    return JobError(f"cannot load the dataset {name!r}", lines[0] if lines else type(cause).__name__, fix)
