"""The rank and world size of this process, under any launcher, and work that one rank does for all."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

from training.errors import JobError

Result = TypeVar("Result")
BEAT_SECONDS = 20.0  # between two collectives while rank 0 does long work; backends give up after minutes


@dataclass(frozen=True)
class Processes:
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launcher: str  # torchrun, srun, accelerate, torch (RANK was set by hand) or alone

    @property
    def first(self) -> bool:
        return self.rank == 0


ALONE = Processes(0, 0, 1, 1, "alone")


def from_environment(environment: MutableMapping[str, str]) -> Processes:
    """Return rank and world size. For a single process, set the variables that torch and DeepSpeed need."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        if int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment and _in_step(environment):
            raise JobError(
                f"{environment['SLURM_NTASKS']} tasks were started, but RANK and WORLD_SIZE are not set",
                "each task would train on its own and overwrite the files of the others",
                "launch with `--launcher srun`, or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
            )
        environment.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        environment.setdefault("MASTER_ADDR", "127.0.0.1")
        environment.setdefault("MASTER_PORT", str(free_port()))
        return ALONE
    world_size = int(environment["WORLD_SIZE"])
    local = environment.get("LOCAL_WORLD_SIZE") or environment.get("SLURM_NTASKS_PER_NODE") or str(world_size)
    environment.setdefault("LOCAL_RANK", environment.get("SLURM_LOCALID", "0"))
    return Processes(
        int(environment["RANK"]), int(environment["LOCAL_RANK"]), world_size, int(local), _launcher(environment)
    )


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, whatever ends it."""
    import ctypes
    import multiprocessing
    import signal

    pr_set_pdeathsig = 1  # prctl(2)
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # a child of multiprocessing: the parent ended before the call, and nothing would end this process


def set_threads(environment: MutableMapping[str, str], processes: Processes) -> int:
    """Return the threads per process; set OMP_NUM_THREADS if it is unset. Call it before torch is imported."""
    cores = len(os.sched_getaffinity(0))
    # srun binds each task to its own cores: the mask is already this process's share.
    share = cores if processes.launcher == "srun" else max(1, cores // processes.local_world_size)
    return int(environment.setdefault("OMP_NUM_THREADS", str(share)))


def once(processes: Processes, function: Callable[[], Result]) -> Result:
    """Return on every rank what `function` returned on rank 0. Its error is raised on every rank: no rank hangs."""
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
            box[1] = (
                str(error),
                "rank 0 could not read or write a file",
                "check the path, its permissions and the free disk space",
            )
    torch.distributed.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise JobError(*box[1])
    result: Result = box[0]
    return result


def once_slowly(processes: Processes, function: Callable[[], Result], beat: Callable[[], None]) -> Result:
    """Do `once` for work that takes longer than a collective may wait; rank 0 calls `beat` meanwhile."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    if processes.first:
        thread.start()

    def is_running() -> bool:
        thread.join(BEAT_SECONDS)
        beat()
        return thread.is_alive()

    while once(processes, is_running):
        pass

    def result() -> Result:
        value, error = outcome[0]
        if error is not None:
            raise error
        made: Result = value
        return made

    return once(processes, result)


def any_rank(mine: bool, processes: Processes) -> bool:
    """Return whether any rank passed True. A collective."""
    return bool(highest(int(mine), processes))


def highest(mine: int, processes: Processes) -> int:
    """Return the highest number that any rank passed. A collective."""
    if processes.world_size == 1:
        return mine
    import torch
    import torch.distributed

    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    number = torch.tensor([mine], device=device)
    torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX)
    return int(number.item())


def gather(mine: Result, processes: Processes) -> list[Result]:
    """Return every rank's object, by rank. A collective."""
    if processes.world_size == 1:
        return [mine]
    import torch.distributed

    found: list[Any] = [None] * processes.world_size
    torch.distributed.all_gather_object(found, mine)
    return found


def barrier(processes: Processes) -> None:
    if processes.world_size > 1:
        import torch.distributed

        torch.distributed.barrier()


def leave_group() -> None:
    """End the process group; torch warns if a process exits without doing so."""
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
    """True in a task of srun; the batch script itself has no step id, or the batch step's."""
    return environment.get("SLURM_STEP_ID", "").isdigit() and int(environment["SLURM_STEP_ID"]) < 0xFFFFFFF0


def free_port(address: str = "127.0.0.1") -> int:
    """Return a TCP port that is free on this address; on all addresses for ''."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
    return port
