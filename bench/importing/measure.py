"""What one way of importing costs: seconds, processor time, memory of its own, bytes written."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

INTERVAL_S = 0.05


@dataclass(frozen=True)
class Cost:
    """One run of one way."""

    wall_s: float
    cpu_s: float  # user and system, of every process that the way started, and of its own steps in this process
    memory_mib: float  # the largest sum of anonymous memory of all its processes, shared one counted once; every 50 ms
    written_mib: float  # pages of files on disk that its processes made dirty
    output_mib: float


def measured(way: Callable[[], Path]) -> Cost:
    """Run a way that returns the file it wrote, and say what it cost, until the file is on the disk.

    Bytes written are the kernel's account of dirtied pages, which passes from each ended child to its parent
    (getrusage's ru_oublock, in blocks of 512 bytes); files on tmpfs are not in it.
    """
    os.sync()
    before, own = resource.getrusage(resource.RUSAGE_CHILDREN), time.thread_time()
    watch = Memory()
    start = time.perf_counter()
    with watch:
        target = way()
        descriptor = os.open(target, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime + time.thread_time() - own
    written = (after.ru_oublock - before.ru_oublock) * 512
    return Cost(wall, cpu, watch.peak / 2**20, written / 2**20, target.stat().st_size / 2**20)


class Memory:
    """Watches the anonymous memory of this process's descendants, and what they share, in a thread."""

    def __init__(self) -> None:
        self.peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(INTERVAL_S):
            used = [resident(pid) for pid in descendants(os.getpid())]
            shared = max((shared for _, shared in used), default=0)
            self.peak = max(self.peak, shared + sum(anonymous for anonymous, _ in used))


def descendants(pid: int) -> Iterator[int]:
    """Every living process below `pid`."""
    for task in _tasks(pid):
        try:
            children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        except OSError:
            continue  # the thread or the process has just ended
        for child in map(int, children):
            yield child
            yield from descendants(child)


def _tasks(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 (names are all that is wanted, often)
    except OSError:
        return []


def resident(pid: int) -> tuple[int, int]:
    """Bytes of anonymous and of shared memory of a process; zeros when it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0, 0
    fields = {line.partition(":")[0]: line.split()[1] for line in text.splitlines() if line.startswith("Rss")}
    return int(fields.get("RssAnon", 0)) * 1024, int(fields.get("RssShmem", 0)) * 1024


def drop_caches() -> str:
    """Drop the page cache, dentries and inodes; how it was done."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    return "echo 3 > /proc/sys/vm/drop_caches"
