"""Cold `import torch` from squashfs files: fresh mount, page cache dropped."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bench.importing import measure

MOUNTS = {
    "kernel": ("mount", "-t", "squashfs", "-o", "loop,ro"),
    "squashfuse_ll": ("squashfuse_ll",),
    "squashfuse": ("squashfuse",),
}
SANDBOX = ("--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--setenv", "PYTHONPATH", "/opt/stack")


@contextmanager
def mounted(file: Path, way: str, folder: Path) -> Iterator[Path]:
    """The file's tree under `folder`, by the kernel or by FUSE."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run((*MOUNTS[way], str(file), str(folder)), check=True)
    try:
        yield folder
    finally:
        for _ in range(50):
            if subprocess.run(("umount", str(folder)), capture_output=True).returncode == 0:
                break
            time.sleep(0.1)


def cold_import(file: Path, way: str, folder: Path, module: str = "torch") -> float:
    """Seconds of `python3 -c 'import MODULE'` inside the file, nothing of it in memory before."""
    measure.drop_caches()
    subprocess.run(("bwrap", "--ro-bind", "/", "/", "true"), check=True)  # the sandbox's own program is warm
    with mounted(file, way, folder) as root:
        inside = ("bwrap", "--ro-bind", str(root), "/", *SANDBOX, "/usr/bin/python3", "-c", f"import {module}")
        start = time.perf_counter()
        subprocess.run(inside, check=True, stderr=subprocess.DEVNULL)
        return time.perf_counter() - start


def compare(files: Mapping[str, Path], folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Median seconds per kind of mount and file; the files take turns, so that drift meets all alike."""
    medians: dict[str, dict[str, float]] = {}
    for way in MOUNTS:
        seconds: dict[str, list[float]] = {name: [] for name in files}
        for _ in range(repeats):
            for name, file in files.items():
                seconds[name].append(cold_import(file, way, folder))
        medians[way] = {name: statistics.median(values) for name, values in seconds.items()}
        print(way, medians[way], flush=True)
    os.sync()
    return medians
