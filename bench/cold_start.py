"""A cold start from a squashfs on a slow file system, with and without a trace, beside a warm one.

`./nox -s bench -- cold_start IMAGE HOT [--runs N] [--delays 1,5] [--command WORDS]`, as root: IMAGE and HOT are files
of the same image, imported without and with `--trace`. A FUSE file system of our own shows each and adds the delay (in
milliseconds) to every read request. The container is that of the engine `sandbox`, squashfuse below. Seconds are those
of the whole `runner shell`; bytes are those that the file system sent, readahead of the kernel included.

In turn: `cold` on a new mount; `warm` once more on the same mount. `no list` is HOT with the list at its end cut off:
its layout alone, without reading ahead. `one read` is the region, read by dd in one go on a new mount. `touched` are
the pages of HOT that squashfuse asks for, without any reading ahead. Goals: with a trace, a cold start takes at most
1.5 times the seconds of a warm one, plus those of one read; and reads at most 1.3 times the bytes touched.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import shlex
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

from runner.images.importer.hot import LIST_SIZE

RUNNER = str(Path(sys.executable).parent / "runner")
COMMAND = "/opt/venv/bin/python -c 'import torch, transformers, deepspeed'"
NAME = b"image.sqsh"
THREADS = 32
# Source: Linux 6.1, include/uapi/linux/fuse.h
LOOKUP, FORGET, GETATTR, OPEN, READ, RELEASE, FLUSH, INIT, OPENDIR, RELEASEDIR, BATCH_FORGET = (
    *(1, 2, 3, 14, 15, 18, 25, 26, 27, 29),
    42,
)
HEADER, ANSWER = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
ASYNC_READ, MAX_PAGES, KEEP_CACHE = 1 << 0, 1 << 22, 1 << 1
VALID = 3600  # seconds


class SlowFile:
    """A FUSE file system with one file, whose reads take `delay` seconds more; counts what it sends."""

    def __init__(self, image: Path, folder: Path, delay: float) -> None:
        self.delay, self.requests, self.bytes = delay, 0, 0
        self._image = os.open(image, os.O_RDONLY)
        self._fuse = os.open("/dev/fuse", os.O_RDWR)
        self._size = os.fstat(self._image).st_size
        self._lock = threading.Lock()
        options = f"fd={self._fuse},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        if ctypes.CDLL(None, use_errno=True).mount(b"slow", bytes(folder), b"fuse", 0, options):
            raise OSError(ctypes.get_errno(), "mount")

    def serve(self) -> None:
        """Answer until the file system is unmounted."""
        while True:
            try:
                request = os.read(self._fuse, (1 << 20) + 4096)
            except OSError as error:
                if error.errno in (errno.ENODEV, errno.EBADF):
                    return
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                raise
            _, opcode, unique, node, *_ = HEADER.unpack_from(request)
            if opcode in (FORGET, BATCH_FORGET):
                continue
            code, answer = self._answer(opcode, node, request[HEADER.size :])
            with suppress(FileNotFoundError):  # who asked has been interrupted
                os.write(self._fuse, ANSWER.pack(ANSWER.size + len(answer), -code, unique) + answer)

    def _answer(self, opcode: int, node: int, body: bytes) -> tuple[int, bytes]:
        if opcode == INIT:
            _, _, readahead, flags = struct.unpack_from("<IIII", body)
            ours = flags & (ASYNC_READ | MAX_PAGES)
            return 0, struct.pack("<IIIIHHIIHH8I", 7, 31, readahead, ours, 64, 48, 1 << 20, 1, 256, 0, *[0] * 8)
        if opcode == LOOKUP and body.rstrip(b"\0") == NAME:
            return 0, struct.pack("<QQQQII", 2, 0, VALID, VALID, 0, 0) + self._attributes(2)
        if opcode == LOOKUP:
            return errno.ENOENT, b""
        if opcode == GETATTR:
            return 0, struct.pack("<QII", VALID, 0, 0) + self._attributes(node)
        if opcode in (OPEN, OPENDIR):
            return 0, struct.pack("<QII", 1, KEEP_CACHE, 0)
        if opcode == READ:
            _, offset, size = struct.unpack_from("<QQI", body)
            time.sleep(self.delay)
            data = os.pread(self._image, size, offset)
            with self._lock:
                self.requests += 1
                self.bytes += len(data)
            return 0, data
        return (0, b"") if opcode in (RELEASE, RELEASEDIR, FLUSH) else (errno.ENOSYS, b"")

    def _attributes(self, node: int) -> bytes:
        mode, size = (stat.S_IFDIR | 0o755, 0) if node == 1 else (stat.S_IFREG | 0o644, self._size)
        return struct.pack("<6Q10I", node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def serve(image: str, folder: str, delay: str) -> None:
    """The process of the file system: prints its counters, as JSON, for each line on stdin."""
    slow = SlowFile(Path(image), Path(folder), float(delay))
    for _ in range(THREADS):
        threading.Thread(target=slow.serve, daemon=True).start()
    for _ in sys.stdin:
        print(json.dumps([slow.requests, slow.bytes]), flush=True)


class Mount:
    """The image on a slow file system."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self.path = process, folder / NAME.decode()
        self.held = self.path.open("rb")  # the kernel keeps the pages of an open file for the warm start
        self._before = self._counters()

    def _counters(self) -> list[int]:
        assert self._process.stdin and self._process.stdout
        print(file=self._process.stdin, flush=True)
        found: list[int] = json.loads(self._process.stdout.readline())
        return found

    def counted(self) -> tuple[int, float]:
        """Requests, and megabytes, since the call before."""
        before, self._before = self._before, self._counters()
        return self._before[0] - before[0], (self._before[1] - before[1]) / 1e6


