"""The runs of contents: the same bytes on any number of threads, copied without change, every failure told at once."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import random
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from runner.errors import RunnerError
from runner.images.layers.layer import ViewReader
from runner.images.squashfs.compression import Compress, Compression
from runner.images.squashfs.data import NO_FRAGMENT, DataWriter, Directory, FileData, Leaf, Run
from runner.images.squashfs.tables import write_tables
from runner.images.squashfs.workers import BATCH, UNDER_WAY
from tests.images.squashfs import readers, trees
from tests.images.squashfs.trees import Zeros, file

SMALL = Compression("zstd", 1, block_size=4096)


def contents(seed: int, count: int) -> list[bytes]:
    """Texts, noise and zeros around the sizes of one, two and three blocks of 4 KiB."""
    source = random.Random(seed)
    found = []
    for _ in range(count):
        size = source.choice((0, 1, 50, 1000, 4095, 4096, 4097, 8192, 12_000, 20_000))
        kind = source.choice((b"\0", b"text ", source.randbytes(4096)))
        found.append((kind * (size // len(kind) + 1))[:size])
    return found


def put(data: DataWriter, items: list[bytes]) -> tuple[Run, list[FileData]]:
    data.begin_run()
    held = [data.add(len(item), io.BytesIO(item)) for item in items]
    run = data.end_run()
    data.settle()
    return run, held


def tree_of(held: list[FileData]) -> Directory:
    leaves = {b"%06d" % number: Leaf(0o100644, 0, 0, 0, (), kept, 0) for number, kept in enumerate(held)}
    return Directory(0o40755, 0, 0, 0, (), leaves)  # type: ignore[arg-type]


@pytest.mark.parametrize("compression", ["zstd:1", "zstd:9", "gzip:3", "xz:1", "lz4", "none"])
def test_the_bytes_do_not_depend_on_the_number_of_threads(compression: str, tmp_path: Path) -> None:
    chosen = replace(Compression.parse(compression), block_size=4096)
    items = contents(1, 400)
    tree = {b"%d/%d" % (number % 7, number): file(item) for number, item in enumerate(items)}
    digests = set()
    for threads in (1, 2, 8):
        trees.make(tree, tmp_path / "a.sqsh", chosen, threads=threads, runs=3)
        digests.add(hashlib.sha256((tmp_path / "a.sqsh").read_bytes()).hexdigest())
    assert len(digests) == 1


def test_the_bytes_do_not_depend_on_the_order_in_which_names_were_put_in(tmp_path: Path) -> None:
    items = contents(2, 50)
    for name, backwards in (("a", False), ("b", True)):
        with (tmp_path / name).open("wb") as out, DataWriter(out, SMALL, 2) as data:
            _, held = put(data, items)
            root = tree_of(held)
            root.children = dict(sorted(root.children.items(), reverse=backwards))
            write_tables(out, data, root, time=0, compression=SMALL)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.uses("unsquashfs")
@pytest.mark.parametrize("by_kernel", [True, False], ids=["copy_file_range", "read-write"])
def test_a_copied_run_reads_as_the_first(by_kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are the same; only where it lies, and the numbers of its fragments, are others."""
    if not by_kernel:
        monkeypatch.setattr(os, "copy_file_range", lambda *_: 0)
    below, above = contents(3, 120), contents(4, 60)
    with (tmp_path / "old").open("wb") as out, DataWriter(out, SMALL, 2) as data:
        put(data, contents(5, 30))
        run, held = put(data, below)
        write_tables(out, data, tree_of(held), time=0, compression=SMALL)
    with (tmp_path / "new").open("wb") as out, DataWriter(out, SMALL, 2) as data, (tmp_path / "old").open("rb") as old:
        _, first = put(data, above)
        copy = data.copy_run(old, run)
        _, last = put(data, above)
        held = [*first, *(FileData(copy, kept.place) for kept in held), *last]
        write_tables(out, data, tree_of(held), time=0, compression=SMALL)
    old_bytes, new_bytes = (tmp_path / "old").read_bytes(), (tmp_path / "new").read_bytes()
    assert old_bytes[run.offset : run.offset + run.length] == new_bytes[copy.offset : copy.offset + copy.length] != b""
    assert copy.first_fragment > run.first_fragment > 0
    found = readers.read_back("unsquashfs", tmp_path / "new", tmp_path / "out")
    for number, item in enumerate([*above, *below, *above]):
        assert found[b"%06d" % number].what == f"{len(item)} {hashlib.sha256(item).hexdigest()}"


