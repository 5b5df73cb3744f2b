"""Documents out of files: planned as pieces that processes read at the same time, put together in order again."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import gzip
import io
import itertools
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from training.errors import JobError, near_miss

KINDS = {".jsonl": "jsonl", ".json": "jsonl", ".txt": "text", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
COMPRESSED = (".gz", ".xz", ".zst")
BATCH_BYTES = 4 << 20
CSV_FIELD_BYTES = 1 << 30  # of one document at most; Python's own limit is 128 KiB
# what a file raises that is cut off, or is not of the kind that its name says; pyarrow also raises ValueError
DAMAGED = (OSError, EOFError, lzma.LZMAError, zlib.error, csv.Error)
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
    keys: tuple[str, ...] = ()  # of JSON lines: several columns, each with a text or a list of texts
    lines: bytes | None = None  # of a compressed file: the lines themselves

    @property
    def size_bytes(self) -> int:
        if self.lines is not None:
            return len(self.lines)
        return (Path(self.path).stat().st_size if self.stop is None else self.stop) - self.start


def kind_of(path: Path) -> str:
    """Return how a file is read, by its ending. Raises JobError for an unknown ending or an empty file."""
    suffix = Path(path.stem if path.suffix in COMPRESSED else path).suffix.lower()
    if suffix not in KINDS:
        raise JobError(
            f"cannot read {str(path)!r}",
            f"the name of the file must end in one of {', '.join(KINDS)}; {', '.join(COMPRESSED)} may follow",
            "convert the file to one of these formats",
        )
    try:
        with opened(path) as file:
            head = file.read(4096)
    except DAMAGED as error:
        why = getattr(error, "strerror", None) or str(error)
        fix = "check that the file is complete, that you may read it, and how it was compressed"
        if isinstance(error, FileNotFoundError):
            fix = "give the path of the file inside the container"
        raise JobError(f"cannot read {str(path)!r}", why, fix) from error
    if not head:
        raise JobError(f"the file {str(path)!r} is empty", "it has 0 bytes", "check how the file was written")
    kind = "array" if suffix == ".json" and head.lstrip().startswith(b"[") else KINDS[suffix]
    return kind + path.suffix if path.suffix in COMPRESSED else kind


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


def expanded(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces; for compressed lines, blocks of lines in their place, since only one process can decompress."""
    for piece in pieces:
        kind, dot, _ = piece.kind.partition(".")
        if dot and kind in ("jsonl", "text"):
            with whole(piece.path):
                for block in _blocks_of_lines(piece):
                    yield dataclasses.replace(piece, kind=kind, lines=block)
        else:
            yield piece


def columns(piece: Piece) -> Iterator[Sequence[list[Any]]]:
    """Yield the documents of each key in lists of some megabytes."""
    return json_columns(piece) if piece.keys else ([texts] for texts in read(piece))


def read(piece: Piece) -> Iterator[list[str]]:
    """Yield the documents of a piece in lists of some megabytes. Raises JobError for what is not text."""
    kind = piece.kind.partition(".")[0]
    batches = {"jsonl": _json_lines, "text": _text_lines, "array": _json_array, "csv": _csv}.get(kind, _columns)
    for texts in batches(piece):
        for text in texts:
            if not isinstance(text, str):
                raise _no_text(piece, text)
        if texts:
            yield texts


@contextlib.contextmanager
def whole(path: str | Path) -> Iterator[None]:
    """Turn what a damaged file raises into a JobError."""
    try:
        yield
    except (*DAMAGED, ValueError) as error:
        packed = Path(path).suffix in COMPRESSED
        what = f"cannot {'decompress' if packed else 'read'} {path}"
        test = ", and test it with gzip -t, xz -t or zstd -t" if packed else ""
        raise JobError(what, str(error), f"copy the file again{test}") from error


def _line_starts(path: Path, piece_bytes: int) -> list[int]:
    size_bytes = path.stat().st_size
    return line_starts(path, [0, *range(piece_bytes, size_bytes, piece_bytes), size_bytes])[:-1] or [0]


def line_starts(path: Path, places: Iterable[int]) -> list[int]:
    """Return the first starts of lines at or after the places (or the file's end), in order and each once."""
    starts: list[int] = []
    with path.open("rb") as file:
        for place in places:
            if starts and place <= starts[-1]:
                continue
            file.seek(max(place - 1, 0))
            if place:
                file.readline()
            starts.append(file.tell())
    return starts


def _blocks_of_lines(piece: Piece) -> Iterator[bytes]:
    """Yield whole lines, about BATCH_BYTES of them at a time."""
    with opened(Path(piece.path)) if piece.lines is None else io.BytesIO(piece.lines) as file:
        if piece.start:
            file.seek(piece.start)
        place = piece.start
        while piece.stop is None or place < piece.stop:
            wanted = BATCH_BYTES if piece.stop is None else min(BATCH_BYTES, piece.stop - place)
            block = file.read(wanted)
            if not block:
                return
            if not block.endswith(b"\n"):
                block += file.readline()
            place += len(block)
            yield block


def opened(path: Path) -> IO[bytes]:
    if path.suffix == ".zst":
        import pyarrow  # part of every image, which the packages for Zstandard are not

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    open_with: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    return cast("IO[bytes]", open_with(path, "rb"))


def _text_of(piece: Piece) -> IO[str]:
    """Return a file of one piece as text, its line ends as they are."""
    return io.TextIOWrapper(opened(Path(piece.path)), encoding="utf-8", newline="")


