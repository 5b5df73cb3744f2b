"""One process of the preflight: measures a matrix product, an all-reduce within the node, and one across all nodes.

    preflight_worker.py FOLDER NODE LOCAL_RANK PROCESSES cuda|cpu

After each test it writes all results so far to FOLDER/NODE-LOCAL_RANK.json, because preflight.py kills a worker that
does not finish in time.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

_MIB = {"cpu": 8, "cuda": 256}
_SIZE = {"cpu": 512, "cuda": 8192}
_TIMES = 5


class Worker:
    """The tests, in the order in which `main` calls them. Each reports its results with `tell`."""

    def __init__(self, folder: Path, node: int, rank: int, processes: int, device: str) -> None:
        import torch

        self.folder, self.node, self.rank, self.processes, self.kind = folder, node, rank, processes, device
        self.nodes = int(os.environ.get("RUNNER_NODES") or 1)
        self.found: dict[str, Any] = {}
        self.backend = "nccl" if device == "cuda" else "gloo"
        if device == "cuda" and not (torch.version.cuda or torch.version.hip):
            self.tell(skipped="GPUs not measured, because torch in this image is built without CUDA and ROCm")
            raise SystemExit(0)
        if device == "cuda" and torch.cuda.device_count() <= rank:
            self.tell(busy=f"torch sees {torch.cuda.device_count()} GPUs")
            raise SystemExit(1)
        if device == "cuda":
            torch.cuda.set_device(rank)
        self.device = torch.device(device, rank) if device == "cuda" else torch.device("cpu")

    def tell(self, **found: Any) -> None:
        """Add these results, and write all results so far to the file."""
        self.found.update(found)
        path = self.folder / f"{self.node}-{self.rank}.json"
        unfinished = path.with_suffix(".partial")
        unfinished.write_text(json.dumps(self.found))
        unfinished.replace(path)

    def memory(self) -> None:
        """Report `busy` if another process uses much of this GPU's memory."""
        import torch

        if self.kind == "cuda":
            free, total = torch.cuda.mem_get_info(self.rank)
            if free < 0.9 * total:
                self.tell(busy=f"only {free >> 30} of {total >> 30} GiB of GPU memory is free")

    def product(self) -> None:
        """Report the speed of a matrix product in TFLOP/s as `gemm`, and `unfit` if its result is wrong."""
        import torch

        size = _SIZE[self.kind]
        precision = torch.bfloat16 if self.kind == "cuda" else torch.float32
        ones = torch.ones(size, size, dtype=precision, device=self.device)
        result = ones @ ones
        self.wait()
        begun = time.perf_counter()
        for _ in range(_TIMES):
            result = ones @ ones
        self.wait()
        speed = _TIMES * 2 * size**3 / (time.perf_counter() - begun) / 1e12
        self.tell(gemm=speed)
        if not bool((result == size).all()):
            self.tell(unfit="a matrix product is wrong")

    def wait(self) -> None:
        import torch

        if self.kind == "cuda":
            torch.cuda.synchronize()

    def bandwidth(self, group: Any, size: int) -> float:
        """Return the bus bandwidth of an all-reduce of `size` processes in GB/s, as nccl-tests define it."""
        import torch
        import torch.distributed as distributed

        data = torch.ones(_MIB[self.kind] << 18, dtype=torch.float32, device=self.device)
        for _ in range(2):
            distributed.all_reduce(data, group=group)
        self.wait()
        begun = time.perf_counter()
        for _ in range(_TIMES):
            distributed.all_reduce(data, group=group)
        self.wait()
        seconds = (time.perf_counter() - begun) / _TIMES
        return float(2 * (size - 1) / size * data.numel() * 4 / seconds / 1e9)

    def join(self, address: str, port: int, rank: int, size: int) -> None:
        import torch.distributed as distributed

        distributed.init_process_group(
            self.backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=size,
            timeout=timedelta(seconds=40),
        )  # fmt: skip

    def leave(self) -> None:
        import torch.distributed as distributed

        distributed.destroy_process_group()

    def within(self, port: int) -> None:
        """Report the bandwidth within the node as `within`: GB/s, or None if there is only one process."""
        speed = None
        if self.processes > 1:
            self.join("127.0.0.1", port, self.rank, self.processes)
            speed = self.bandwidth(None, self.processes)
            self.leave()
        self.tell(within=speed)
        if self.rank == 0:
            (self.folder / f"within-{self.node}").write_text("")

    def across(self, port: int) -> None:
        """Report the bandwidth across all nodes as `across`.

        If it is below the site's value, also measure each node with its neighbours (`pairs`), to tell a slow node from
        a slow network.
        """
        import torch.distributed as distributed

        world = self.nodes * self.processes
        mine = self.node * self.processes + self.rank
        self.join(os.environ["MASTER_ADDR"], port, mine, world)
        speed = self.slowest(self.bandwidth(None, world))
        network = self.network()
        if network and self.rank == 0:
            (self.folder / f"network-{self.node}").write_text(network)
        self.tell(network=network)
        wanted = float(os.environ.get("RUNNER_EXPECT_ACROSS") or 0)
        pairs: dict[str, float] = {}
        if speed < wanted and self.nodes > 2:
            for neighbours in rounds(self.nodes):
                pairs.update(self.with_neighbour(neighbours, distributed))
        self.tell(across=speed, pairs=pairs)
        self.leave()

    def slowest(self, speed: float) -> float:
        """Return the lowest speed of all processes, so that all make the same decision."""
        import torch
        import torch.distributed as distributed

        number = torch.tensor([speed], dtype=torch.float32, device=self.device)
        distributed.all_reduce(number, op=distributed.ReduceOp.MIN)
        return float(number.item())

    def with_neighbour(self, neighbours: Sequence[tuple[int, int]], distributed: Any) -> dict[str, float]:
        """Measure all pairs at the same time, and return `A-B` -> GB/s for the pair of this node.

        Every process must create the group of every pair, because torch requires it.
        """
        speed: dict[str, float] = {}
        for one, other in neighbours:
            ranks = [node * self.processes + rank for node in sorted((one, other)) for rank in range(self.processes)]
            group = distributed.new_group(ranks)
            if self.node in (one, other):
                speed[f"{one}-{other}"] = self.bandwidth(group, len(ranks))
        return speed

    def network(self) -> str:
        """Return the network that NCCL's log names: `IB`, `Socket`, `AWS Libfabric over cxi`; empty without NCCL.

        The name of the plugin alone is not enough, because libfabric may use TCP behind it.
        """
        texts = [path.read_text(errors="replace") for path in self.folder.glob(f"nccl-{self.node}-{self.rank}.*")]
        return network_in("\n".join(texts))


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of neighbours on a ring of nodes, in rounds in which each node has at most one pair.

    Over all rounds, each node is with both of its neighbours: a slow connection alone makes no node look slow.
    """
    ring = [[(first + number) % nodes for number in range(nodes)] for first in range(2 + nodes % 2)]
    return [list(zip(each[::2], each[1::2], strict=False)) for each in ring]


def network_in(log: str) -> str:
    """Return the network that NCCL's log names, with libfabric's provider if there is one."""
    networks = re.findall(r"Using network (.+)", log)
    providers = re.findall(r"Selected [Pp]rovider is ([^\s,(]+)", log)
    return (networks[-1].strip() if networks else "") + (f" over {providers[-1]}" if networks and providers else "")


def main(argv: list[str]) -> int:
    folder, node, rank, processes, device = Path(argv[0]), int(argv[1]), int(argv[2]), int(argv[3]), argv[4]
    os.environ["NCCL_DEBUG"] = "INFO"
    os.environ["NCCL_DEBUG_SUBSYS"] = "INIT,NET"
    os.environ["NCCL_DEBUG_FILE"] = str(folder / f"nccl-{node}-{rank}.%h.%p")
    if device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    worker = Worker(folder, node, rank, processes, device)
    port = int(os.environ["MASTER_PORT"])
    try:
        worker.memory()
        worker.product()
        worker.within(port + 1)
        if worker.nodes > 1:
            worker.across(port + 2)
    except Exception as error:
        worker.tell(fault=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        raise
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # skip torch's cleanup, which can hang (seen with torch 2.4 and gloo)