def test_a_run_packed_anew_equals_its_copy(tmp_path: Path) -> None:
    """Full and incremental import of the same layers give equal bytes."""
    layers = [contents(seed, 80) for seed in (6, 7)]
    images = []
    for name in ("full", "incremental"):
        with (tmp_path / name).open("wb") as out, DataWriter(out, SMALL, 2) as data:
            if name == "full":
                (run, first), (_, second) = put(data, layers[0]), put(data, layers[1])
                full_run, full_held = run, first
            else:
                with (tmp_path / "full").open("rb") as full:
                    copy = data.copy_run(full, full_run)
                first = [FileData(copy, kept.place) for kept in full_held]
                _, second = put(data, layers[1])
            write_tables(out, data, tree_of([*first, *second]), time=0, compression=SMALL)
        images.append((tmp_path / name).read_bytes())
    assert images[0] == images[1]


def test_a_run_is_copied_to_another_file_system(tmp_path: Path) -> None:
    """copy_file_range refuses (EXDEV) or not, by the kernel: the bytes are the same."""
    with TemporaryFile(dir="/dev/shm") as source:
        source.write(content := os.urandom(3 << 20))
        source.flush()
        with (tmp_path / "a").open("w+b") as out, DataWriter(out, SMALL, 1) as data:
            begin = data.position
            copy = data.copy_run(source, Run(1000, 2 << 20))
            assert (copy.offset, copy.length, data.position) == (begin, 2 << 20, begin + (2 << 20))
            out.write(b"behind")
            data.settle()
            out.seek(begin)
            assert out.read() == content[1000 : 1000 + (2 << 20)] + b"behind"


def test_a_run_that_its_file_does_not_hold_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"too short")
    damaged = pytest.raises(RunnerError, match="is damaged")
    with (
        (tmp_path / "a").open("wb") as out,
        (tmp_path / "old").open("rb") as old,
        damaged,
        DataWriter(out, SMALL, 1) as data,
    ):
        data.copy_run(old, Run(0, 100))
        data.settle()