@contextmanager
def mounted(image: Path, delay: float, *, readahead: bool = True) -> Iterator[Mount]:
    """A new mount, of which nothing is in the page cache. Without `readahead`, the kernel reads only what it must."""
    with tempfile.TemporaryDirectory(prefix="cold-start-") as folder:
        words = (sys.executable, __file__, "--serve", str(image), folder, str(delay))
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                while not os.path.ismount(folder):
                    assert process.poll() is None, "the slow file system has ended"
                    time.sleep(0.01)
                if not readahead:
                    device = Path(folder).stat().st_dev
                    number = f"{os.major(device)}:{os.minor(device)}"
                    Path(f"/sys/class/bdi/{number}/read_ahead_kb").write_text("0")
                mount = Mount(process, Path(folder))
                with mount.held:
                    yield mount
            finally:
                subprocess.run(("umount", "-l", folder), check=False)
                process.send_signal(signal.SIGKILL)


def start(image: Path, command: str) -> float:
    """Seconds of a command in the sandbox."""
    with tempfile.TemporaryDirectory(prefix="cold-start-") as folder:
        project = Path(folder)
        (project / "edf").mkdir()
        (project / "edf/cold.toml").write_text(f'image = "{image}"\n')
        begun = time.monotonic()
        words = (RUNNER, "shell", "cold", "--site", "local", "--engine", "sandbox", "--", *shlex.split(command))
        subprocess.run(words, cwd=project, check=True, capture_output=True, stdin=subprocess.DEVNULL)
        return time.monotonic() - begun


def region(hot: Path) -> tuple[int, int]:
    """Offset and length of the region that HOT lists."""
    with hot.open("rb") as file:
        file.seek(-LIST_SIZE, os.SEEK_END)
        _, offset, length = file.readline().split()
    return int(offset), int(length)


def one_read(hot: Path, delay: float) -> tuple[float, int, float]:
    """Seconds, requests and megabytes of the region, read in one go."""
    offset, length = region(hot)
    with mounted(hot, delay) as mount:
        begun = time.monotonic()
        words = ("dd", f"if={mount.path}", "of=/dev/null", "bs=1M", "iflag=skip_bytes,count_bytes")
        subprocess.run((*words, f"skip={offset}", f"count={length}"), check=True, capture_output=True)
        return time.monotonic() - begun, *mount.counted()


def touched(unlisted: Path, command: str) -> float:
    """Megabytes that a start asks for."""
    with mounted(unlisted, 0, readahead=False) as mount:
        start(mount.path, command)
        return mount.counted()[1]


def main() -> None:
    """Measure all ways in turn, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", type=Path)
    parser.add_argument("hot", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--delays", default="1,5")
    parser.add_argument("--command", default=COMMAND)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cold-start-") as folder:
        unlisted = Path(folder) / "unlisted.sqsh"
        subprocess.run(("cp", "--reflink=auto", str(options.hot), str(unlisted)), check=True)
        os.truncate(unlisted, options.hot.stat().st_size - LIST_SIZE)
        images = {"without a trace": options.image, "trace, no list": unlisted, "trace": options.hot}
        asked = touched(unlisted, options.command)
        print(f"touched: {asked:.1f} MB")
        print(f"{'delay':>5} {'way':<24}{'seconds':>8}{'requests':>10}{'MB':>8}{'x warm':>8}{'x touched':>11}")
        for delay in map(float, options.delays.split(",")):
            rows = measured(images, options.hot, delay / 1000, options.runs, options.command)
            warm = rows["trace, warm"][0]
            for name, (seconds, requests, megabytes) in rows.items():
                figures = f"{seconds:>8.2f}{requests:>10.0f}{megabytes:>8.1f}"
                print(f"{delay:>5g} {name:<24}{figures}{seconds / warm:>8.2f}{megabytes / asked:>11.2f}")
            goal = 1.5 * warm + rows["one read"][0]
            print(f"{delay:>5g} goal for `trace, cold`: at most {goal:.2f} s and {1.3 * asked:.1f} MB", flush=True)


def measured(
    images: dict[str, Path], hot: Path, delay: float, runs: int, command: str
) -> dict[str, tuple[float, float, float]]:
    """The median seconds, requests and megabytes of each way; the ways in turn, so that all meet the same machine."""
    samples: dict[str, list[tuple[float, int, float]]] = {}
    for _ in range(runs):
        for name, image in images.items():
            with mounted(image, delay) as mount:
                for kind in ("cold", "warm"):
                    samples.setdefault(f"{name}, {kind}", []).append((start(mount.path, command), *mount.counted()))
        samples.setdefault("one read", []).append(one_read(hot, delay))
    return {
        name: (median(row[0] for row in rows), median(row[1] for row in rows), median(row[2] for row in rows))
        for name, rows in samples.items()
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        main()
