"""An attempt: one start of a run. Reads RUN/attempts/N/, which the batch script (payload/) writes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from runner.machine import files

_SIGNS_OF_LIFE = (
    "ended",
    "cause",
    "alive",
    "first_failure",
)  # payload/restart.sh uses the same files
_MARK = b"job.sbatch: attempt "
_BEGIN = re.compile(rb"job\.sbatch: attempt (\d{1,6}) on ")
_PIECE_BYTES = 1 << 20
_OVERLAP_BYTES = 64  # overlap of two pieces: longer than any match of _BEGIN


class FirstFailure(NamedTuple):
    """The task that reported first that it failed."""

    exit_code: int
    rank: int
    node: str
    """the number of the node in the job, from 0"""


@dataclass(frozen=True)
class Log:
    """A log file, or the part of job.log that one attempt wrote."""

    path: Path
    attempt: int
    rank: int | None = None
    """None: job.log, which contains the output of rank 0; or the log of a node before its ranks start"""
    node: int | None = None
    """the number of the node, for the log of a node"""
    begin: int = 0
    end: int | None = None
    """byte offset; None: the end of the file"""

    @property
    def label(self) -> str:
        """The prefix of each line; empty for job.log."""
        return (
            f"{self.rank}| "
            if self.rank is not None
            else f"n{self.node}| "
            if self.node is not None
            else ""
        )

    @property
    def order(self) -> tuple[int, int, str]:
        """The sort key for logs with equal times: job.log, then nodes, then ranks."""
        kind = 2 if self.rank is not None else 0 if self.node is None else 1
        return kind, self.rank or self.node or 0, str(self.path)


class Rung(NamedTuple):
    """How and why another attempt followed an attempt."""

    attempt: int
    """the number of the attempt that ended"""
    name: str
    """in_place, requeue, submit, chain or local"""
    reason: str
    """the sentence in the log"""


class GpuUsage(NamedTuple):
    """The use of a GPU. None: unknown."""

    percent: int | None
    memory_used_mib: int | None
    memory_total_mib: int | None
    power_watts: int | None = None


class NodeUsage(NamedTuple):
    """The use of a node, as payload/usage.sh describes it. None: unknown."""

    node: str
    age_seconds: int
    cpu_percent: int | None = None
    memory_used_mib: int | None = None
    memory_total_mib: int | None = None
    memory_of: str = ""
    """`job` or `node`"""
    gpus: tuple[GpuUsage, ...] = ()
    gpu_error: str = ""

    def record(self) -> dict[str, object]:
        """What --json prints."""
        return {**self._asdict(), "gpus": [gpu._asdict() for gpu in self.gpus]}


def _node_usage(path: str, number: str) -> NodeUsage:
    """The content of a file usage/K; only the number of the node if the file is damaged. Raises OSError."""
    age = max(0, round(time.time() - (files.modified(path) or 0)))
    return _parsed_usage(files.content(path).decode(errors="replace"), age) or NodeUsage(
        f"node {number}", age
    )


def _parsed_usage(line: str, age: int) -> NodeUsage | None:
    """A line of payload/usage.sh; None if it is damaged."""
    line, _, watts = line.partition(" W ")
    words = line.split()
    if len(words) < 6:
        return None
    numbers = [int(word) if word.isdigit() else None for word in words]
    error = f"nvidia-smi {words[6]}" if words[6:] in (["hangs"], ["fails"]) else ""
    powers = [int(word) if word.isdigit() else None for word in watts.split()] or [None] * len(
        words
    )
    gpus = (
        () if error else tuple(map(GpuUsage, numbers[6::3], numbers[7::3], numbers[8::3], powers))
    )
    cpu, used, total = numbers[2:5]
    return NodeUsage(words[1], age, cpu, used, total, words[5].strip("-"), gpus, error)


@dataclass(frozen=True)
class Attempt:
    """`RUN/attempts/N`. A property is None or empty if its file does not exist (yet)."""

    folder: Path

    @property
    def number(self) -> int:
        return int(self.folder.name)

    def time(self, name: str) -> float | None:
        """The modification time of a file of the folder, in Unix seconds."""
        return files.modified(f"{self.folder}/{name}")

    def text(self, name: str) -> str:
        """The content of a file of the folder."""
        return files.text_of(f"{self.folder}/{name}")

    @property
    def started(self) -> float | None:
        return self.time("started")

    @property
    def ended(self) -> float | None:
        return self.time("ended")

    @property
    def elapsed(self) -> str:
        """How long the attempt has run, in squeue's format."""
        if self.started is None:
            return ""
        seconds = int((self.ended or time.time()) - self.started)
        days, rest = divmod(max(seconds, 0), 86400)
        hours, minutes = rest // 3600, rest // 60 % 60
        shown = (
            f"{hours}:{minutes:02}:{rest % 60:02}" if hours or days else f"{minutes}:{rest % 60:02}"
        )
        return f"{days}-{shown}" if days else shown

    @property
    def last_sign(self) -> float | None:
        """The time of its last sign of life. For a killed attempt, this counts as its end."""
        signs = [seen for name in _SIGNS_OF_LIFE if (seen := self.time(name)) is not None]
        return max(signs, default=self.started)

    @property
    def newest_change(self) -> float:
        """The newest modification time in the folder."""
        names = os.listdir(self.folder) if self.folder.is_dir() else ()  # noqa: PTH208
        return max((self.time(name) or 0.0 for name in (".", *names)), default=0.0)

    @property
    def job_id(self) -> str:
        return self._start("job")

    @property
    def gpus(self) -> int:
        """The total number of GPUs."""
        found = self._start("gpus")
        return int(found) if found.isdigit() else 0

    @property
    def tasks(self) -> int:
        """The number of tasks that Slurm was asked for."""
        found = self._start("tasks")
        return int(found) if found.isdigit() else 0

    def _start(self, key: str) -> str:
        """The value of a line `KEY VALUE` of the file `started`."""
        lines = (line.partition(" ") for line in self.text("started").splitlines())
        return next((value for name, _, value in lines if name == key), "")

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the attempt runs, or if it was killed."""
        try:
            return int(self.text("exit_code"))
        except ValueError:
            return None

    @property
    def cause(self) -> str:
        """Why the attempt ended: one of the causes of payload/restart.sh."""
        return self.text("cause")

    @property
    def rung(self) -> Rung | None:
        """How the next attempt was started (payload/in_place.sh); None if that is not recorded."""
        name, *rest = self.text("next").splitlines() or [""]
        return Rung(self.number, name, rest[0] if rest else "") if name else None

    @property
    def first_failure(self) -> FirstFailure | None:
        words = self.text("first_failure").split()
        if len(words) < 5 or not (words[0].isdigit() and words[2].isdigit()):
            return None
        return FirstFailure(int(words[0]), int(words[2]), words[4])

    @property
    def usage(self) -> tuple[NodeUsage, ...]:
        """The newest sample of each node; empty before the program starts. Raises OSError."""
        folder = self.folder / "usage"
        names = (
            [path.name for path in folder.iterdir() if path.name.isdigit()]
            if folder.is_dir()
            else []
        )
        return tuple(_node_usage(f"{folder}/{name}", name) for name in sorted(names, key=int))

    @property
    def usage_log(self) -> Iterator[tuple[int, NodeUsage]]:
        """The samples of each minute: (Unix time, use of a node), node by node. Damaged lines are left out."""
        for path in sorted((self.folder / "usage-log").glob("*")):
            for line in files.text_of(path).splitlines():
                time_text = line.partition(" ")[0]
                if time_text.isdigit() and (found := _parsed_usage(line, 0)):
                    yield int(time_text), found

    @property
    def environment(self) -> Path | None:
        """The shell file that sets the variables of the tasks."""
        path = self.folder / "environment.sh"
        return path if path.is_file() else None

    @property
    def log_times(self) -> Path:
        """The file that records when the logs grew (payload/log_times.sh)."""
        return self.folder / "log-times"

    @property
    def outputs(self) -> tuple[tuple[Path, int], ...]:
        """For a user's own batch script: its output files (links), each with its size when the attempt began.

        The last one is the log of payload/batch.sh. Empty for other runs, which write to job.log.
        """
        sizes = self.text("log_bytes").split()
        found = (
            [*zip(("job.log", "job.err"), sizes, strict=False), ("runner.log", "0")]
            if sizes
            else []
        )
        return tuple(
            (self.folder / name, int(size))
            for name, size in found
            if (self.folder / name).is_file()
        )

    def logs(self, processes_per_node: int) -> Iterator[Log]:
        """The log files of individual nodes and ranks.

        torchrun writes LOG_DIR/RUN_ID/attempt_K/LOCAL_RANK/std*.log.
        Source: torch 2.13, torch/distributed/elastic/multiprocessing/api.py
        """
        for path in sorted(self.folder.glob("rank-*.log")):
            if (rank := _last_number(path.stem)) is not None:
                yield Log(path, self.number, rank)
        for path in sorted(self.folder.glob("*-node-*.log")):
            yield Log(path, self.number, node=_last_number(path.stem))
        for path in sorted(self.folder.glob("node-*/*/attempt_*/*/std*.log")):
            node, local = _last_number(path.parents[3].name), path.parent.name
            if node is not None and local.isdigit():
                yield Log(path, self.number, node * processes_per_node + int(local))


def _last_number(stem: str) -> int | None:
    found = re.search(r"(\d{1,6})$", stem)
    return int(found[1]) if found else None


def begins(log: Path) -> list[tuple[int, int]]:
    """(number, byte offset) of each attempt in job.log, to which all attempts append; empty if it cannot be read."""
    found: list[tuple[int, int]] = []
    try:
        with log.open("rb") as file:
            end, piece = 0, b""
            while data := file.read(_PIECE_BYTES):
                piece = piece[-_OVERLAP_BYTES:] + data
                end += len(data)
                at = -1
                while (at := piece.find(_MARK, at + 1)) >= 0:
                    begin, mark = end - len(piece) + at, _BEGIN.match(piece, at)
                    is_new = not found or begin > found[-1][1]
                    if mark and is_new and (begin == 0 or piece[at - 1 : at] == b"\n"):
                        found.append((int(mark[1]), begin))
    except OSError:
        return []
    return found


def begin_of_later(lines: bytes, number: int) -> int | None:
    """The byte offset in complete lines of job.log where an attempt after this one begins; None: nowhere."""
    at = -1
    while (at := lines.find(_MARK, at + 1)) >= 0:
        mark = _BEGIN.match(lines, at)
        if mark and int(mark[1]) > number and (at == 0 or lines[at - 1 : at] == b"\n"):
            return at
    return None
