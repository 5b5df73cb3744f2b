"""Who this process is among its peers, whichever launcher has started it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

from training.errors import JobError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Processes:
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launcher: str  # torchrun, srun, accelerate or alone

    @property
    def first(self) -> bool:
        return self.rank == 0


def from_environment(environment: MutableMapping[str, str]) -> Processes:
    """Return rank and world size; started alone, set what DeepSpeed and torch look for (DeepSpeed would ask MPI)."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        if int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment and _in_step(environment):
            raise JobError(
                f"{environment['SLURM_NTASKS']} tasks were started, but RANK and WORLD_SIZE are not set",
                "each task would train on its own and overwrite the other's files",
                "launch with `--launcher srun`, or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
            )
        environment.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        environment.setdefault("MASTER_ADDR", "127.0.0.1")
        environment.setdefault("MASTER_PORT", str(free_port()))
        return Processes(0, 0, 1, 1, "alone")
    world_size = int(environment["WORLD_SIZE"])
    local = environment.get("LOCAL_WORLD_SIZE") or environment.get("SLURM_NTASKS_PER_NODE") or str(world_size)
    environment.setdefault("LOCAL_RANK", environment.get("SLURM_LOCALID", "0"))
    return Processes(
        int(environment["RANK"]), int(environment["LOCAL_RANK"]), world_size, int(local), _launcher(environment)
    )


def set_threads(environment: MutableMapping[str, str], processes: Processes) -> int:
    """Return the threads per process; set OMP_NUM_THREADS where it is unset. To be called before torch is imported."""
    cores = len(os.sched_getaffinity(0))
    # srun binds each task to its own cores, so the mask is this process' share already.
    share = cores if processes.launcher == "srun" else max(1, cores // processes.local_world_size)
    return int(environment.setdefault("OMP_NUM_THREADS", str(share)))


def settle_device(environment: MutableMapping[str, str]) -> None:
    """Tell DeepSpeed that there is no GPU before it is imported: it would look for one and warn on every rank."""
    import torch

    if not torch.cuda.is_available():
        environment.setdefault("DS_ACCELERATOR", "cpu")


def once(processes: Processes, function: Callable[[], Result]) -> Result:
    """Return what `function` gave on rank 0, on every rank; its error is raised on every rank too, so nobody hangs."""
    if processes.world_size == 1:
        return function()
    import torch.distributed

    box: list[Any] = [None, None]
    if processes.first:
        try:
            box[0] = function()
        except JobError as error:
            box[1] = (error.what, error.why, error.fix)
        except OSError as error:
            box[1] = (str(error), "rank 0 could not read or write a file", "look at the path, its rights and the disk")
    torch.distributed.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise JobError(*box[1])
    result: Result = box[0]
    return result


def barrier(processes: Processes) -> None:
    if processes.world_size > 1:
        import torch.distributed

        torch.distributed.barrier()


def leave_group() -> None:
    """End the process group in good order; torch warns otherwise."""
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _launcher(environment: MutableMapping[str, str]) -> str:
    if any(name.startswith("ACCELERATE_") for name in environment):
        return "accelerate"
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    return "srun" if "SLURM_PROCID" in environment else "torch"


def _in_step(environment: MutableMapping[str, str]) -> bool:
    """True in a task of srun; the batch script itself has no step id (or the batch step's)."""
    return environment.get("SLURM_STEP_ID", "").isdigit() and int(environment["SLURM_STEP_ID"]) < 0xFFFFFFF0


def free_port(address: str = "127.0.0.1") -> int:
    """Return a TCP port that nobody listens on at this address; on every one for ''."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
    return port
