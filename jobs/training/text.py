"""The documents of `clm`: files, or rows of a dataset, with the column that holds the text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import dataset as reading
from training import demo as corpus
from training.course_arguments import PYTHON_DOCS
from training.errors import JobError, near_miss
from training.processes import once
from training.settings import Settings

if TYPE_CHECKING:
    from training.course import Course


@dataclass(frozen=True)
class Text:
    """Documents in their order: in files, or as rows of a `datasets.Dataset` (or IterableDataset with --streaming)."""

    name: str
    column: str
    files: tuple[Path, ...] = ()
    rows: Any = None


def find(course: Course) -> tuple[Text | None, Text | None]:
    """Return the text to train on, and the one to evaluate on where it is not a share of the first."""
    settings = course.settings
    if settings["dataset_name"] == PYTHON_DOCS:
        texts = _documentation(course)
    elif settings["streaming"] or (settings["dataset_name"] and not Path(settings["dataset_name"]).is_file()):
        texts = _datasets(course)
    else:
        texts = _files(settings)
    train, held_out = texts.get("train"), texts.get("validation")
    if train is None and (settings["do_train"] or held_out is None):
        raise JobError(f"{settings['dataset_name']!r} has no split 'train'", "it has others", "name another dataset")
    if settings["streaming"] and settings["do_eval"] and held_out is None:
        raise JobError(
            "--do_eval on a stream that has no split 'validation'",
            "a share of a stream cannot be held out: nobody knows its length",
            "--validation_file FILE, or no --streaming",
        )
    return train, held_out


def _documentation(course: Course) -> dict[str, Text]:
    """Return the demo's text: a file with one answer or question per row."""
    folder = reading.python_docs(course.run.cache, course.peers)[1]
    path = folder / "texts.jsonl"

    def write() -> None:
        from training import files

        if not path.is_file():
            files.write_text(path, "".join(json.dumps({"text": text}) + "\n" for text in corpus.texts(folder)))

    once(course.peers, write)
    return {"train": Text(PYTHON_DOCS, "text", (path,))}


def _files(settings: Settings) -> dict[str, Text]:
    wanted = {
        "train": settings["train_file"] or settings["dataset_name"],
        "validation": settings["validation_file"],
    }
    found = {}
    for split, name in wanted.items():
        if name:
            paths = named(name)
            found[split] = Text(name, column_of(first_row(paths[0]), name, settings), paths)
    return found


def named(name: str) -> tuple[Path, ...]:
    """Return the files of a name that may hold `*`, in the order of their names."""
    path = Path(name)
    return tuple(sorted(path.parent.glob(path.name))) if "*" in path.name else (path,)


def first_row(path: Path) -> Mapping[str, Any]:
    """Return the first row of a file, for its columns; of Parquet the schema alone is read."""
    import csv
    import gzip

    kind = Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()
    if kind == ".txt":
        return {"text": ""}
    if kind == ".parquet":
        from pyarrow import parquet

        schema = parquet.read_schema(path)
        return {field.name: "" if str(field.type).endswith("string") else None for field in schema}
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        if kind == ".csv":
            return next(csv.DictReader(file), {})
        start = file.readline()
        try:
            row = json.loads(start if not start.lstrip().startswith("[") else start + file.read())
        except ValueError as error:
            raise JobError(
                f"{str(path)!r} is not JSON", str(error), "one object per line, or a list of them"
            ) from error
    row = row[0] if isinstance(row, list) and row else row
    return row if isinstance(row, Mapping) else {}


def _datasets(course: Course) -> dict[str, Text]:
    """Return the splits of a dataset of the hub or a folder, or streams of files; rank 0 fills the cache first."""
    settings, peers = course.settings, course.peers
    if peers.world_size > 1 and not settings["streaming"]:
        once(peers, lambda: _load(settings) and None)
    found = {}
    for split, rows in _load(settings).items():
        if split in ("train", "validation"):
            name = settings["dataset_name"] or settings[f"{split}_file"]
            first = next(iter(rows), None)
            if first is None:
                raise JobError(f"{name!r} has no documents", f"its split {split!r} has no rows", "name another one")
            if split == "train" and settings["data_percentage"] < 100:
                rows = rows.select(range(max(1, round(len(rows) * settings["data_percentage"] / 100))))
            found[split] = Text(name, column_of(first, name, settings), rows=rows)
    return found


def _load(settings: Settings) -> Mapping[str, Any]:
    import datasets

    name, streaming = settings["dataset_name"], settings["streaming"]
    try:
        if name and Path(name).is_dir() and any((Path(name) / mark).exists() for mark in SAVED_MARKS):
            found = datasets.load_from_disk(name)
            return found if isinstance(found, Mapping) else {"train": found}
        if name and not Path(name).is_file():
            splits: Mapping[str, Any] = datasets.load_dataset(
                reading.prefetched(name) or name,
                settings["dataset_config_name"],
                cache_dir=settings["cache_dir"],
                token=settings["token"],
                streaming=streaming,
            )
            return splits
        wanted = {"train": settings["train_file"] or name, "validation": settings["validation_file"]}
        return {split: _stream(path, settings) for split, path in wanted.items() if path}
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetGenerationError) as error:
        raise reading.not_loaded(name or settings["train_file"] or settings["validation_file"], error) from error


SAVED_MARKS = ("state.json", "dataset_dict.json")


def _stream(name: str, settings: Settings) -> Any:
    import datasets

    reader = reading.READERS[Path(name).suffix.lower()]
    options = {"keep_linebreaks": settings["keep_linebreaks"]} if reader == "text" else {}
    files = [str(path) for path in named(name)]
    return datasets.load_dataset(reader, data_files=files, split="train", streaming=True, **options)


def column_of(first: Mapping[str, Any], name: str, settings: Settings) -> str:
    """Return the column to train on. Raises JobError where there is none of that name, or several to choose from."""
    columns = [column for column, value in first.items() if isinstance(value, str)]
    if settings["text_column"] is None and "text" not in columns and len(columns) == 1:
        return columns[0]
    wanted: str = settings["text_column"] or "text"
    if wanted not in columns:
        raise JobError(
            f"{name!r} has no column {wanted!r} of text{near_miss(wanted, columns)}",
            f"its columns are {', '.join(map(repr, first)) or 'none'}; of text: {', '.join(columns) or 'none'}",
            "--text_column COLUMN",
        )
    return wanted
