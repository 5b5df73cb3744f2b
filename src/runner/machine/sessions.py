"""Process sessions that outlive this process: identify their processes, check whether they run, and end them.

The kernel reuses process ids; together with the start time and the boot id, a process id is unique.
Source: proc(5), /proc/PID/stat field 22, /proc/sys/kernel/random/boot_id.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from runner.machine import files


def identity(pid: int) -> str:
    """`BOOT:START`, which distinguishes a process from a later one with the same id; empty if it has ended."""
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return ""
    return f"{files.text_of('/proc/sys/kernel/random/boot_id')}:{fields[19]}"


def began(pid: int) -> float:
    """When a process began, in seconds since the epoch; the present if it has ended."""
    fields, up = _stat(pid), time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - up + (int(fields[19]) / os.sysconf("SC_CLK_TCK") if fields else up)


def members(session: int) -> tuple[int, ...]:
    """The live processes of a session (its leader may have ended)."""
    return tuple(
        pid for pid, stat in _processes().items() if stat[0] not in "ZX" and stat[3] == str(session)
    )


def descendants(pid: int) -> dict[int, str]:
    """The children of a process, their children and so on, each with its identity."""
    children: dict[str, list[int]] = {}
    for child, stat in _processes().items():
        children.setdefault(stat[1], []).append(child)
    found = [pid]
    for each in found:  # the list grows during the loop
        found += children.get(str(each), [])
    return {each: identity(each) for each in found[1:]}


def kill(processes: Mapping[int, str]) -> None:
    """Send SIGKILL to the processes that still run and have the same identity."""
    _kill(
        tuple(pid for pid, known in processes.items() if known and identity(pid) == known),
        signal.SIGKILL,
    )


def end(session: int, grace_seconds: float) -> bool:
    """End a session: send SIGTERM to its leader, which forwards it, or to all members if the leader has ended;
    send SIGKILL to all after the grace period. Returns whether all processes have ended.

    Each process gets only one SIGTERM: a second one would interrupt a program that saves on the first.
    """
    deadline = time.monotonic() + grace_seconds
    led = bool(identity(session))
    _kill((session,) if led else members(session), signal.SIGTERM)
    while (left := members(session)) and time.monotonic() < deadline:
        if led and not identity(session):
            led = False
            _kill(left, signal.SIGTERM)
        time.sleep(0.1)
    if left:
        _kill(left, signal.SIGKILL)
        deadline = time.monotonic() + 5.0
        while members(session) and time.monotonic() < deadline:
            time.sleep(0.1)
    return not members(session)


def _kill(pids: tuple[int, ...], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _processes() -> dict[int, list[str]]:
    """Every process of this machine, with its fields as `_stat` gives them."""
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    found = ((pid, _stat(pid)) for pid in pids)
    return {pid: stat for pid, stat in found if stat}


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from `state` on (the name before may contain spaces); None if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the block is done.

    For the time between a submission and its record, so that there is no job without a record. The terminal also sends
    Ctrl-C to programs that are started inside the block, unless they have their own session. (Blocking the signal is
    not enough, because sbatch unblocks it.)
    """
    came: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        came.append(number)

    try:
        before = signal.signal(signal.SIGINT, remember)
    except ValueError:  # not the main thread, which alone receives Ctrl-C
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
