"""Hot-first layout: what a start reads, as a trace of an earlier start says, is the end of the squashfs.

First the small files of the trace in fragments of their own, then the blocks of its large files, then the tables. The
blocks in the layers' runs remain, so that a later import can copy whole runs. squashfs cannot split the blocks of a
file, so a large file of which less than half was read stays where it is.
"""

import io
import os
import re
import struct
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from runner.errors import RunnerError
from runner.images.squashfs.compression import Compression
from runner.images.squashfs.data import FRAGMENT, DataWriter, Directory, FileData, Leaf, Run
from runner.images.squashfs.workers import PLAIN
from runner.machine import files

Places = list[tuple[int, int]]  # each: first byte, and the end
# path without the leading slash -> what was read of it; nothing: the whole file
Trace = dict[bytes, Places]
LIST_SIZE = 4096  # bytes after the squashfs, with lines `hot OFFSET LENGTH`: what to read ahead
_GAP = 128 << 10  # bytes that are read in vain to join two places
_LINE = re.compile(rb"(?:(\d+-\d+(?:,\d+-\d+)*) )?/(.+)", re.DOTALL)
_OPENED = re.compile(rb"   open\[(\d+)\] flags: \S+ (/.*)")
_READ = re.compile(rb"   read\[(\d+)\] (\d+) bytes from (\d+)")


def read_trace(path: Path) -> Trace:
    """The trace in a file. Raises RunnerError for an invalid line, and if the file cannot be read."""
    with files.explained(f"read {path}"):
        lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    trace: Trace = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if not match:
            raise RunnerError(
                f"{path}:{number} is not a line of a trace",
                "a line must be `FIRST-END,… /PATH` or `/PATH`",
                "record a new trace: runner shell --trace FILE",
            )
        trace[match[2]] = [
            (int(first), int(end)) for first, end in re.findall(rb"(\d+)-(\d+)", match[1] or b"")
        ]
    return trace


def write_trace(target: Path, log: Path) -> int:
    """Write the trace that the log of `squashfuse -d -s` shows, remove the log, and return the number of files.

    Raises RunnerError if the log is missing or shows none. Source: libfuse 3.14, lib/fuse.c.
    """
    opened: dict[bytes, bytes] = {}  # by handle, which is used again after the file is closed
    read: Trace = {}
    for line in log.read_bytes().split(b"\n") if log.exists() else ():
        match = _OPENED.match(line)
        if match:
            opened[match[1]] = match[2]
            continue
        match = _READ.match(line)
        if match and match[1] in opened:
            size, start = int(match[2]), int(match[3])
            if size:
                read.setdefault(opened[match[1]], []).append((start, start + size))
    log.unlink(missing_ok=True)
    if not read:
        why = "only the engine 'sandbox' with squashfuse records what a command reads"
        raise RunnerError(
            f"cannot write {target}: there is no record of what the command reads",
            why,
            "leave out --engine, and run the command on a machine that has squashfuse and /dev/fuse",
        )
    ranges = {
        path: b",".join(b"%d-%d" % place for place in _joined(places, _GAP))
        for path, places in read.items()
    }
    files.write(target, b"".join(b"%s %s\n" % (ranges[path], path) for path in read))
    return len(read)


class HotRegion:
    """The files of a trace, placed after all runs. Raises RunnerError or OSError if their data cannot be moved."""

    def __init__(
        self,
        trace: Trace,
        root: Directory,
        writer: DataWriter,
        file: BinaryIO,
        packing: Compression,
    ) -> None:
        found: dict[int, tuple[Leaf, Places]] = {}
        for path, places in trace.items():
            if leaf := _find(root, path):
                found.setdefault(id(leaf), (leaf, places))
        self.files, self._start = len(found), writer.position
        self._others: Places = []  # what was read of files that stay where they are
        self._file, self._writer, self._block_size = file, writer, packing.block_size
        writer.settle()  # their data is read back
        decompress = packing.decompressor()

        @lru_cache(maxsize=64)
        def plain(position: int, word: int) -> bytes:
            data = os.pread(file.fileno(), word & ~PLAIN, position)
            return data if word & PLAIN else decompress(data)

        writer.begin_run()
        large = []
        for leaf, places in found.values():
            assert isinstance(leaf.data, FileData)
            run, (size, start, sizes, fragment, offset) = leaf.data.run, leaf.data.located()
            if sizes:
                large.append((leaf, size, start, sizes, places or [(0, size)]))
            elif size:
                at, word = FRAGMENT.unpack_from(
                    run.fragments, (fragment - run.first_fragment) * FRAGMENT.size
                )
                leaf.data = writer.add(
                    size, io.BytesIO(plain(run.offset + at, word)[offset : offset + size])
                )
        writer.end_run()
        for leaf, size, start, sizes, places in large:
            leaf.data = self._moved(size, start, sizes, places) or leaf.data

    def _moved(self, size: int, start: int, sizes: bytes, places: Places) -> FileData | None:
        """A copy of a large file's blocks; None if they stay where they are."""
        ends = [start]
        for (word,) in struct.iter_unpack("<I", sizes):
            ends.append(ends[-1] + (word & ~PLAIN))
        blocks, block_size = len(ends) - 1, self._block_size
        spans = (
            range(first // block_size, min(-(-end // block_size), blocks)) for first, end in places
        )
        touched = {block for span in spans for block in span}
        if ends[-1] == start or len(touched) < blocks / 2:
            self._others += [(ends[block], ends[block + 1]) for block in touched]
            return None
        run = self._writer.copy_run(self._file, Run(start, ends[-1] - start))
        self._writer.settle()  # each copy in progress holds a descriptor
        return FileData(run, (size, 0, sizes))

    def write_list(self) -> None:
        """Write the list at the end of the file, which is a complete squashfs."""
        places = [(self._start, self._file.seek(0, os.SEEK_END))]
        gap, text = _GAP, b"-" * (LIST_SIZE + 1)
        while len(text) > LIST_SIZE:
            joined = places + _joined(self._others, gap)
            text = b"".join(
                b"hot %d %d\n" % (first, end - first) for first, end in joined if end > first
            )
            gap *= 2
        self._file.write(text.ljust(LIST_SIZE, b"\0"))
        self._file.flush()


def _find(root: Directory, path: bytes) -> Leaf | None:
    """The regular file at a path of the tree."""
    node: Leaf | Directory | None = root
    for name in path.split(b"/"):
        node = node.children.get(name) if isinstance(node, Directory) else None
    return node if isinstance(node, Leaf) and isinstance(node.data, FileData) else None


def _joined(places: Places, gap: int) -> Places:
    """The places in order; those at most `gap` apart are one."""
    joined: Places = []
    for first, end in sorted(places):
        before = joined.pop() if joined and first - joined[-1][1] <= gap else (first, end)
        joined.append((before[0], max(before[1], end)))
    return joined