def _json_lines(piece: Piece) -> Iterator[list[Any]]:
    for (texts,) in json_columns(piece):
        yield texts


def json_columns(piece: Piece) -> Iterator[list[list[Any]]]:
    """Yield a list of texts for each key of a piece of JSON lines; with `keys`, a list of texts is a value too."""
    keys = piece.keys or (piece.column,)
    for block in _blocks_of_lines(piece):
        lines = [line for line in block.split(b"\n") if line.strip()]
        try:
            rows = _parsed(lines)
            texts = [[row[key] for row in rows] for key in keys]
        except (ValueError, KeyError, TypeError) as error:
            raise _bad_line(piece, lines) from error
        if len(rows) != len(lines) or not all(_is_text(column, bool(piece.keys)) for column in texts):
            raise _bad_line(piece, lines)
        yield texts


def not_unicode(piece: Piece) -> JobError | None:
    """Return the error of the first line with half of a surrogate pair, which no tokenizer takes; None without one."""
    for block in _blocks_of_lines(piece) if piece.kind == "jsonl" else ():
        for line in block.split(b"\n"):
            if b"\\u" in line:
                try:
                    json.dumps(json.loads(line), ensure_ascii=False).encode()
                except UnicodeEncodeError as error:
                    what = f"{piece.path}: line {_number(piece, line)} is not Unicode"
                    return JobError(what, str(error), "fix that line, or remove it")
    return None


def _parsed(lines: Sequence[bytes]) -> list[Any]:
    """Return the rows. orjson, where it is installed, takes half the time, and refuses some of what json takes."""
    text = b"[" + b",".join(lines) + b"]"
    try:
        import orjson

        rows: list[Any] = orjson.loads(text)
    except (ImportError, ValueError):
        rows = json.loads(text)
    return rows


def _is_text(values: Sequence[Any], lists: bool) -> bool:
    if all(map(str.__instancecheck__, values)):
        return True
    return lists and all(
        isinstance(value, str) or (isinstance(value, list) and _is_text(value, False)) for value in values
    )


def _bad_line(piece: Piece, lines: list[bytes]) -> JobError:
    """Return the error of the first line that is not an object with text in the columns, with the line's number."""
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
        for key in piece.keys or (piece.column,):
            if key not in row or not _is_text([row[key]], bool(piece.keys)):
                piece = dataclasses.replace(piece, column=key)
                return _no_text(piece, row.get(key), list(row), f"line {_number(piece, line)} of ")
    return JobError(f"cannot read {piece.path}", "its lines are not JSON objects", "write one object per line")


def _number(piece: Piece, wanted: bytes) -> int:
    """Return the number of a line, from 1."""
    with opened(Path(piece.path)) as file:
        return next((number for number, line in enumerate(file, 1) if line.rstrip(b"\n") == wanted), 0)


def _text_lines(piece: Piece) -> Iterator[list[Any]]:
    for block in _blocks_of_lines(piece):
        try:
            lines = io.StringIO(block.decode("utf-8"), newline=None).readlines()
        except UnicodeDecodeError as error:
            raise _not_utf8(piece, error) from error
        yield lines if piece.line_ends else [line.rstrip("\n") for line in lines]


def _json_array(piece: Piece) -> Iterator[list[Any]]:
    with whole(piece.path), _text_of(piece) as file:
        try:
            rows = json.load(file)
        except UnicodeDecodeError as error:
            raise _not_utf8(piece, error) from error
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
    csv.field_size_limit(CSV_FIELD_BYTES)
    with whole(piece.path), _text_of(piece) as file:
        texts: list[Any] = []
        try:
            for row in csv.DictReader(file):
                if piece.column not in row:
                    raise _no_text(piece, None, list(row))
                texts.append(row[piece.column])
                if len(texts) == 1000:
                    yield texts
                    texts = []
        except UnicodeDecodeError as error:
            raise _not_utf8(piece, error) from error
        yield texts


def _columns(piece: Piece) -> Iterator[list[Any]]:
    """Yield the column of Parquet row groups, or of an Arrow file as the `datasets` library keeps it."""
    with whole(piece.path):
        yield from _of_arrow(piece)


def _of_arrow(piece: Piece) -> Iterator[list[Any]]:
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

        with whole(path):
            return max(1, int(parquet.ParquetFile(path).num_row_groups))
    import pyarrow

    with whole(path), pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
        return max(1, sum(1 for _ in stream))


def _need_column(piece: Piece, columns: Sequence[str]) -> None:
    if piece.column not in columns:
        raise _no_text(piece, None, columns)


def _not_utf8(piece: Piece, error: UnicodeDecodeError) -> JobError:
    return JobError(
        f"{piece.path} is not UTF-8", str(error), "convert it to UTF-8; for Latin-1: iconv -f LATIN1 -t UTF-8 OLD > NEW"
    )


def _no_text(piece: Piece, value: Any, columns: Sequence[str] = (), place: str = "") -> JobError:
    if columns and piece.column not in columns:
        return JobError(
            f"{place}{piece.path} has no column {piece.column!r}{near_miss(piece.column, columns)}",
            f"it has {', '.join(map(repr, columns))}",
            "fix that line, or choose the column with the text: --text_column (megatron-data: --json-keys)",
        )
    return JobError(
        f"{place}{piece.path}: column {piece.column!r} is not text",
        f"it has the value {value!r:.60}",
        "fix that row, or choose a column with text in each row: --text_column (megatron-data: --json-keys)",
    )
