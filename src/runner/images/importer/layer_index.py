"""The index beside a squashfs: the entries of each layer and the position of its run, so that unchanged layers are
neither read nor packed again.

The file is a sequence of zstd frames, one per layer, top layer first. A frame contains lines of JSON: lists of entries,
then positions of contents. Bytes are encoded as Latin-1. The last frame is the table of contents; the last 16 bytes are
its length and a magic number. An index is ignored if it does not match its squashfs (another superblock) or has another
version, or if another user could have written it, because its checksums detect damage, but not manipulation.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import zstandard
from isal import isal_zlib

from runner.images.layers.layer import Layer
from runner.images.layers.tar import Entry
from runner.images.squashfs.compression import SUPERBLOCK
from runner.images.squashfs.data import FileData, Place, Run
from runner.images.squashfs_file import is_whole

FORM = 4
_TAIL = struct.Struct("<Q8s")
_MARK = b"rnnrindx"
_CHUNK = 1024  # entries in a line
_PIECE = 4 << 20  # bytes to check at a time
_LARGEST_CONTENTS = 64 << 20
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


@dataclass(frozen=True)
class LayerRecord:
    """What the index says about one layer."""

    diff_id: str
    digest: str  # of the blob that was read; "" if it had none
    proven: bool  # whether the uncompressed bytes were verified to have this diff_id
    needed: str  # hash of the numbers of the entries whose contents are in the run
    offset: int  # of the run, in the squashfs
    length: int
    fragments: str  # as in `Run`, Latin-1
    check: int  # CRC-32 of the run
    frame: int  # offset of its frame in the index
    frame_length: int
    frame_check: int = 0  # CRC-32 of the frame

    def run(self) -> Run:
        return Run(self.offset, self.length, self.fragments.encode("latin-1"))


class LayerLog:
    """Collects and compresses a layer's entries, and afterwards the positions of their contents."""

    def __init__(self) -> None:
        self._stream = zstandard.ZstdCompressor(level=1).compressobj()
        self._packed: list[bytes] = []
        self._chunk: list[list[Any]] = []

    def add(self, entry: Entry) -> None:
        row: list[Any] = [
            entry.path.decode("latin-1"),
            entry.mode,
            entry.uid,
            entry.gid,
            entry.mtime,
            entry.size,
        ]
        if entry.target or entry.xattrs or entry.hard_link or entry.device != (0, 0):
            xattrs = [
                [key.decode("latin-1"), value.decode("latin-1")] for key, value in entry.xattrs
            ]
            row += [entry.target.decode("latin-1"), *entry.device, xattrs, int(entry.hard_link)]
        self._chunk.append(row)
        if len(self._chunk) == _CHUNK:
            self._flush()

    def end(self, contents: Sequence[FileData]) -> bytes:
        """The layer's frame. `contents` are the needed contents, in the order of their entries."""
        self._flush()
        for start in range(0, len(contents), _CHUNK):
            self._line(
                {"places": [_as_json(data.place) for data in contents[start : start + _CHUNK]]}
            )
        return b"".join([*self._packed, self._stream.flush()])

    def _flush(self) -> None:
        if self._chunk:
            self._line(self._chunk)
            self._chunk = []

    def _line(self, value: object) -> None:
        self._packed.append(self._stream.compress((_encode(value) + "\n").encode()))


class LayerIndex:
    """An open index with its squashfs. Both are closed together."""

    def __init__(
        self, records: Sequence[LayerRecord], index: BinaryIO, squashfs: BinaryIO, settings: str
    ) -> None:
        self.records = {record.diff_id: record for record in records if record.diff_id}
        self.settings = settings
        self.squashfs = squashfs
        self._index = index

    def close(self) -> None:
        self._index.close()
        self.squashfs.close()

    def find(self, layer: Layer) -> LayerRecord | None:
        """The record of the same layer. A diff_id that was not verified does not identify a content."""
        record = self.records.get(layer.diff_id)
        if record and (record.proven or (layer.digest and layer.digest == record.digest)):
            return record
        return None

    def frame(self, record: LayerRecord) -> bytes | None:
        """The bytes of the layer's frame, for `read_frame` or another index; None if they are damaged."""
        self._index.seek(record.frame)
        data = self._index.read(record.frame_length)
        return data if isal_zlib.crc32(data) == record.frame_check else None

    def is_intact(self, record: LayerRecord) -> bool:
        """Whether the layer's run is unchanged. Reads the whole run."""
        buffer = memoryview(bytearray(min(_PIECE, record.length)))
        check, position, end = 0, record.offset, record.offset + record.length
        while position < end:
            count = os.preadv(self.squashfs.fileno(), [buffer[: end - position]], position)
            if not count:
                return False
            check = isal_zlib.crc32(buffer[:count], check)
            position += count
        return check == record.check


