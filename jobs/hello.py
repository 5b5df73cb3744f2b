"""A first test: each process prints its rank and host, all processes compute a sum, and rank 0 lists the nodes.

    runner launch --env cpu --script hello

Needs only Python. With torch, the sum is an all-reduce with gloo, so that a wrong rendezvous address shows at once.
`hello.py WORD ...` also prints its arguments; `--exit CODE` exits with that code.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Print rank, world size and host. Return 0 or the code of `--exit`; 1 if the sum is wrong."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    where = f"rank {rank} of {world_size} on {node}, Python {platform.python_version()} {platform.machine()}"
    _say(f"hello from {where}{f', arguments {list(argv)!r}' if argv else ''}")
    if world_size > 1 and importlib.util.find_spec("torch"):
        total, nodes = _meet(rank, world_size, node)
        expected = world_size * (world_size - 1) // 2
        if rank == 0:
            listed = (f"  rank {other} is on {where}" for other, where in enumerate(nodes))
            _say(*listed, f"all-reduce over {world_size} processes: {total}, expected {expected}")
        if total != expected:
            return 1
    return int(argv[argv.index("--exit") + 1]) if "--exit" in argv else 0


def _say(*lines: str) -> None:
    """Write the lines at once: with PYTHONUNBUFFERED, `print` writes a line and its end apart, and ranks would mix."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def _meet(rank: int, world_size: int, node: str) -> tuple[int, list[str]]:
    """Return the sum of all ranks and the node of each."""
    from datetime import timedelta

    import torch
    import torch.distributed

    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
    number = torch.tensor([rank])
    torch.distributed.all_reduce(number)
    nodes = [""] * world_size
    torch.distributed.all_gather_object(nodes, node)
    torch.distributed.destroy_process_group()
    return int(number.item()), nodes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
