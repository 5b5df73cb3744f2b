"""What of the machine and the image a choice depends on."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from training import host_memory

FABRICS = ("/dev/infiniband", "/dev/cxi0", "/dev/hfi1_0")


@dataclass(frozen=True)
class Machine:
    """One process's view. `gpu` is empty where there is none."""

    gpu: str = ""
    capability: tuple[int, int] = (0, 0)
    bf16: bool = False
    cores_per_process: int = 1
    nodes: int = 1
    processes: int = 1
    memory_bytes: int = 0  # free on the GPU, or on the host for each process
    torch: tuple[int, ...] = (2, 13)
    packages: frozenset[str] = frozenset()  # of flash_attn, liger_kernel, triton
    fabric: str = ""  # the first device of a fast network that is seen here
    network_plugin: str = ""  # a libnccl-net that the loader would find
    environment: Mapping[str, str] | None = None  # the NCCL_ part


def look(environment: Mapping[str, str], processes: int, local_processes: int, memory: bool = True) -> Machine:
    """Return what is here. `memory` asks the device of this process, which takes some of it: not before it is set."""
    import torch

    cuda = torch.cuda.is_available()
    wanted = ("flash_attn", "liger_kernel", "triton")
    return Machine(
        gpu=torch.cuda.get_device_name() if cuda else "",
        capability=torch.cuda.get_device_capability() if cuda else (0, 0),
        bf16=cuda and torch.cuda.is_bf16_supported(),
        cores_per_process=max(1, len(os.sched_getaffinity(0)) // max(1, local_processes)),
        nodes=max(1, processes // max(1, local_processes)),
        processes=processes,
        memory_bytes=_free(cuda, local_processes) if memory else 0,
        torch=_version("torch"),
        packages=frozenset(name for name in wanted if importlib.util.find_spec(name)),
        fabric=next((device for device in FABRICS if Path(device).exists()), ""),
        network_plugin=_plugin(environment),
        environment={name: value for name, value in environment.items() if name.startswith(("NCCL_", "FI_"))},
    )


def prebuilt_operators() -> tuple[str, ...]:
    """Return DeepSpeed's operators that were compiled into the image: its setup has noted them in a module.

    The note is read as text: to import it is to import all of DeepSpeed. Source: DeepSpeed 0.19.8, setup.py.
    """
    spec = PathFinder.find_spec("deepspeed")  # what `imports` hides is here for us
    for folder in spec.submodule_search_locations or () if spec else ():
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            for line in ast.parse(Path(folder, "git_version_info_installed.py").read_text(encoding="utf-8")).body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "installed_ops":
                    return tuple(sorted(name for name, there in ast.literal_eval(line.value).items() if there))
    return ()


def _version(package: str) -> tuple[int, ...]:
    numbers = importlib.metadata.version(package).split("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, number)) or 0) for number in numbers)


def _free(cuda: bool, local_processes: int) -> int:
    import torch

    return int(torch.cuda.mem_get_info()[0]) if cuda else host_memory.free_bytes() // max(1, local_processes)


def _plugin(environment: Mapping[str, str]) -> str:
    """Return the network plugin that NCCL's loader would find on LD_LIBRARY_PATH, or the one that is named."""
    named = environment.get("NCCL_NET_PLUGIN", "")
    for folder in environment.get("LD_LIBRARY_PATH", "").split(":"):
        if not folder or not Path(folder).is_dir():
            continue
        for library in sorted(Path(folder).glob("libnccl-net*.so*")):
            return str(library)
    return named
