"""Images that only memory is measured on: 1 GB, 5 GB, 20 GB by repeating layers' content, and many small files."""

from __future__ import annotations

import io
import os
import random
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from bench.importing import layout, measure, tars, ways
from bench.importing.content import EPOCH, Content
from bench.importing.layout import Blob

LARGE = 1 << 20
FAST = 1  # pigz's level: only bytes and files count here


@dataclass(frozen=True)
class Seen:
    """What one import took."""

    image: str
    plain_gb: float
    files: int
    wall_s: float
    memory_mib: float


def images(content: Content) -> Iterator[tuple[str, Path]]:
    """Layouts, each made when its turn comes."""
    yield "1 GB", layout.write(content.work / "gb-1", (content.base(), content.last(1)), content.blobs)
    yield "5 GB", content.images()[0]
    yield "100,000 small files", _many(content, 100_000)
    yield "500,000 small files", _many(content, 500_000)
    yield "20 GB", _repeated(content, 20_000_000_000)


def measure_all(content: Content, scratch: Path, names: tuple[str, ...]) -> list[Seen]:
    """Import each image by `runner import` and watch its memory."""
    found = []
    for name, image in images(content):
        if names and name not in names:
            continue
        target = scratch / "memory.sqsh"
        cost = measure.measured(lambda image=image, target=target: ways.ours(image, target))  # type: ignore[misc]
        plain, files = _size(image)
        found.append(Seen(name, plain / 1e9, files, cost.wall_s, cost.memory_mib))
        print(found[-1], flush=True)
        for path in scratch.iterdir():
            if path.is_file():
                path.unlink()
    return found


def _size(image: Path) -> tuple[int, int]:
    """Plain bytes and members of all layers."""
    plain = files = 0
    for layer in layout.layers_of(image):
        for member in tars.members(tars.Inflated(layer)):
            files += 1
            plain += member.size
    return plain, files


def _many(content: Content, count: int) -> Path:
    """One layer of `count` files, 100 to 3000 bytes each, a hundred to a folder."""
    note = content.work / f"files-{count}.json"
    if not layout.load(note):
        layout.save([_blob(content, lambda tar: _small_files(tar, count))], note)
    return layout.write(content.work / f"files-{count}", layout.load(note), content.blobs)


def _repeated(content: Content, size: int) -> Path:
    """The image, and its large files again under other names until it has `size` plain bytes."""
    lower = (content.base(), content.stack(), content.more(), content.debian(), content.changes(), content.last(1))
    copies: list[Blob] = []
    while sum(blob.plain_size for blob in (*lower, *copies)) < size:
        note = content.work / f"copy-{len(copies)}.json"
        if not layout.load(note):
            prefix = f"opt/copy-{len(copies)}"
            layout.save([_blob(content, lambda tar, prefix=prefix: _large_files(tar, lower, content, prefix))], note)
        copies += layout.load(note)
    return layout.write(content.work / "gb-20", (*lower, *copies), content.blobs)


def _blob(content: Content, fill: object) -> Blob:
    """A gzip blob of the tar that `fill` writes, made while it is written."""
    read, write = _pipe()

    def produce() -> None:
        with write, tarfile.open(fileobj=write, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20) as tar:
            fill(tar)  # type: ignore[operator]

    thread = threading.Thread(target=produce)
    thread.start()
    with read:
        blob = layout.compress(read, content.blobs, FAST)
    thread.join()
    return blob


def _pipe() -> tuple[BinaryIO, BinaryIO]:
    """Both ends, buffered: a raw write to a pipe may take only a part."""
    read, write = os.pipe()
    return os.fdopen(read, "rb"), os.fdopen(write, "wb")


def _small_files(tar: tarfile.TarFile, count: int) -> None:
    chance = random.Random(count)
    text = " ".join(f"word{chance.randrange(10**5)}" for _ in range(20000)).encode()
    for index in range(count):
        entry = tarfile.TarInfo(f"data/{index // 10000:03}/{index // 100 % 100:02}/file-{index:06}.txt")
        entry.size, entry.mtime = chance.randrange(100, 3000), EPOCH + index
        start = chance.randrange(len(text) - 3000)
        tar.addfile(entry, io.BytesIO(text[start : start + entry.size]))


def _large_files(tar: tarfile.TarFile, layers: tuple[Blob, ...], content: Content, prefix: str) -> None:
    for layer in layers:
        for member in tars.members(tars.Inflated(layer.path(content.blobs))):
            if member.kind in b"0\0" and member.size >= LARGE:
                entry = tarfile.TarInfo(f"{prefix}/{member.name.removeprefix(b'./').decode()}")
                entry.size, entry.mtime = member.size, EPOCH
                tar.addfile(entry, io.BytesIO(b"".join(member.data())))
