"""The first thing to try: each process says who it is, and all of them add up one number.

    runner launch --env cpu --script hello

Needs nothing but Python; with torch, the sum is one all-reduce over gloo, so that a wrong rendezvous shows at once.
`hello.py WORD ...` prints the words that it was given too; `--exit CODE` ends with that code.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Print rank, world size and host, and return 0, or what `--exit` says; 1 when the sum is wrong."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    where = f"rank {rank} of {world_size} on {node}, Python {platform.python_version()} {platform.machine()}"
    print(f"hello from {where}{f', words {list(argv)!r}' if argv else ''}", flush=True)
    if world_size > 1 and importlib.util.find_spec("torch"):
        total = _sum_of_ranks(rank, world_size)
        expected = world_size * (world_size - 1) // 2
        if rank == 0:
            print(f"all-reduce over {world_size} processes: {total}, expected {expected}", flush=True)
        if total != expected:
            return 1
    return int(argv[argv.index("--exit") + 1]) if "--exit" in argv else 0


def _sum_of_ranks(rank: int, world_size: int) -> int:
    from datetime import timedelta

    import torch
    import torch.distributed

    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
    number = torch.tensor([rank])
    torch.distributed.all_reduce(number)
    torch.distributed.destroy_process_group()
    return int(number.item())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
