"""The thread that writes: its bounds, and what goes wrong."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from runner.images.squashfs import disk as module
from runner.images.squashfs.disk import MOST_UNWRITTEN, Block, Disk, Memory, write_pieces


def opened(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    return os.open(path, flags, 0o600)


def descriptors_of(path: Path) -> list[Path]:
    """This process's open descriptors of one file: other tests of the process open and close their own meanwhile."""
    return [link for link in Path("/proc/self/fd").iterdir() if os.path.realpath(link) == str(path.resolve())]


def test_blocks_and_copies_come_to_lie_where_they_were_wanted(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(old := os.urandom(3 << 20))
    target, source = opened(tmp_path / "new"), opened(tmp_path / "old")
    disk = Disk(target)
    disk.write([b"first", memoryview(b"-second-")[1:7]], 0)
    disk.copy(source, 5, 11, 1 << 20)
    os.close(source)
    disk.write([b"last"], 11 + (1 << 20))
    disk.settle()
    os.close(target)
    assert (tmp_path / "new").read_bytes() == b"firstsecond" + old[5 : 5 + (1 << 20)] + b"last"


@pytest.mark.parametrize("views", [False, True])
def test_a_slow_disk_holds_up_who_writes(views: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No disk is slow at will: one that waits is made up. A view counts as all that it keeps in memory."""
    go, given, enough = threading.Event(), [0], threading.Event()

    def slow(target: int, pieces: Sequence[Block], position: int) -> int:
        go.wait()
        return write_pieces(target, pieces, position)

    def write() -> None:
        while not enough.is_set():
            block = bytes(1 << 20)
            disk.write([memoryview(block)[:100] if views else block], 0)
            given[0] += 1 << 20

    monkeypatch.setattr(module, "write_pieces", slow)
    target = opened(tmp_path / "file")
    disk = Disk(target)
    thread = threading.Thread(target=write)
    thread.start()
    deadline = time.monotonic() + 30
    while given[0] < MOST_UNWRITTEN and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)  # were there no bound, it would go on
    seen = given[0]
    enough.set()
    go.set()
    thread.join()
    disk.settle()
    os.close(target)
    assert seen == MOST_UNWRITTEN


def test_what_goes_wrong_is_raised_by_a_later_call(tmp_path: Path) -> None:
    """Nothing more is written after it, and no descriptor stays open."""
    (tmp_path / "file").write_bytes(b"old")
    target, source = opened(tmp_path / "file", os.O_RDONLY), opened(tmp_path / "file")
    disk = Disk(target)
    with pytest.raises(OSError) as raised:
        for _ in range(1000):
            disk.write([bytes(MOST_UNWRITTEN)], 0)
            disk.copy(source, 0, 0, 3)
    assert raised.value.errno == errno.EBADF
    for again in (*[lambda: disk.write([bytes(MOST_UNWRITTEN)], 0)] * 3, disk.settle):
        with pytest.raises(OSError):
            again()
    assert len(descriptors_of(tmp_path / "file")) == 2, "the copies' duplicates are closed"
    disk.close()
    os.close(target)
    os.close(source)
    assert not descriptors_of(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"old"


def test_what_has_not_begun_is_left_out_when_it_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The disk is slow until close() waits for its thread."""
    begun, go, join = threading.Event(), threading.Event(), threading.Thread.join

    def slow(target: int, pieces: Sequence[Block], position: int) -> int:
        begun.set()
        go.wait()
        return write_pieces(target, pieces, position)

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        go.set()
        join(thread, timeout)

    monkeypatch.setattr(module, "write_pieces", slow)
    monkeypatch.setattr(threading.Thread, "join", joined)
    target = opened(tmp_path / "file")
    disk = Disk(target)
    disk.write([b"begun"], 0)
    disk.write([b"waits"], 5)
    begun.wait()
    disk.close()
    os.close(target)
    assert (tmp_path / "file").read_bytes() == b"begun"


def test_memory_is_counted_once_for_views_in_a_row() -> None:
    memory, first, second = Memory(), bytes(1000), bytes(500)
    views = [memoryview(first)[:10], memoryview(first)[10:], memoryview(second)[:1], memoryview(first)[:1]]
    assert [memory.more(block) for block in (b"abc", *views)] == [3, 1000, 0, 500, 1000]
