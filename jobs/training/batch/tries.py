"""The parents' side of `--micro_batch auto`: each rank starts a child of the same script, and all agree on what fitted.

Children are processes of their own, so that nothing of a try stays: no memory, no state of a model, an optimizer or
a random generator; and a child that the kernel kills for its memory is an answer, not the end of the job.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from training import files
from training.batch import probe
from training.errors import JobError
from training.processes import Processes, free_port
from training.run import RunFolder

ROUND_SECONDS = 1800.0  # without an answer for so long, something else is wrong
GRACE_SECONDS = 2.0  # between the first rank's failure and the end of the others' children
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Ended:
    """How one rank's child has ended."""

    fitted: int  # how many of the round's micro batches
    reason: str  # all, memory, stopped (another rank had failed), error
    text: str = ""
    peak_bytes: int = 0


class Peers:
    """The ranks' way to tell each other something while no process group exists: a store of torch's."""

    def __init__(self, processes: Processes, environment: Mapping[str, str]) -> None:
        self.processes = processes
        self.store: Any = None
        if processes.world_size == 1:
            return
        from torch.distributed import PrefixStore, TCPStore

        # torchrun's agent has one; elsewhere rank 0 opens one beside the port that the process group will take.
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        port = int(environment["MASTER_PORT"]) + (0 if agent else 1)
        server = processes.first and not agent
        store = TCPStore(
            environment["MASTER_ADDR"],
            port,
            processes.world_size,
            server,
            timedelta(seconds=300),
            wait_for_workers=False,
        )
        self.store = PrefixStore(f"micro_batch/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def tell(self, key: str, value: Any) -> None:
        if self.store is not None:
            self.store.set(key, json.dumps(value))

    def told(self, key: str) -> bool:
        return self.store is not None and self.store.check([key])

    def hear(self, key: str) -> Any:
        """Return what another rank tells under a key; waits for it."""
        self.store.wait([key], timedelta(seconds=ROUND_SECONDS + 60))
        return json.loads(self.store.get(key))

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """Return what rank 0 made, on every rank."""
        if self.processes.first:
            made = make()
            self.tell(key, made)
            return made
        return self.hear(key)

    def gather(self, key: str, value: Any) -> list[Any]:
        """Return every rank's value, by rank."""
        if self.store is None:
            return [value]
        self.tell(f"{key}/{self.processes.rank}", value)
        return [self.hear(f"{key}/{rank}") for rank in range(self.processes.world_size)]


def take(number: int, candidates: Sequence[int], accumulation: int, argv: Sequence[str], run: RunFolder,
         peers: Peers, limit_bytes: int | None) -> tuple[int, int]:  # fmt: skip
    """Return how many of the candidates fitted on all ranks, and the rank that failed first (-1: none did).

    Raises JobError where a child ended for another reason than memory.
    """
    rank = peers.processes.rank
    folder = run.attempt / "probe" / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    order = folder / f"rank-{rank}.json"
    output = run.attempt / "probe" / "output"
    files.write_json(order, {"candidates": list(candidates), "accumulation": accumulation, "folder": str(output)})
    port = peers.once(f"{number}/port", lambda: free_port(""))
    log = folder / f"rank-{rank}.log"
    with log.open("wb") as stream:
        command = (sys.executable, str(Path(sys.argv[0]).resolve()), *argv)
        child = subprocess.Popen(
            command, env=_environment(order, folder, run, port), stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
        )
        try:
            ended = _watch(child, number, len(candidates), order, log, peers, limit_bytes)
        finally:
            child.kill()
            child.wait()
    everyone = [Ended(**each) for each in peers.gather(f"{number}/ended", vars(ended))]
    return agreed(everyone, log)


def agreed(everyone: Sequence[Ended], log: Path) -> tuple[int, int]:
    """Return how many fitted on all ranks, and which rank ran out of memory first, or -1."""
    for rank, each in enumerate(everyone):
        if each.reason == "error":
            raise _error(rank, each.text, log)
    # Others may not have noted yet what the rank that ran short had finished: they fall with it.
    fitted = min(each.fitted for each in [one for one in everyone if one.reason == "memory"] or everyone)
    short = [rank for rank, each in enumerate(everyone) if each.reason == "memory" and each.fitted == fitted]
    if not short and any(each.reason != "all" for each in everyone):
        raise _error(0, "no rank ran out of memory, and not all have finished", log)
    return fitted, short[0] if short else -1


def _watch(child: subprocess.Popen[bytes], number: int, wanted: int, order: Path, log: Path, peers: Peers,
           limit_bytes: int | None) -> Ended:  # fmt: skip
    """Wait for the child; end it where another rank's has failed, or where it holds more memory than its share."""
    started, alarm = time.monotonic(), 0.0
    while child.poll() is None:
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        if limit_bytes and _resident_bytes(child.pid) > limit_bytes:
            child.kill()
            child.wait()
            return _failed(number, peers, Ended(_fitted(order)[0], "memory", "its share of the memory is spent"))
        alarm = alarm or (now if peers.told(f"{number}/alarm") else 0.0)
        if alarm and now - alarm > GRACE_SECONDS:
            child.kill()
            child.wait()
            return Ended(_fitted(order)[0], "stopped")
        if now - started > ROUND_SECONDS:
            return _failed(number, peers, Ended(_fitted(order)[0], "error", f"no answer in {ROUND_SECONDS:.0f} s"))
    fitted, peak = _fitted(order)
    if child.returncode == 0 and fitted == wanted:
        return Ended(fitted, "all", peak_bytes=peak)
    tail = log.read_text(encoding="utf-8", errors="replace")[-20000:]
    # -9: the kernel, short of memory; -6: C++ gives up where an allocation fails
    memory = child.returncode in (probe.OUT_OF_MEMORY, -9, -6) or probe.is_out_of_memory(tail)
    if not memory and _alarm_follows(number, peers):
        return Ended(fitted, "stopped")
    return _failed(number, peers, Ended(fitted, "memory" if memory else "error", "" if memory else _said(order, tail)))


def _alarm_follows(number: int, peers: Peers) -> bool:
    """True where another rank says within a moment that it has failed: a collective breaks when a child is gone."""
    until = time.monotonic() + 2 * GRACE_SECONDS
    while peers.store is not None and time.monotonic() < until:
        if peers.told(f"{number}/alarm"):
            return True
        time.sleep(POLL_SECONDS)
    return False


def _failed(number: int, peers: Peers, ended: Ended) -> Ended:
    peers.tell(f"{number}/alarm", peers.processes.rank)
    return ended


def _fitted(order: Path) -> tuple[int, int]:
    """Return how many micro batches the child has noted as fitting, and the most memory it had held."""
    try:
        lines = order.with_suffix(".fitted").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0, 0
    return len(lines), max((json.loads(line)["peak_bytes"] for line in lines), default=0)


def _environment(order: Path, folder: Path, run: RunFolder, port: int) -> dict[str, str]:
    """What the child sees: the same rank, a rendezvous and a run folder of its own, the same cache."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    attempt = folder / f"rank-{os.environ.get('RANK', '0')}"
    attempt.mkdir(exist_ok=True)
    own = {"RUNNER_RUN": folder.parent, "RUNNER_ATTEMPT": attempt, "RUNNER_SAVE_AND_EXIT": folder / "never"}
    return {
        **kept,
        **{name: str(value) for name, value in own.items()},
        "RUNNER_CACHE": str(run.cache),
        "MASTER_PORT": str(port),
        "WANDB_MODE": "disabled",
        probe.VARIABLE: str(order),
    }


def _resident_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _said(order: Path, tail: str) -> str:
    """Return the child's own three-part error where it left one, else the last line of its log."""
    note = order.with_suffix("") / "error.txt"
    if note.is_file():
        return note.read_text(encoding="utf-8")
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _error(rank: int, text: str, log: Path) -> JobError:
    parts = text.split("\n  because: ")
    if len(parts) == 2 and "\n  try:     " in parts[1]:
        why, fix = parts[1].strip().split("\n  try:     ", 1)
        return JobError(parts[0].split(": ", 1)[-1], why, fix)
    last = text.strip().splitlines()[-1] if text.strip() else "it said nothing"
    return JobError(
        f"the probe for --micro_batch auto failed on rank {rank}", last, f"look at {log}, or give --micro_batch NUMBER"
    )
