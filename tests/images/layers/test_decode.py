"""A layer's bytes come out plain and checked, whatever compressed them; damaged ones are refused, and nothing hangs."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
import struct
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import repeat

import pytest
import zstandard

from runner.errors import RunnerError
from runner.images.layers import decode
from runner.images.layers.decode import decoded
from runner.images.layers.layer import Layer

NUMBERS = range(300_000)
PLAIN = b"".join(map(struct.Struct("<IQ").pack, NUMBERS, map(pow, NUMBERS, repeat(2)))) + os.urandom(100_000)


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def layer(blob: bytes, plain: bytes | None = None, *, piece: int = 1 << 30) -> Layer:
    """A layer of that blob, read in pieces of at most so many bytes."""

    class Source(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(size, piece) if size is not None and size >= 0 else piece)

    @contextmanager
    def opened() -> Iterator[Source]:
        yield Source(blob)

    return Layer("" if plain is None else sha256(plain), sha256(blob), len(blob), opened)


def read(made: Layer, *, verify_diff_id: bool = True, size: int = 100_000) -> bytes:
    told: list[int] = []
    with decoded(made, verify_diff_id=verify_diff_id, advance=told.append) as stream:
        data = b"".join(iter(lambda: stream.read(size), b""))
    assert sum(told) == made.size_bytes or not made.size_bytes
    return data


def gzipped(data: bytes, level: int = 1) -> bytes:
    return gzip.compress(data, level)


def gzip_with_all_fields(data: bytes) -> bytes:
    head = b"\x1f\x8b\x08\x1e\0\0\0\0\0\xff" + struct.pack("<H", 6) + b"AB\x02\0xy" + b"name\0" + b"comment\0"
    return head + struct.pack("<H", zlib.crc32(head) & 0xFFFF) + gzipped(data)[10:]


def skippable(data: bytes) -> bytes:
    return b"\x5a\x2a\x4d\x18" + struct.pack("<I", len(data)) + data


def zstd(data: bytes, **options: object) -> bytes:
    return zstandard.ZstdCompressor(level=3, **options).compress(data)  # type: ignore[arg-type]


HALF = len(PLAIN) // 2
BLOBS: dict[str, Callable[[], bytes]] = {  # made when asked for: collecting the tests compresses nothing
    "plain": lambda: PLAIN,
    "gzip": lambda: gzipped(PLAIN),
    "gzip stored": lambda: gzipped(PLAIN, 0),
    "gzip with all fields": lambda: gzip_with_all_fields(PLAIN),
    "gzip members": lambda: gzipped(PLAIN[:HALF]) + gzip_with_all_fields(PLAIN[HALF:]) + gzipped(b""),
    "gzip, 3000 members": lambda: b"".join(gzipped(PLAIN[at : at + 1300]) for at in range(0, len(PLAIN), 1300)),
    "gzip and zeros": lambda: blob("gzip") + bytes(1_000_000),
    "gzip and garbage": lambda: blob("gzip") + b"garbage" * 100_000,
    "xz": lambda: lzma.compress(PLAIN),
    "xz streams": lambda: lzma.compress(PLAIN[:HALF]) + lzma.compress(PLAIN[HALF:], preset=9),
    "xz and zeros": lambda: blob("xz") + bytes(8),
    "bzip2": lambda: bz2.compress(PLAIN),
    "bzip2 streams": lambda: bz2.compress(PLAIN[:HALF]) + bz2.compress(PLAIN[HALF:], 1),
    "zstd": lambda: zstd(PLAIN),
    "zstd with checksum": lambda: zstd(PLAIN, write_checksum=True),
    "zstd without size": lambda: zstd(PLAIN, write_content_size=False),
    "zstd frames": lambda: zstd(PLAIN[:HALF]) + zstd(PLAIN[HALF:]),
    "zstd skippable": lambda: (
        skippable(b"x" * 300_000) + zstd(PLAIN[:HALF]) + skippable(b"") + zstd(PLAIN) + skippable(b"1")
    ),
    "zstd, 3000 frames": lambda: b"".join(zstd(PLAIN[at : at + 1300]) for at in range(0, len(PLAIN), 1300)),
}


@cache
def blob(name: str) -> bytes:
    return BLOBS[name]()


PLAINS = {"zstd skippable": PLAIN[:HALF] + PLAIN}


@pytest.mark.parametrize("name", BLOBS)
def test_the_plain_bytes_come_out(name: str) -> None:
    plain = PLAINS.get(name, PLAIN)
    assert read(layer(blob(name), plain)) == plain
    assert read(layer(blob(name), plain, piece=5003), size=-1) == plain


@pytest.mark.parametrize("name", ["gzip members", "gzip with all fields", "zstd skippable", "zstd frames", "plain"])
@pytest.mark.parametrize("piece", [1, 7])
def test_the_source_may_give_a_few_bytes_at_a_time(name: str, piece: int) -> None:
    plain = os.urandom(3000) + bytes(3000)
    blobs = {
        "gzip members": gzip.compress(plain[:100]) + gzip.compress(plain[100:]) + bytes(10),
        "gzip with all fields": gzip_with_all_fields(plain),
        "zstd skippable": skippable(b"abc") + zstd(plain) + skippable(b""),
        "zstd frames": zstd(plain[:10]) + zstd(plain[10:]),
        "plain": plain,
    }
    assert read(layer(blobs[name], plain, piece=piece)) == plain


def test_an_empty_layer_is_empty() -> None:
    for blob in (b"", gzip.compress(b""), zstd(b""), skippable(b"only")):
        assert read(layer(blob, b"")) == b""


def test_what_was_not_read_is_checked_on_leaving() -> None:
    with decoded(layer(blob("gzip"), PLAIN), advance=lambda count: None) as stream:
        assert stream.read(10) == PLAIN[:10]
    with (
        pytest.raises(RunnerError, match="damaged"),
        decoded(layer(blob("gzip"), b"another"), advance=lambda count: None) as stream,
    ):
        assert stream.read(10) == PLAIN[:10]


@pytest.mark.parametrize("name", ["plain", "gzip", "zstd"])
def test_what_is_not_what_its_digest_says_is_refused(name: str) -> None:
    good = layer(blob(name), PLAIN)
    wrong = sha256(b"wrong")
    for bad in (replace(good, digest=wrong), replace(good, diff_id=wrong)):
        with pytest.raises(RunnerError, match="damaged") as caught:
            read(bad)
        assert wrong in caught.value.why
    for size in (-1, 1):
        with pytest.raises(RunnerError, match="damaged"):
            read(replace(good, size_bytes=good.size_bytes + size))
    assert read(replace(good, diff_id=wrong), verify_diff_id=False) == PLAIN
    assert read(replace(good, digest="", size_bytes=0)) == PLAIN, "where only the diff_id is known"
    assert read(replace(good, digest="", diff_id="", size_bytes=0)) == PLAIN
    with pytest.raises(RunnerError, match="damaged"):
        read(replace(good, digest="", size_bytes=0, diff_id=wrong))
    sha512 = f"sha512:{hashlib.sha512(blob(name)).hexdigest()}"
    for digest in (sha512, "md5:" + "0" * 32, "sha256:12", "nothing"):
        with pytest.raises(RunnerError, match="damaged"):
            read(replace(good, digest=digest))


@pytest.mark.parametrize(
    "name", [name for name in BLOBS if name not in ("plain", "gzip and zeros", "gzip and garbage", "xz and zeros")]
)
@pytest.mark.parametrize("cut", [1, 9, 30_000])
def test_a_cut_stream_is_refused(name: str, cut: int) -> None:
    if name == "zstd skippable" and cut == 9:
        cut = 3
    with pytest.raises(RunnerError, match="cannot be decompressed"):
        read(layer(blob(name)[:-cut]))


def test_zstd_cut_at_every_byte_is_refused() -> None:
    """zstandard itself says nothing of a frame that is cut off."""
    for blob in (zstd(b"some text " * 30), zstd(os.urandom(100)), zstd(b"x" * 500, write_checksum=True)):
        for cut in range(1, len(blob) - 4):
            with pytest.raises(RunnerError, match="cannot be decompressed"):
                read(layer(blob[:-cut]))


@pytest.mark.parametrize("name", ["gzip", "gzip members", "zstd with checksum", "xz", "bzip2"])
def test_damaged_bytes_are_refused(name: str) -> None:
    for at in (15, len(blob(name)) // 2, len(blob(name)) - 2):
        damaged = bytearray(blob(name))
        damaged[at] ^= 0xFF
        with pytest.raises(RunnerError):
            read(layer(bytes(damaged), PLAIN))


@pytest.mark.parametrize(
    "compress",
    [
        lambda data: gzip.compress(data),
        lambda data: zstd(data),
        lambda data: lzma.compress(data, preset=1),
        bz2.compress,
    ],
)
def test_a_bomb_is_refused_and_never_lies_in_memory(monkeypatch, compress) -> None:
    monkeypatch.setattr(decode, "LARGEST_PLAIN", 48 << 20)
    blob = compress(bytes(64 << 20))
    tracemalloc.start()
    with (
        pytest.raises(RunnerError, match="cannot import the layer"),
        decoded(layer(blob), advance=lambda count: None) as stream,
    ):
        while stream.read(1 << 20):
            pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20


def test_a_window_that_takes_more_memory_than_the_standard_asks_for_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=29)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    blob = frame.compress(PLAIN) + frame.flush()
    with pytest.raises(RunnerError, match="cannot be decompressed"):
        read(layer(blob))


def pumps() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("_read_blob", "_inflate", "_hash_plain")]


@pytest.mark.parametrize("name", ["plain", "gzip", "zstd"])
def test_on_leaving_early_every_thread_ends(name: str) -> None:
    for before in (0, 10, len(PLAIN)):
        with pytest.raises(KeyError), decoded(layer(blob(name) * 20), advance=lambda count: None) as stream:
            stream.read(before)
            raise KeyError
        assert pumps() == []


def test_a_source_that_fails_ends_it() -> None:
    class Vanishing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() > 100_000:
                raise OSError(5, "Input/output error")
            return super().read(min(size or 0, 50_000))

    made = layer(blob("gzip"))
    with pytest.raises(RunnerError, match="cannot be read") as caught:
        read(replace(made, open=lambda: Vanishing(blob("gzip"))))
    assert "Input/output" in caught.value.why

    def missing():
        raise RunnerError("there is no such layer", "it is gone", "pull it")

    with pytest.raises(RunnerError, match="no such layer"):
        read(replace(made, open=missing))
    assert pumps() == []


def test_the_threads_run_ahead_only_so_far() -> None:
    """What nobody reads stays in the source."""
    taken = 0

    class Endless:
        def read(self, size: int = -1, /) -> bytes:
            nonlocal taken
            taken += size
            return bytes(size)

    @contextmanager
    def opened() -> Iterator[Endless]:
        yield Endless()

    with pytest.raises(KeyError), decoded(Layer("", "", 0, opened), advance=lambda count: None) as stream:
        stream.read(1)
        before = -1
        while taken != before:
            before = taken
            time.sleep(0.2)
        assert taken <= 16 << 20
        raise KeyError
    assert pumps() == []
