"""The documents of clm: files, or rows of a dataset, and the column that holds the text."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import dataset
from training.errors import JobError, near_miss
from training.processes import Processes
from training.token_cache import documents

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from training.clm_arguments import DataArguments, ModelArguments


@dataclass(frozen=True)
class Text:
    """Documents in order: in files, or as rows of a `datasets.Dataset` (IterableDataset with --streaming)."""

    name: str
    column: str
    files: tuple[Path, ...] = ()
    rows: Any = None


def find(
    data: DataArguments,
    model: ModelArguments,
    training: TrainingArguments,
    processes: Processes,
    beat: Callable[[], None],
) -> tuple[Text | None, Text | None]:
    """Return the text to train on, and the text to evaluate on unless it is a share of the first."""
    name = data.dataset_name
    if data.streaming or (name and not Path(name).is_file()):
        texts = _of_datasets(data, _loaded(data, model, processes, beat))
    else:
        texts = _of_files(data)
    train, held_out = texts.get("train"), texts.get("validation")
    if train is None and (training.do_train or held_out is None):
        splits = "its split is 'validation'" if held_out else "it has neither 'train' nor 'validation'"
        raise JobError(f"{name!r} has no split 'train'", splits, "use a dataset with a 'train' split")
    if data.streaming and training.do_eval and held_out is None:
        raise JobError(
            "--do_eval needs validation data, and the stream has no split 'validation'",
            "the length of a stream is unknown, so no part of it can be held out",
            "remove --streaming or --do_eval"
            if data.dataset_name
            else "add --validation_file FILE, or remove --streaming",
        )
    return train, held_out


def _of_files(data: DataArguments) -> dict[str, Text]:
    names = {"train": data.train_file or data.dataset_name, "validation": data.validation_file}
    found = {}
    for split, name in names.items():
        if name:
            paths = named(name)
            found[split] = Text(name, column_of(first_row(paths[0]), name, data.text_column), paths)
    return found


def named(name: str) -> tuple[Path, ...]:
    """Return the files of a name that may contain `*`, also in the names of folders, sorted by name."""
    path = Path(name)
    first = next((number for number, part in enumerate(path.parts) if "*" in part), None)
    if first is None:
        return (path,)
    return tuple(sorted(Path(*path.parts[:first]).glob(str(Path(*path.parts[first:])))))


def first_row(path: Path) -> Mapping[str, Any]:
    """Return the first row of a file, for its columns; of Parquet and Arrow only the schema is read."""
    kind = Path(path.stem if path.suffix in documents.COMPRESSED else path).suffix.lower()
    if kind == ".txt":
        return {"text": ""}
    if kind == ".parquet":
        from pyarrow import parquet

        with documents.whole(path):
            return _texts_of(parquet.read_schema(path))
    if kind == ".arrow":
        import pyarrow

        with (
            documents.whole(path),
            pyarrow.memory_map(str(path)) as source,
            pyarrow.ipc.open_stream(source) as stream,
        ):
            return _texts_of(stream.schema)
    try:
        with io.TextIOWrapper(documents.opened(path), encoding="utf-8") as file:
            if kind == ".csv":
                csv.field_size_limit(documents.CSV_FIELD_BYTES)
                return next(csv.DictReader(file), {})
            start = file.readline()
            row = json.loads(start if not start.lstrip().startswith("[") else start + file.read())
    except UnicodeDecodeError as error:
        raise dataset.not_utf8(str(path), error) from error
    except documents.DAMAGED as error:
        raise JobError(
            f"cannot read {str(path)!r}", str(error), "check that the file is complete, and how it was compressed"
        ) from error
    except ValueError as error:
        raise JobError(
            f"{str(path)!r} is not valid JSON", str(error), "write one object per line, or a list of objects"
        ) from error
    row = row[0] if isinstance(row, list) and row else row
    return row if isinstance(row, Mapping) else {}


def _texts_of(schema: Any) -> Mapping[str, Any]:
    return {field.name: "" if str(field.type).endswith("string") else None for field in schema}


def _loaded(
    data: DataArguments, model: ModelArguments, processes: Processes, beat: Callable[[], None]
) -> Mapping[str, Any]:
    """Return the splits of a dataset of the hub or a folder, or streams of files; rank 0 fills the cache first."""
    if data.streaming:
        return _load(data, model)
    return dataset.first_on_rank_0(lambda: _load(data, model), processes, beat)


def _of_datasets(data: DataArguments, splits: Mapping[str, Any]) -> dict[str, Text]:
    found = {}
    for split, rows in splits.items():
        if split in ("train", "validation"):
            name = data.dataset_name or (data.train_file if split == "train" else data.validation_file) or ""
            first = next(iter(rows), None)
            if first is None:
                raise JobError(f"{name!r} has no documents", f"its split {split!r} has no rows", "use another dataset")
            if split == "train" and data.data_percentage < 100:
                rows = rows.select(range(max(1, round(len(rows) * data.data_percentage / 100))))
            found[split] = Text(name, column_of(first, name, data.text_column), rows=rows)
    return found


def _load(data: DataArguments, model: ModelArguments) -> Mapping[str, Any]:
    name = data.dataset_name
    if name and not Path(name).is_file():
        return dataset.load_splits(
            name, data.dataset_config_name, data.streaming, cache_dir=model.cache_dir, token=model.token
        )
    files = {"train": data.train_file or name, "validation": data.validation_file}
    return {split: _stream(path, data.keep_linebreaks) for split, path in files.items() if path}


def _stream(name: str, keep_linebreaks: bool) -> Any:
    import datasets

    reader = dataset.READERS.get(Path(name).suffix.lower())
    if reader is None:
        raise JobError(
            f"cannot stream {name!r}",
            f"with --streaming, the name of the file must end in one of {', '.join(dataset.READERS)}",
            "remove --streaming, or convert the file to one of these formats",
        )
    options = {"keep_linebreaks": keep_linebreaks} if reader == "text" else {}
    paths = [str(path) for path in named(name)]
    try:
        return datasets.load_dataset(reader, data_files=paths, split="train", streaming=True, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise dataset.not_loaded(name, error) from error


def column_of(first: Mapping[str, Any], name: str, given: str | None) -> str:
    """Return the column to train on. Raises JobError if it does not exist, or if there are several to choose from."""
    columns = [column for column, value in first.items() if isinstance(value, str)]
    if given is None and "text" not in columns and len(columns) == 1:
        return columns[0]
    wanted = given or "text"
    if wanted not in columns:
        raise JobError(
            f"{name!r} has no text column {wanted!r}{near_miss(wanted, columns)}",
            f"all columns: {', '.join(map(repr, first)) or 'none'}; columns with text: {', '.join(columns) or 'none'}",
            "choose a column with text: --text_column COLUMN",
        )
    return wanted
