"""Where the metrics of a run are: in the metrics.jsonl that its program writes, or else in its logs.

The logs of other trainers are read when somebody asks. What was found is kept in RUN/progress, so that only new text is
read the next time: N.jsonl has the steps of attempt N, and N.json how far its logs were read. Both may be deleted.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.errors import RunnerError
from runner.machine import files
from runner.runs.attempt import Attempt
from runner.runs.metrics import Metrics, Part, records
from runner.runs.run import Run

if TYPE_CHECKING:
    from runner.runs.growth import GrowingLog, LogTimes
    from runner.runs.patterns import Trainer

FOLDER = "progress"
METRICS = "metrics.jsonl"
_UNREAD_SECONDS = 600.0
_KEEP_BYTES = 1 << 16  # less text is not worth a write: reading it again takes milliseconds
_LIMIT_BYTES = 1 << 23
_STREAMS = ("job.log", "job.err")


def metrics_of(run: Run) -> Metrics:
    """The metrics of a run. Reads what is new in its logs, if the program writes no metrics."""
    own = run.folder / METRICS
    if _size(own) or not run.attempts:  # a run that waits has no log, and needs no patterns
        return Metrics.of_file(own)
    patterns = _patterns(run)
    if not patterns:
        return Metrics.of_file(own)
    with _lock:
        return Metrics("the log", tuple(_part(each) for each in _read(run, patterns)))


def unread(run: Run) -> str:
    """The trainer that the job names, if it has found no step in ten minutes or until the end; else empty.

    A program that failed may not have reached its first step.
    """
    from runner.runs.patterns import parse

    if not any(map(_has_waited, run.attempts)):
        return ""
    trainers, chosen = parse(_patterns(run))
    describes_only_checkpoints = not any(trainer.lines for trainer in trainers)
    if not chosen or describes_only_checkpoints:
        return ""
    found = any("step" in each for each in records(metrics_of(run)))
    return "" if found else chosen


def _has_waited(attempt: Attempt) -> bool:
    if attempt.exit_code is not None:
        return attempt.exit_code == 0
    return time.time() - (attempt.started or time.time()) >= _UNREAD_SECONDS


def _patterns(run: Run) -> str:
    """How to read the lines of each trainer; empty if the logs must not be read."""
    from runner.runs.trainer import FILE, readable

    try:
        text = files.content(f"{run.folder}/{FILE}").decode(errors="surrogateescape")
    except OSError:
        return ""
    return readable(text) if text else ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


@dataclass
class _Kept:
    """What is known of the logs of an attempt."""

    folder: Path
    """RUN/progress"""
    number: int
    """of the attempt"""
    patterns: int
    """the checksum of the patterns that were used"""
    read_to: dict[str, int] = field(default_factory=dict)
    """log -> the first byte that was not read"""
    samples: dict[str, list[float]] = field(default_factory=dict)
    """log -> (time, size, pause) of its newest sample"""
    log_times: tuple[int, int] = (0, 0)
    """the bytes and lines of log-times that were read"""
    later_begins: int | None = None
    """where the next attempt begins in job.log; None: nowhere yet"""
    state: dict[str, Any] | None = None
    """of the reader"""
    newest: list[dict[str, Any]] = field(default_factory=list)
    """the newest entries, which later lines may change"""
    over: bool = False
    """whether the attempt was over"""
    file_bytes: int = 0
    """how much of N.jsonl counts"""
    entries: list[dict[str, Any]] = field(default_factory=list)
    """the entries after those of N.jsonl. This and what follows is not in N.json"""
    unkept_bytes: int = 0
    """how much of the logs was read since N.json was written"""
    stamp: tuple[int, ...] = ()
    """identifies the N.json from which this comes; empty: none"""

    @property
    def steps_file(self) -> Path:
        return self.folder / f"{self.number}.jsonl"

    @property
    def state_file(self) -> Path:
        return self.folder / f"{self.number}.json"


_NOT_IN_FILE = ("folder", "number", "entries", "unkept_bytes", "stamp")
_lock = threading.Lock()
_memory: dict[Path, _Kept] = {}
"""N.json -> what this process knows, which is more if the file was not worth a write, or cannot be written"""


def _part(kept: _Kept) -> Part:
    path = kept.steps_file if kept.file_bytes else None
    return Part(path, kept.file_bytes, (*kept.entries, *kept.newest))


def _read(run: Run, patterns: str) -> list[_Kept]:
    """Read what is new in the logs of each attempt."""
    checksum = zlib.crc32(patterns.encode(errors="surrogateescape"))
    attempts = run.attempts
    begin: int | None = 0  # of the attempt in job.log
    found = []
    for attempt in attempts:
        kept = _known(run, attempt.number, checksum)
        over = attempt.exit_code is not None or attempt is not attempts[-1]
        until = (attempt.ended or attempt.last_sign if over else None) or time.time()
        logs = _logs(run, attempt, kept, begin, until)
        if any(log.size_bytes < kept.samples.get(log.name, (0, 0))[1] for log in logs):
            # somebody has cut a log
            kept = _Kept(run.folder / FOLDER, attempt.number, checksum, stamp=kept.stamp)
            logs = _logs(run, attempt, kept, begin, until)
        has_grown = any(log.size_bytes > log.since.size_bytes for log in logs)
        if has_grown or over != kept.over:
            kept.over = over
            _read_logs(run, attempt, kept, logs, patterns)
            if over or kept.unkept_bytes >= _KEEP_BYTES:
                _keep(run, kept)
        _memory[kept.state_file] = kept
        begin = kept.later_begins
        found.append(kept)
    return found


def _logs(
    run: Run, attempt: Attempt, kept: _Kept, begin: int | None, until: float
) -> list[GrowingLog]:
    """The logs of an attempt.

    `begin`: where it begins in RUN/job.log; None: it has written nothing there yet. `until`: when it ended, or now.
    """
    from runner.runs.growth import GrowingLog, Sample, newest_rank_log
    from runner.runs.logs import job_log

    parts: dict[str, tuple[Path, int, int | None]] = {}  # name -> (path, begin, end)
    if attempt.outputs:  # of a user's own batch script
        for log in job_log(run):
            if log.attempt == attempt.number and log.path.name in _STREAMS:
                parts[log.path.name] = log.path, log.begin, log.end
    elif begin is not None and not run.log.is_symlink():
        parts["job.log"] = run.log, begin, kept.later_begins
    of_ranks = [run.folder / name for name in kept.read_to if "/" in name]
    if not kept.over and (newest := newest_rank_log(attempt)):
        of_ranks.append(newest)
    for path in of_ranks:
        parts[path.relative_to(run.folder).as_posix()] = path, 0, None
    found = []
    for name, (path, start, end) in parts.items():
        try:
            seen = path.stat()
        except OSError:
            continue
        size = seen.st_size if end is None else min(seen.st_size, end)
        since = Sample(attempt.started or seen.st_mtime, start, 0)
        if name in kept.samples:
            second, known_size, pause = kept.samples[name]
            since = Sample(second, int(known_size), pause)
        written = min(seen.st_mtime, max(until, since.second))
        found.append(GrowingLog(name, path, kept.read_to.get(name, start), size, written, since))
    return found


def _read_logs(
    run: Run, attempt: Attempt, kept: _Kept, logs: Sequence[GrowingLog], patterns: str
) -> None:
    """Read what is new in the logs, and note it in `kept`."""
    from runner.runs.growth import LogTimes, pieces
    from runner.runs.patterns import parse
    from runner.runs.steps import Reader, State

    times = LogTimes(*kept.log_times)
    times.read(attempt.log_times)
    for log in logs:
        log.samples = times.grown.get(log.name, ())
    trainers, _ = parse(patterns)
    processes = _processes(run, attempt)
    state = State.from_record(kept.state) if kept.state else None
    reader = Reader(trainers, processes, state)
    begun = sum(log.at for log in logs)
    ends = frozenset(() if attempt.outputs else ("job.log",))
    for piece in pieces(logs, attempt, ends):
        reader.read(piece)
    if reader.discarded:
        kept.entries, kept.file_bytes = [], 0
    number = {"attempt": attempt.number}
    kept.entries += [entry | number for entry in reader.entries]
    kept.state = reader.state.record()
    newest = _of_incomplete_lines(logs, trainers, processes, kept.state) if kept.over else None
    newest = reader.newest(ended=kept.over) if newest is None else newest
    kept.newest = [entry | number for entry in newest]
    kept.unkept_bytes += sum(log.at for log in logs) - begun
    _note_places(kept, logs, times)


def _of_incomplete_lines(
    logs: Sequence[GrowingLog],
    trainers: Sequence[Trainer],
    processes: int,
    state: Mapping[str, Any],
) -> list[dict[str, Any]] | None:
    """The newest entries, if the last line of each log counts although it has no end; None if all lines have one."""
    from runner.runs.steps import Piece, Reader, State

    if not any(log.rest for log in logs):
        return None
    reader = Reader(trainers, processes, State.from_record(json.loads(json.dumps(state))))
    for log in logs:
        reader.read(Piece(log.name, log.rest.decode("latin-1"), log.written, log.written))
    return [*reader.entries, *reader.newest(ended=True)]


def _note_places(kept: _Kept, logs: Sequence[GrowingLog], times: LogTimes) -> None:
    """Note how far the logs were read."""
    kept.log_times = times.bytes_read, times.lines
    for log in logs:
        kept.read_to[log.name] = log.at
        pause = log.samples[-1].pause if log.samples else log.since.pause
        second = max(log.written, log.since.second)
        size = log.size_bytes
        if log.later_begins is not None:
            kept.later_begins = size = log.later_begins
        kept.samples[log.name] = [second, size, pause]


def _processes(run: Run, attempt: Attempt) -> int:
    """The number of processes of the training."""
    for line in attempt.text("environment.sh").splitlines():
        name, _, value = line.removeprefix("export ").partition("=")
        if name == "RUNNER_WORLD_SIZE" and value.strip("'").isdecimal():
            return int(value.strip("'"))
    return max(attempt.gpus, attempt.tasks, run.nodes * run.processes_per_node)


def _known(run: Run, number: int, patterns: int) -> _Kept:
    """What is known of an attempt. Damaged files, and what was found with other patterns, do not count."""
    new = _Kept(run.folder / FOLDER, number, patterns)
    stamp = _stamp(new.state_file)
    known = _memory.get(new.state_file)
    if known is None or known.stamp != stamp:
        known = _loaded(run, new, stamp)
    if known is None or known.patterns != patterns:
        new.stamp = stamp
        return new
    return known


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _loaded(run: Run, new: _Kept, stamp: tuple[int, ...]) -> _Kept | None:
    """What the files of an attempt tell. Only those of this user, or of the owner of the run, are read."""
    if not stamp:
        return None
    from runner.runs.steps import State

    try:
        owners: Collection[int] = {os.geteuid(), run.folder.stat().st_uid}
        content = files.content_of_owners(new.state_file, owners, _LIMIT_BYTES)
        checksum, _, text = content.partition(b"\n")
        if int(checksum) != zlib.crc32(text):
            return None
        kept = _Kept(new.folder, new.number, **json.loads(text))
        State.from_record(kept.state or State().record())  # another version may have written it
        steps = kept.steps_file.stat(follow_symlinks=False) if kept.file_bytes else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if steps and (steps.st_uid not in owners or steps.st_size < kept.file_bytes):
        return None
    kept.stamp = stamp
    return kept


def _keep(run: Run, kept: _Kept) -> None:
    """Write what is known to the files of the attempt, if the run is this user's and no other process does so now."""
    names = [each.name for each in fields(kept) if each.name not in _NOT_IN_FILE]
    record = {name: getattr(kept, name) for name in names}
    lines = "".join(json.dumps(entry) + "\n" for entry in kept.entries).encode()
    with suppress(OSError, RunnerError):
        if run.folder.stat().st_uid != os.geteuid():
            return
        with files.locked(kept.state_file, timeout_seconds=0):
            if _stamp(kept.state_file) != kept.stamp:
                return  # another process has written more
            if kept.file_bytes:
                files.append(kept.steps_file, lines, kept.file_bytes)
            else:
                files.write(kept.steps_file, lines)
            record["file_bytes"] = kept.file_bytes + len(lines)
            text = json.dumps(record).encode()
            files.write(kept.state_file, b"%d\n%s" % (zlib.crc32(text), text))
            kept.entries, kept.unkept_bytes = [], 0
            kept.file_bytes += len(lines)
            kept.stamp = _stamp(kept.state_file)