def read_frame(frame: bytes, places: list[Place]) -> Iterator[Entry]:
    """The entries of a layer's frame, in order.

    Then `places` has the positions of the needed contents, in the order of their entries.
    """
    places.clear()
    stream = zstandard.ZstdDecompressor().stream_reader(frame)
    for value in map(json.loads, io.BufferedReader(stream, 1 << 16)):
        if isinstance(value, list):
            for row in value:
                yield _entry(row)
        else:
            places += [_place(item) for item in value["places"]]


def needed_hash(numbers: array[int]) -> str:
    """The hash of the numbers of the entries whose contents are needed."""
    return hashlib.sha256(numbers.tobytes()).hexdigest()


def write_index(
    target: BinaryIO, superblock: bytes, settings: str, layers: Sequence[tuple[LayerRecord, bytes]]
) -> None:
    """Write the index of a squashfs: records (their `frame` is set here) with their frames."""
    records, position = [], 0
    for record, frame in layers:
        target.write(frame)
        records.append(
            replace(
                record, frame=position, frame_length=len(frame), frame_check=isal_zlib.crc32(frame)
            )
        )
        position += len(frame)
    contents = {
        "form": FORM,
        "settings": settings,
        "superblock": superblock.hex(),
        "layers": [asdict(record) for record in records],
    }
    packed = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(
        json.dumps(contents).encode()
    )
    target.write(packed + _TAIL.pack(len(packed), _MARK))


def open_index(path: Path, squashfs: Path) -> LayerIndex | None:
    """The index of a squashfs; None if there is no valid one."""
    try:
        index, image = path.open("rb"), squashfs.open("rb")
    except OSError:
        return None
    try:
        contents = _contents(index)
        fits = (
            contents["form"] == FORM and contents["superblock"] == image.read(SUPERBLOCK.size).hex()
        )
        if fits and is_whole(squashfs) and _only_ours(index) and _only_ours(image):
            records = [LayerRecord(**record) for record in contents["layers"]]
            return LayerIndex(records, index, image, str(contents["settings"]))
    except (OSError, ValueError, KeyError, TypeError, struct.error, zstandard.ZstdError):
        pass
    index.close()
    image.close()
    return None


def is_index(path: Path) -> bool:
    """Whether the file is an index that runner wrote, of any version."""
    try:
        return not path.is_symlink() and path.read_bytes()[-len(_MARK) :] == _MARK
    except OSError:
        return False


def _only_ours(file: BinaryIO) -> bool:
    """Whether only this user or root can have written the file."""
    status = os.fstat(file.fileno())
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _contents(index: BinaryIO) -> dict[str, Any]:
    index.seek(-_TAIL.size, 2)
    end = index.tell()
    length, mark = _TAIL.unpack(index.read(_TAIL.size))
    if mark != _MARK or length > min(end, _LARGEST_CONTENTS):
        raise ValueError("no table of contents")
    index.seek(end - length)
    plain = zstandard.ZstdDecompressor().decompress(
        index.read(length), max_output_size=_LARGEST_CONTENTS
    )
    contents: dict[str, Any] = json.loads(plain)
    return contents


def _entry(row: list[Any]) -> Entry:
    path, mode, uid, gid, mtime, size, *more = row
    entry = Entry(path=path.encode("latin-1"), mode=mode, uid=uid, gid=gid, mtime=mtime, size=size)
    if more:
        target, major, minor, xattrs, hard_link = more
        entry.target = target.encode("latin-1")
        entry.device = (major, minor)
        entry.xattrs = tuple(
            (key.encode("latin-1"), value.encode("latin-1")) for key, value in xattrs
        )
        entry.hard_link = bool(hard_link)
    return entry


def _as_json(place: Place) -> int | list[Any]:
    return place if isinstance(place, int) else [place[0], place[1], place[2].decode("latin-1")]


def _place(value: Any) -> Place:
    return value if isinstance(value, int) else (value[0], value[1], value[2].encode("latin-1"))
