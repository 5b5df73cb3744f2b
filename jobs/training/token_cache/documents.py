"""Documents out of files: planned as pieces that processes read at the same time, put together in order again."""

from __future__ import annotations

import gzip
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from training.errors import JobError, near_miss

KINDS = {".jsonl": "jsonl", ".json": "jsonl", ".txt": "text", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
BATCH_BYTES = 1 << 20
GROUPS = 16  # row groups of Parquet, or record batches of Arrow, in one piece


@dataclass(frozen=True)
class Piece:
    """A part of one file: bytes `start` to `stop` of lines, row groups of Parquet, or all of it."""

    path: str
    kind: str
    start: int
    stop: int | None  # None: to the end
    column: str
    line_ends: bool  # the documents of a text file keep their line ends


def kind_of(path: Path) -> str:
    """Return how a file is read, by its ending. Raises JobError for an unknown ending or an empty file."""
    suffix = Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()
    if suffix not in KINDS:
        raise JobError(
            f"cannot read {str(path)!r}",
            f"the name of the file must end in one of {', '.join(KINDS)}",
            "convert the file to one of these formats",
        )
    try:
        with _opened(path) as file:
            head = file.read(4096)
    except (OSError, EOFError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise JobError(f"cannot read {str(path)!r}", why, "give the path of the file inside the container") from error
    if not head:
        raise JobError(f"the file {str(path)!r} is empty", "it has 0 bytes", "check how the file was written")
    kind = "array" if suffix == ".json" and head.lstrip().startswith(b"[") else KINDS[suffix]
    return f"{kind}.gz" if path.suffix == ".gz" else kind


def plan(paths: Sequence[Path], column: str, line_ends: bool, piece_bytes: int) -> list[Piece]:
    """Return the pieces of all files in order; lines are cut between lines, Parquet between row groups."""
    pieces: list[Piece] = []
    for path in paths:
        kind = kind_of(path)
        if kind in ("jsonl", "text"):
            bounds: list[int | None] = [*_line_starts(path, piece_bytes), None]
        elif kind in ("parquet", "arrow"):
            bounds = [*range(0, _groups(path, kind), GROUPS), None]
        else:
            bounds = [0, None]
        pieces += [
            Piece(str(path.absolute()), kind, start or 0, stop, column, line_ends)
            for start, stop in itertools.pairwise(bounds)
        ]
    return pieces


def read(piece: Piece) -> Iterator[list[str]]:
    """Yield the documents of a piece in lists of about a megabyte. Raises JobError for what is not text."""
    kind = piece.kind.removesuffix(".gz")
    batches = {"jsonl": _json_lines, "text": _text_lines, "array": _json_array, "csv": _csv}.get(kind, _columns)
    for texts in batches(piece):
        for text in texts:
            if not isinstance(text, str):
                raise _no_text(piece, text)
        if texts:
            yield texts


def _line_starts(path: Path, piece_bytes: int) -> list[int]:
    starts, size_bytes = [0], path.stat().st_size
    with path.open("rb") as file:
        for guess in range(piece_bytes, size_bytes, piece_bytes):
            if guess <= starts[-1]:
                continue
            file.seek(guess)
            file.readline()
            if starts[-1] < file.tell() < size_bytes:
                starts.append(file.tell())
    return starts


def _blocks_of_lines(piece: Piece) -> Iterator[bytes]:
    """Yield whole lines, about BATCH_BYTES of them at a time."""
    with _opened(Path(piece.path)) as file:
        place = file.seek(piece.start)
        while piece.stop is None or place < piece.stop:
            wanted = BATCH_BYTES if piece.stop is None else min(BATCH_BYTES, piece.stop - place)
            block = file.read(wanted)
            if not block:
                return
            if not block.endswith(b"\n"):
                block += file.readline()
            place += len(block)
            yield block


def _opened(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _text_of(piece: Piece) -> IO[str]:
    """Return a file of one piece as text, its line ends as they are."""
    return io.TextIOWrapper(_opened(Path(piece.path)), encoding="utf-8", newline="")


def _json_lines(piece: Piece) -> Iterator[list[Any]]:
    for block in _blocks_of_lines(piece):
        lines = [line for line in block.split(b"\n") if line.strip()]
        try:
            # one call for all lines: half the time of a call for each
            rows = json.loads(b"[" + b",".join(lines) + b"]")
            texts = [row[piece.column] for row in rows]
        except (ValueError, KeyError, TypeError) as error:
            raise _bad_line(piece, lines) from error
        if len(texts) != len(lines) or not all(map(str.__instancecheck__, texts)):
            raise _bad_line(piece, lines)
        yield texts


def _bad_line(piece: Piece, lines: list[bytes]) -> JobError:
    """Return the error of the first line that is not an object with text in the column, with the line's number."""
    fix = "fix that line, or remove it"
    for line in lines:
        try:
            row = json.loads(line)
        except UnicodeDecodeError as error:
            return _not_utf8(piece, error)
        except ValueError as error:
            shown = line[:60].decode("utf-8", "replace")
            return JobError(f"{piece.path}: line {_number(piece, line)} is not JSON: {shown!r}", str(error), fix)
        if not isinstance(row, dict):
            what = f"{piece.path}: line {_number(piece, line)} is not a JSON object: {line[:60].decode()!r}"
            return JobError(what, "each line must be a JSON object", fix)
        if not isinstance(row.get(piece.column), str):
            return _no_text(piece, row.get(piece.column), list(row), f"line {_number(piece, line)} of ")
    return JobError(f"cannot read {piece.path}", "a line of the file is not a JSON object", "write one object per line")


def _number(piece: Piece, wanted: bytes) -> int:
    """Return the number of a line, from 1."""
    with _opened(Path(piece.path)) as file:
        return next((number for number, line in enumerate(file, 1) if line.rstrip(b"\n") == wanted), 0)


def _text_lines(piece: Piece) -> Iterator[list[Any]]:
    for block in _blocks_of_lines(piece):
        try:
            lines = io.StringIO(block.decode("utf-8"), newline=None).readlines()
        except UnicodeDecodeError as error:
            raise _not_utf8(piece, error) from error
        yield lines if piece.line_ends else [line.rstrip("\n") for line in lines]


def _json_array(piece: Piece) -> Iterator[list[Any]]:
    with _text_of(piece) as file:
        try:
            rows = json.load(file)
        except ValueError as error:
            raise JobError(
                f"{piece.path} is not JSON", str(error), "fix the file, or write one object per line"
            ) from error
    wrong = next((row for row in rows if not isinstance(row, dict) or piece.column not in row), None)
    if wrong is not None:
        raise _no_text(piece, wrong, list(wrong) if isinstance(wrong, dict) else ())
    for start in range(0, len(rows), 1000):
        yield [row[piece.column] for row in rows[start : start + 1000]]


def _csv(piece: Piece) -> Iterator[list[Any]]:
    import csv

    csv.field_size_limit(1 << 30)
    with _text_of(piece) as file:
        texts: list[Any] = []
        for row in csv.DictReader(file):
            if piece.column not in row:
                raise _no_text(piece, None, list(row))
            texts.append(row[piece.column])
            if len(texts) == 1000:
                yield texts
                texts = []
        yield texts


def _columns(piece: Piece) -> Iterator[list[Any]]:
    """Yield the column of Parquet row groups, or of an Arrow file as the `datasets` library keeps it."""
    if piece.kind == "parquet":
        from pyarrow import parquet

        table = parquet.ParquetFile(piece.path)
        names, stop = table.schema_arrow.names, piece.stop or table.num_row_groups
        _need_column(piece, names)
        for batch in table.iter_batches(1000, row_groups=list(range(piece.start, stop)), columns=[piece.column]):
            yield batch.column(0).to_pylist()
        return
    import pyarrow

    with pyarrow.memory_map(piece.path) as source, pyarrow.ipc.open_stream(source) as stream:
        _need_column(piece, stream.schema.names)
        place = stream.schema.names.index(piece.column)
        for batch in itertools.islice(stream, piece.start, piece.stop):
            yield batch.column(place).to_pylist()


def _groups(path: Path, kind: str) -> int:
    """Return the number of row groups, or of record batches; at least one."""
    if kind == "parquet":
        from pyarrow import parquet

        return max(1, int(parquet.ParquetFile(path).num_row_groups))
    import pyarrow

    with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
        return max(1, sum(1 for _ in stream))


def _need_column(piece: Piece, columns: Sequence[str]) -> None:
    if piece.column not in columns:
        raise _no_text(piece, None, columns)


def _not_utf8(piece: Piece, error: UnicodeDecodeError) -> JobError:
    return JobError(f"{piece.path} is not UTF-8", str(error), "convert the file: iconv -f LATIN1 -t UTF-8 OLD > NEW")


def _no_text(piece: Piece, value: Any, columns: Sequence[str] = (), place: str = "") -> JobError:
    if columns and piece.column not in columns:
        return JobError(
            f"{place}{piece.path} has no column {piece.column!r}{near_miss(piece.column, columns)}",
            f"it has {', '.join(map(repr, columns))}",
            "choose the column with the text: --text_column COLUMN",
        )
    return JobError(
        f"{place}{piece.path}: column {piece.column!r} is not text",
        f"it has the value {value!r:.60}",
        "the column must have text in each row",
    )
