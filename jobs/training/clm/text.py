"""The documents of `clm`: found, split and counted before anything is tokenized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.course_arguments import PYTHON_DOCS
from training.data import corpus, reading
from training.errors import JobError, near_miss
from training.processes import once
from training.settings import Settings

if TYPE_CHECKING:
    from training.course import Course


@dataclass(frozen=True)
class Text:
    """Documents in their order, as rows of a dataset with the text in one column."""

    rows: Any  # datasets.Dataset, or IterableDataset with --streaming
    column: str


def find(course: Course) -> tuple[Text | None, Text | None]:
    """Return what is trained on and what is held out; None for what is not asked for."""
    settings, peers = course.settings, course.peers
    if settings["dataset_name"] == PYTHON_DOCS:
        splits: Mapping[str, Any] = {"train": _documentation(course)}
    else:
        if peers.world_size > 1 and not settings["streaming"]:
            once(peers, lambda: _load(settings) and None)  # the others find its cache
        splits = _load(settings)
    train, held_out = _split(splits, settings)
    return (
        _checked(train, settings, "train") if settings["do_train"] else None,
        _checked(held_out, settings, "validation") if settings["do_eval"] else None,
    )


def _documentation(course: Course) -> Any:
    import datasets

    folder = reading.python_docs(course.run.cache, course.peers)[1]
    return datasets.Dataset.from_dict({"text": list(corpus.texts(folder))})


def _load(settings: Settings) -> Mapping[str, Any]:
    """Return the splits of a dataset of the hub, a folder, or files."""
    import datasets

    name, streaming, cache = settings["dataset_name"], settings["streaming"], settings["cache_dir"]
    try:
        if not name:
            wanted = {"train": settings["train_file"], "validation": settings["validation_file"]}
            return {split: _read(path, settings) for split, path in wanted.items() if path}
        if Path(name).is_file():
            return {"train": _read(name, settings)}
        if Path(name).is_dir() and any((Path(name) / mark).exists() for mark in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(name)
            return found if isinstance(found, Mapping) else {"train": found}
        splits: Mapping[str, Any] = datasets.load_dataset(
            name, settings["dataset_config_name"], cache_dir=cache, token=settings["token"], streaming=streaming
        )
        return splits
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetGenerationError) as error:
        what = name or settings["train_file"] or settings["validation_file"]
        raise reading.not_loaded(what, error) from error


def _read(path: str, settings: Settings) -> Any:
    import datasets

    reader = reading.READERS[Path(path).suffix.lower()]
    options = {"keep_linebreaks": settings["keep_linebreaks"]} if reader == "text" else {}
    files = sorted(str(found) for found in Path(path).parent.glob(Path(path).name)) if "*" in path else path
    return datasets.load_dataset(
        reader,
        data_files=files,
        split="train",
        cache_dir=settings["cache_dir"],
        streaming=settings["streaming"],
        **options,
    )


def _split(splits: Mapping[str, Any], settings: Settings) -> tuple[Any, Any]:
    """Return the rows to train on and those held out: a split of that name, or the first rows of the training data."""
    train = splits.get("train")
    if train is None and settings["do_train"]:
        raise JobError("there is no split 'train'", f"the splits are {', '.join(splits)}", "name another dataset")
    held_out = splits.get("validation")
    if held_out is None and settings["do_eval"]:
        if settings["streaming"]:
            raise JobError(
                "--do_eval on a stream that has no split 'validation'",
                "a share of a stream cannot be held out: nobody knows its length",
                "--validation_file FILE, or no --streaming",
            )
        count = max(1, round(len(train) * settings["validation_split_percentage"] / 100))
        held_out, train = train.select(range(min(count, len(train)))), train.select(range(count, len(train)))
    if train is not None and settings["data_percentage"] < 100:
        train = train.select(range(max(1, round(len(train) * settings["data_percentage"] / 100))))
    return train, held_out


def _checked(rows: Any, settings: Settings, split: str) -> Text:
    """Return the rows with the column to train on. Raises JobError where there are no rows or no such column."""
    first = next(iter(rows), None)
    name = settings["dataset_name"] or settings[f"{split}_file"] or settings["train_file"]
    if first is None:
        raise JobError(f"{name!r} has no documents for {split}", "it has no rows", "look at the file, or the split")
    columns = [column for column, value in first.items() if isinstance(value, str)]
    wanted = settings["text_column"] or ("text" if "text" in columns or len(columns) != 1 else columns[0])
    if wanted not in columns:
        holds = ", ".join(f"{column!r}" for column in first)
        raise JobError(
            f"{name!r} has no column {wanted!r} of text{near_miss(wanted, columns)}",
            f"its columns are {holds}; of text: {', '.join(map(repr, columns)) or 'none'}",
            "--text_column COLUMN",
        )
    return Text(rows, wanted)
