"""Collectives over the nodes of a job: their speed, and the slowest pair of nodes.

`slowest_pair`, `rounds` and `judge` are plain functions on bandwidths. Only `Network` needs torch.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from training import errors
from training.errors import JobError
from training.processes import Processes

OPERATIONS = ("all-reduce", "all-gather", "all-to-all")
SLOW = 0.7  # a pair is slow below this fraction of the fastest pair or group
START = 5  # times the limit of a step: containers start, and Python imports torch, at different speeds
BUDGET_SECONDS = 0.3  # for one measurement, after the warm-up
Group = tuple[int, ...]
"""numbers of nodes"""


def bus_factor(operation: str, ranks: int) -> float:
    """Return the factor from size / time to bus bandwidth. Source: nccl-tests, doc/PERFORMANCE.md, Summary."""
    return (2 if operation == "all-reduce" else 1) * (ranks - 1) / ranks


def node_factor(operation: str, nodes: int, per_node: int) -> float:
    """Return the factor from size / time to the bandwidth of a node's network.

    It is the least that each node must send to the others, for each byte of the message: an all-reduce and an
    all-gather can be done once per node, but each rank of an all-to-all has data of its own for each other rank.
    """
    return (nodes - 1) / nodes * {"all-reduce": 2, "all-gather": 1, "all-to-all": per_node}[operation]


def rounds(nodes: Sequence[int]) -> Iterator[list[Group]]:
    """Yield rounds of disjoint groups, of about half of the nodes each: every pair of nodes is in a group of a round.

    Four quarters can be paired in three ways. Groups of fewer than two nodes are left out.
    """
    first, second, third, fourth = (
        tuple(nodes[len(nodes) * number // 4 : len(nodes) * (number + 1) // 4]) for number in range(4)
    )
    halves = ((first + second, third + fourth), (first + third, second + fourth), (first + fourth, second + third))
    for groups in halves:
        if measurable := [tuple(sorted(group)) for group in groups if len(group) > 1]:
            yield measurable


def slowest_pair(
    nodes: Sequence[int], measure: Callable[[Sequence[Group]], Mapping[Group, float]]
) -> tuple[Group, dict[Group, float]]:
    """Return the slowest pair of nodes, and the bandwidths of all groups that were measured.

    The slowest group of three rounds is split again, until it is a pair: three rounds for each halving.
    `measure` returns the bandwidth of each of these disjoint groups, measured at the same time.
    """
    suspects, measured = tuple(nodes), dict[Group, float]()
    while True:
        found: dict[Group, float] = {}
        for groups in rounds(suspects):
            found.update(measure(groups))
        measured.update(found)
        suspects = min(found, key=found.__getitem__)
        if len(suspects) == 2:
            return suspects, measured


def witness(pair: Group, measured: Mapping[Group, float]) -> int | None:
    """Return a node of the fastest group that is not in the pair; None if there is none."""
    by_speed = sorted(measured, key=measured.__getitem__, reverse=True)
    return next((node for group in by_speed for node in group if node not in pair), None)


def judge(pair: Group, other: int | None, measured: Mapping[Group, float], names: Sequence[str]) -> tuple[bool, str]:
    """Return whether the pair is slow, and in words whether one of its nodes is slow or only their connection.

    other   a node outside of the pair that was measured with each of the two; None: there are only two nodes
    """
    if other is None:
        return False, "there is no other pair to compare with"
    fastest = max(measured.values())
    if measured[pair] >= SLOW * fastest:
        return False, "no pair is much slower than the others"
    nearer = math.sqrt(measured[pair] * fastest)  # below it, a speed is more like that of the pair
    slow = [node for node in pair if measured[min(node, other), max(node, other)] < nearer]
    if slow:
        return True, f"slow with {names[other]} too: {' and '.join(names[node] for node in slow)}"
    return True, f"both are fast with {names[other]}: only their connection is slow"


class Network:
    """The process group of the job, with a limit for the time without progress.

    what     what is measured now, for the error
    control  all ranks with gloo, which can tell the ranks that do not answer
    world    the group of all ranks that is measured; None: that of NCCL
    """

    def __init__(self, processes: Processes, per_node: int, timeout_seconds: float) -> None:
        import torch
        import torch.distributed as distributed

        self.processes, self.per_node, self.timeout = processes, per_node, timedelta(seconds=timeout_seconds)
        self.nodes = processes.world_size // per_node
        start = START * self.timeout
        self.what, self._since = "the start", time.monotonic() + (start - self.timeout).total_seconds()
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", processes.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self.backend = "nccl" if self.device.type == "cuda" else "gloo"
        threading.Thread(target=self._watch, daemon=True).start()
        with self.explained():
            # this is also NCCL's own limit, which aborts the process without a clear message: it must not come first
            distributed.init_process_group(self.backend, timeout=start)
            self.control = distributed.new_group(backend="gloo", timeout=self.timeout)
            # not `control`: after a timeout, gloo cannot use the connections of that group any more
            self.world = distributed.new_group(timeout=self.timeout) if self.backend == "gloo" else None

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn an error of torch into a JobError that names the ranks that do not answer."""
        try:
            yield
        except RuntimeError as error:
            raise self._failure(" ".join(str(error).split())[:200]) from error

    def _failure(self, why: str) -> JobError:
        silent = self._silent()
        named = f"{silent} did not answer" if silent else "a rank has ended, or did not answer"
        return JobError(
            f"the network test stopped during {self.what}: {named}",
            why,
            "look for the first error of that rank: runner logs RUN --rank R; longer limit: -- --timeout 300",
        )

    def _silent(self) -> str:
        """Return the ranks that do not come to a barrier, in words; empty if they are not known."""
        import torch.distributed as distributed

        if not hasattr(self, "control"):
            return ""
        try:
            distributed.monitored_barrier(self.control, timeout=timedelta(seconds=5), wait_all_ranks=True)
        except RuntimeError as error:
            return silent_ranks(str(error), self.processes.rank)
        return ""

    def _watch(self) -> None:
        """End this process with an error if a step takes too long: NCCL has no limit that ends with a clear message."""
        limit = 2 * self.timeout.total_seconds()
        while time.monotonic() - self._since < limit:
            time.sleep(1)
        with errors.reported("network"):
            raise self._failure(f"this step takes longer than {limit:.0f} s")

    def begin(self, what: str) -> None:
        """Wait for all ranks. Raises RuntimeError for those that do not arrive in time."""
        import torch.distributed as distributed

        self.what, self._since = what, time.monotonic()
        distributed.monitored_barrier(self.control, timeout=self.timeout, wait_all_ranks=True)

    def seconds(self, operation: str, size_bytes: int, group: Any = None, ranks: int = 0) -> float:
        """Return how long this rank takes for one collective of a message of this size, on average.

        group, ranks   a group and its size; the time is then that of the best of three series: a slow connection is
                       slow in all of them, but an interruption of a node is not
        """
        import torch
        import torch.distributed as distributed

        series, ranks = (3, ranks) if ranks else (1, self.processes.world_size)
        gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)  # torch 2.13 renamed it
        count = elements(size_bytes, ranks)
        data = torch.ones(count, dtype=torch.float32, device=self.device)
        other = torch.empty_like(data)

        def run() -> None:
            if operation == "all-reduce":
                distributed.all_reduce(data, group=group)
            elif operation == "all-gather":
                gather(data, other[: count // ranks], group=group)
            else:
                distributed.all_to_all_single(other, data, group=group)

        def timed(times: int) -> float:
            begun = time.perf_counter()
            for _ in range(times):
                run()
            if self.backend == "nccl":
                torch.cuda.synchronize()
            return (time.perf_counter() - begun) / times

        timed(1)  # opens the connections
        slowest = torch.tensor([timed(1)], device=self.device)
        distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX, group=group)
        times = min(50, max(2, int(BUDGET_SECONDS / series / float(slowest.item()))))
        return min(timed(times) for _ in range(series))

    def shared(self, mine: float) -> list[float]:
        """Return the number of each rank."""
        import torch
        import torch.distributed as distributed

        numbers = [torch.zeros(1, dtype=torch.float64) for _ in range(self.processes.world_size)]
        distributed.all_gather(numbers, torch.tensor([mine], dtype=torch.float64), group=self.control)
        return [float(number) for number in numbers]

    def all_ranks(self, operation: str, size_bytes: int) -> float:
        """Return the seconds that the slowest rank takes for a collective over all ranks."""
        self.begin(f"{operation} of {words(size_bytes)}")
        return max(self.shared(self.seconds(operation, size_bytes, self.world)))

    def groups(self, groups: Sequence[Group], size_bytes: int) -> dict[Group, float]:
        """Return GB/s per node of an all-reduce in each of these disjoint groups of nodes, all at the same time."""
        import torch.distributed as distributed

        self.begin("all-reduce in groups of nodes: " + "; ".join(",".join(map(str, group)) for group in groups))
        members = {group: [node * self.per_node + rank for node in group for rank in range(self.per_node)]
                   for group in groups}  # fmt: skip
        longer = self.timeout * (START if self.backend == "nccl" else 1)
        made = {group: distributed.new_group(ranks, timeout=longer) for group, ranks in members.items()}
        mine = next((group for group, ranks in members.items() if self.processes.rank in ranks), None)
        seconds = self.seconds("all-reduce", size_bytes, made[mine], len(members[mine])) if mine else 0.0
        taken = self.shared(seconds)
        if mine:
            distributed.destroy_process_group(made[mine])
        return {
            group: bandwidth(size_bytes, len(ranks), max(taken[rank] for rank in ranks))
            * node_factor("all-reduce", len(group), self.per_node)
            for group, ranks in members.items()
        }


def silent_ranks(message: str, rank: int) -> str:
    """Return the ranks that a barrier has waited for, in words; empty if the message does not say them.

    Only rank 0 knows them. Where another rank's barrier fails, torch names that rank itself.
    """
    found = re.search(r"[Rr]anks? ([\d, ]*\d) failed", message)
    return f"rank {found[1]}" if found and str(rank) not in found[1].split(", ") else ""


def elements(size_bytes: int, ranks: int) -> int:
    """Return how many float32 values a message of about this size has: a multiple of the number of ranks."""
    return max(1, size_bytes // 4 // ranks) * ranks


def bandwidth(size_bytes: int, ranks: int, seconds: float) -> float:
    """Return size / time in GB/s, for the size that the message really had."""
    return elements(size_bytes, ranks) * 4 / seconds / 1e9


def words(size_bytes: int) -> str:
    """Return a size as people write it: 64 KiB."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << shift:
            return f"{size_bytes >> shift} {unit}"
    return f"{size_bytes} bytes"
