"""The least processor time an import can take: igzip of every layer, zstd 1 of every byte that shows.

`python -m bench.importing.floor LAYER…` (bottom first) prints both as JSON. As many of them run at once as there are
cores, so that each is measured on a machine as busy as an importer makes it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zstandard
from bench.importing import tars

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 131072


@dataclass(frozen=True)
class Floor:
    """Processor seconds, and bytes."""

    inflate_s: float
    compress_s: float
    plain_bytes: int  # of all layers
    shown_bytes: int  # of the files that show
    files: int

    def wall_s(self, cores: int) -> float:
        """Seconds with the work spread evenly over the cores."""
        return (self.inflate_s + self.compress_s) / cores


class Clock:
    """Adds up the processor seconds of calls."""

    def __init__(self) -> None:
        self.seconds, self.bytes = 0.0, 0

    def __call__(self, call: Callable[..., bytes], *words: Any) -> bytes:
        start = time.thread_time()
        made = call(*words)
        self.seconds += time.thread_time() - start
        self.bytes += len(made)
        return made


def work(layers: list[Path]) -> Floor:
    """Inflate all layers and compress what shows, in blocks of 128 KiB, the ends of files gathered to such blocks."""
    inflating, compressing = Clock(), Clock()
    compress = zstandard.ZstdCompressor(level=1).compress
    gathered, shown, files = bytearray(), 0, 0
    for member in tars.surviving(layers, lambda path: tars.Inflated(path, inflating)):
        content = b"".join(member.data()) if member.kind in b"0\0" else b""
        files += 1
        shown += len(content)
        whole = len(content) - len(content) % BLOCK
        view = memoryview(content)
        for start in range(0, whole, BLOCK):
            compressing(compress, view[start : start + BLOCK])
        gathered += view[whole:]
        if len(gathered) >= BLOCK:
            compressing(compress, bytes(gathered[:BLOCK]))
            del gathered[:BLOCK]
    compressing(compress, bytes(gathered))
    return Floor(inflating.seconds, compressing.seconds, inflating.bytes, shown, files)


def measure(layers: tuple[Path, ...]) -> Floor:
    """The floor of an image, as the mean of as many runs at once as there are cores."""
    argv = (sys.executable, "-m", "bench.importing.floor", *map(str, layers))
    cores = len(os.sched_getaffinity(0))
    running = [subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=ROOT) for _ in range(cores)]
    found = [Floor(**json.loads(child.communicate()[0])) for child in running]
    inflate, compress = sum(each.inflate_s for each in found), sum(each.compress_s for each in found)
    first = found[0]
    return Floor(inflate / cores, compress / cores, first.plain_bytes, first.shown_bytes, first.files)


if __name__ == "__main__":
    print(json.dumps(asdict(work([Path(word) for word in sys.argv[1:]]))))
