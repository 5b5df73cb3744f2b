"""How much memory a kind of GPU has for tensors."""

from __future__ import annotations

import re

from runner.errors import RunnerError

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from collections.abc import Iterable

GIB = 1024**3
# GiB that torch.cuda sees (total_memory), rounded down; `--gpu_memory` says it for any other.
USABLE_GIB = {
    "H200": 139, "GH200": 94, "H100": 79, "A100 80GB": 79, "A100": 39, "L40S": 44, "L4": 22, "A10": 22,
    "V100 32GB": 31, "V100": 15, "T4": 14,
}  # fmt: skip
# Beside tensors: context and kernels of CUDA, buffers of NCCL; and what lies in holes between them. An assumption.
RESERVED_BYTES = int(1.5 * GIB)
HOLES = 0.05


def memory_bytes(gpu: str) -> int | None:
    """The memory of a GPU by its name (`H100`, `NVIDIA A100 80GB`), or None."""
    wanted = gpu.upper().replace("NVIDIA", " ").replace("-", " ").replace("_", " ").split()
    best = max((name for name in USABLE_GIB if _within(name.upper().split(), wanted)), key=len, default=None)
    return None if best is None else USABLE_GIB[best] * GIB


def _within(name: Iterable[str], words: list[str]) -> bool:
    return all(word in words for word in name)


def parse_size(text: str) -> int:
    """Bytes of `80`, `80GiB`, `80G`, `80GB` (decimal), `81559MiB`. Raises RunnerError otherwise."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|G|GB|MiB|M|MB)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise RunnerError(
            f"--gpu_memory {text!r} is no size", "it is a number and GiB, GB or MiB", "--gpu_memory 80GiB"
        )
    unit = (match[2] or "GiB").upper()
    factor = {"GIB": GIB, "G": GIB, "GB": 10**9, "MIB": 1024**2, "M": 1024**2, "MB": 10**6}[unit]
    return int(float(match[1]) * factor)


def fits(needed_bytes: int, gpu_bytes: int) -> bool:
    return needed_bytes * (1 + HOLES) + RESERVED_BYTES <= gpu_bytes
