"""The dataset of a fine-tuning: found, read, and checked before the model is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import demo as corpus
from training import files, hub_cache
from training.errors import JobError, near_miss
from training.processes import Processes, once

if TYPE_CHECKING:
    from datasets import Dataset

READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


def python_docs(cache: Path, peers: Processes) -> tuple[Dataset, Path]:
    """Return the demo's dataset and the folder of its texts; rank 0 makes it, all ranks map the same file."""
    import datasets

    folder = once(peers, lambda: corpus.build(cache))
    arrow = folder.with_name(f"{folder.name}-arrow-{datasets.__version__}")

    def convert() -> None:
        if not arrow.is_dir():
            rows = datasets.Dataset.from_json(str(folder / "pairs.jsonl"), cache_dir=str(cache / "datasets"))
            with files.whole_folder(arrow) as partial:
                rows.save_to_disk(str(partial))

    once(peers, convert)
    return datasets.load_from_disk(str(arrow)), folder


def load_on_all(peers: Processes, name: str, config: str | None, split: str, streaming: bool) -> Any:
    """Return what `load` does, on each rank; rank 0 goes first, so that the others find its cache."""

    def fill_cache() -> None:
        load(name, config, split, streaming)

    if peers.world_size > 1 and not streaming:
        once(peers, fill_cache)
    return load(name, config, split, streaming)


def load(name: str, config: str | None, split: str, streaming: bool) -> Any:
    """Return one split of a hub dataset, a folder or a file. Raises JobError where it is not there or empty."""
    import datasets

    path = Path(name)
    if path.is_file() and path.stat().st_size == 0:
        raise JobError(f"the dataset {name!r} is empty", "the file has 0 bytes", "was it written to its end?")
    try:
        if path.is_dir() and any((path / mark).exists() for mark in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(name)
            found = found if isinstance(found, Mapping) else {"train": found}
        elif path.is_file():
            reader = READERS.get(path.suffix.lower())
            if reader is None:
                raise JobError(
                    f"cannot read {name!r}", f"known endings: {', '.join(READERS)}", "convert it to one of them"
                )
            found = datasets.load_dataset(reader, data_files=name, streaming=streaming)
        else:
            found = datasets.load_dataset(prefetched(name) or name, name=config, streaming=streaming)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetGenerationError) as error:
        raise not_loaded(name, error) from error
    if split not in found:
        known = ", ".join(found)
        raise JobError(
            f"the dataset {name!r} has no split {split!r}{near_miss(split, list(found))}",
            f"its splits are {known}",
            "--dataset_train_split NAME (or --dataset_test_split)",
        )
    return found[split]


def prefetched(name: str) -> str | None:
    """Return the folder of a hub dataset's files where there is no network: `datasets` would not look there."""
    found = hub_cache.snapshot("dataset", name, os.environ) if hub_cache.is_offline(os.environ) else None
    return str(found) if found else None


def check(rows: Any, name: str, text_field: str) -> str:
    """Return the kind of the dataset: messages, prompt-completion, text or tokens. Raises JobError for none of them."""
    first = next(iter(rows), None)
    if first is None:
        raise JobError(f"the dataset {name!r} is empty", "it has no rows", "look at the file, or name another split")
    columns = list(first)
    if "input_ids" in columns:
        return "tokens"
    if "prompt" in columns and "completion" in columns:
        return "prompt-completion"
    for column in ("messages", "conversations"):
        if column in columns:
            _check_messages(first[column], name, column)
            return "messages"
    if text_field in columns:
        if not isinstance(first[text_field], str):
            raise JobError(
                f"column {text_field!r} of {name!r} holds no text",
                f"it holds {first[text_field]!r:.60}",
                "name another one",
            )
        return "text"
    raise JobError(
        f"the dataset {name!r} has no column to train on{near_miss(text_field, columns)}",
        f"it has {', '.join(map(repr, columns))}; wanted: 'messages', 'prompt' and 'completion', or {text_field!r}",
        "--dataset_text_field COLUMN, or rename the columns",
    )


def _check_messages(messages: Any, name: str, column: str) -> None:
    good = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
    keys = set(messages[0]) if good and isinstance(messages[0], Mapping) else set()
    if not ({"role", "content"} <= keys or {"from", "value"} <= keys):
        raise JobError(
            f"column {column!r} of {name!r} holds no conversation",
            f"its first row is {messages!r:.80}",
            'write lists of {"role": "user"|"assistant"|"system", "content": TEXT}',
        )


def not_loaded(name: str, error: Exception) -> JobError:
    return JobError(f"cannot load the dataset {name!r}", _first_line(error), _where_to_look(name))


def _first_line(error: Exception) -> str:
    """Return the first line that says something; that of the cause where the error only wraps it."""
    cause = error.__cause__ or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[0] if lines else type(cause).__name__


def _where_to_look(name: str) -> str:
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return "HF_HUB_OFFLINE=1 is set: bring it into the cache first, or name a folder that the container sees"
    return f"give the path as the container sees it (is {name!r} mounted?), or check the name on the hub"