@pytest.mark.parametrize("size", [100, 4096, 100_000])
def test_a_content_that_breaks_off_is_refused(size: int, tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as out, DataWriter(out, SMALL, 2) as data:
        data.begin_run()
        with pytest.raises(RunnerError, match="is truncated"):
            data.add(size, Zeros(size - 1))


@contextmanager
def nothing_left() -> Iterator[None]:
    """No thread that was started inside; those of other tests may end meanwhile."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("size", [1000, 50_000])
def test_a_full_disk_is_an_oserror_and_ends_all_threads(size: int, tmp_path: Path) -> None:
    """On a small tmpfs of its own; without the right to mount, on /dev/full."""
    target = Path("/dev/full")
    if os.geteuid() == 0:
        subprocess.run(("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)), check=True)
        target = tmp_path / "a"
    try:
        with (
            nothing_left(),
            pytest.raises(OSError) as raised,
            target.open("wb", buffering=0) as out,
            DataWriter(out, SMALL, 4) as data,
        ):
            data.begin_run()
            for _ in range(4000):
                data.add(size, io.BytesIO(os.urandom(size)))
            data.end_run()
            data.settle()
        assert raised.value.errno == errno.ENOSPC
    finally:
        if os.geteuid() == 0:
            subprocess.run(("umount", str(tmp_path)), check=True)


def test_leaving_early_ends_all_threads_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What waits to be compressed is dropped: each of the 8 threads ends with the block that it has begun."""
    slow = Compression("zstd", 19, block_size=1 << 20)
    noise = os.urandom(1 << 20)
    begun: list[int] = []
    compressor = Compression.compressor

    def counted(compression: Compression) -> Compress:
        compress = compressor(compression)  # for one thread alone
        assert compress is not None
        return lambda block: begun.append(len(block)) or compress(block)

    monkeypatch.setattr(Compression, "compressor", counted)
    before = set(threading.enumerate())
    with (
        nothing_left(),
        pytest.raises(KeyboardInterrupt),
        (tmp_path / "a").open("wb") as out,
        DataWriter(out, slow, 8) as data,
    ):
        data.begin_run()
        for _ in range(30):
            data.add(1 << 20, io.BytesIO(noise))
        names = [thread.name for thread in set(threading.enumerate()) - before]
        assert sum(name.startswith("compress") for name in names) == 8
        seen = len(begun)
        raise KeyboardInterrupt
    assert len(begun) <= seen + 8


def test_what_a_compressor_raises_comes_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No real one does so at will: memory that runs out is made up."""

    def compress(block: bytes | memoryview) -> bytes:
        raise MemoryError("none is left")

    monkeypatch.setattr(Compression, "compressor", lambda self: compress)
    with nothing_left(), (tmp_path / "a").open("wb") as out, DataWriter(out, SMALL, 2) as data:
        data.begin_run()
        with pytest.raises(MemoryError, match="none is left"):
            for _ in range(1000):
                data.add(100_000, Counted())
            data.end_run()


def test_a_thread_that_cannot_be_started_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where `ulimit -u` is reached, which root never does; the thread that did start ends."""
    start = threading.Thread.start

    def one(self: threading.Thread) -> None:
        if self.name == "compress_1":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", one)
    with nothing_left(), (tmp_path / "a").open("wb") as out, DataWriter(out, SMALL, 2) as data:
        data.begin_run()
        with pytest.raises(RunnerError, match="cannot start the threads") as raised:
            for _ in range(100):
                data.add(BATCH + 1, Counted())
        assert "ulimit -u" in raised.value.fix


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("small", [False, True])
def test_the_memory_is_bounded_while_the_compressors_are_slow(
    small: bool, threads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A reader that is faster than the threads waits, whether it gives blocks or a little of each large chunk."""
    go, enough = threading.Event(), threading.Event()
    compressor = Compression.compressor

    def waiting(compression: Compression) -> Compress:
        compress = compressor(compression)  # for one thread alone
        assert compress is not None
        return lambda block: compress(block) if go.wait() else b""

    def add() -> None:
        while not enough.is_set():
            data.add(4096, source)

    monkeypatch.setattr(Compression, "compressor", waiting)
    source = Views() if small else Counted()
    with (tmp_path / "a").open("wb") as out, DataWriter(out, SMALL, threads) as data:
        data.begin_run()
        thread = threading.Thread(target=add)
        thread.start()
        most, deadline = UNDER_WAY * threads, time.monotonic() + 60
        while source.given < most and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)  # were there no bound, it would go on
        given = source.given
        enough.set()
        go.set()
        thread.join()
        assert most <= given <= most + (most // 2 if small else 2 * BATCH)
        data.end_run()


def test_a_long_hole_takes_little_memory(tmp_path: Path) -> None:
    """Of its blocks nothing is stored: they are handed over all the same, before there are too many."""
    with (tmp_path / "a").open("wb") as out, DataWriter(out, SMALL, 2) as data:
        data.begin_run()
        tracemalloc.start()
        try:
            hole = data.add(512 << 20, Zeros(512 << 20))
            data.end_run()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert hole.located()[2] == bytes(4 * (512 << 20) // 4096)
    assert peak < 5 << 20, peak


class Counted:
    """Random bytes; how many were asked for."""

    def __init__(self) -> None:
        self.given = 0

    def read(self, size: int = -1, /) -> bytes:
        self.given += size
        return os.urandom(size)


class Views(ViewReader):
    """A little of each chunk of 1 MiB, as where nearly all of a layer is hidden; how many bytes that holds."""

    def __init__(self) -> None:
        self.given = 0

    def view(self, size: int, /) -> memoryview:
        self.given += 1 << 20
        return memoryview(bytes(1) * 512 + os.urandom(512) + bytes((1 << 20) - 1024))[512 : 512 + size]

    def read(self, size: int = -1, /) -> bytes:
        return bytes(self.view(size))


def test_nothing_is_a_squashfs_before_its_tables_are_written(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as out, DataWriter(out, SMALL, 1) as data:
        put(data, contents(8, 20))
        out.flush()
        assert (tmp_path / "a").read_bytes()[:96] == bytes(96)


def test_equal_places_take_few_bytes() -> None:
    """A content's place says what it was made of, in blocks or in a fragment."""
    run = Run(100, first_fragment=7)
    small = FileData(run, ((70_000 + 1) << 20 | 1_000_000) << 20 | 4095)
    assert small.located() == (4095, 0, b"", 70_007, 1_000_000)
    large = FileData(run, (1 << 40, 5, b"1234"))
    assert large.located() == (1 << 40, 105, b"1234", NO_FRAGMENT, 0)
    assert FileData(run, 0).located() == (0, 0, b"", NO_FRAGMENT, 0)
    assert FileData(Run(9), large.place).located()[1] == 14, "a copy of the run has the same places"


@pytest.mark.parametrize(
    "text", ["", "zip", "zstd:0", "zstd:23", "zstd:", "zstd:x", "gzip:10", "none:1", "lz4:1", "lzo", "zstd:²"]
)
def test_a_compression_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(RunnerError, match="the compression cannot be"):
        Compression.parse(text)


@pytest.mark.parametrize("size", [0, 4095, 2048, 2 << 20])
def test_no_caller_can_ask_for_a_block_size_that_squashfs_has_not(size: int) -> None:
    with pytest.raises(AssertionError):
        Compression("zstd", 1, size)
