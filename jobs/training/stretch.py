"""What a process measures between two entries of metrics.jsonl, and what all of them measure together."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from training.processes import Processes


@dataclass
class Stretch:
    """What this process has measured since the last entry. Seconds, but for the squared lengths of sequences."""

    data_wait: float = 0.0
    checkpoint: float = 0.0
    evaluation: float = 0.0
    squared_lengths: Any = 0


@dataclass(frozen=True)
class Ranks:
    """What all ranks have measured since the last entry."""

    tokens: int
    squared_lengths: float
    data_wait: float  # of the rank that has waited longest: the others wait for it
    memory_bytes: int  # of the rank that needs most


class Timed:
    """An iterator that notes how long each `next` takes."""

    def __init__(self, iterator: Any, stretch: Stretch) -> None:
        self.iterator, self.stretch = iterator, stretch

    def __iter__(self) -> Timed:
        return self

    def __next__(self) -> Any:
        begun = time.monotonic()
        try:
            return next(self.iterator)
        finally:
            self.stretch.data_wait += time.monotonic() - begun


def squared_lengths(batch: Any) -> Any:
    """Return the sum of the squared lengths of a batch's sequences, on the device where it lies.

    Packed rows count by their documents where positions begin anew in them: the sum of 2 i + 1 over positions i is
    the square of a length.
    """
    ids = batch.get("input_ids")
    if ids is None or ids.dim() != 2:
        return 0
    positions, mask = batch.get("position_ids"), batch.get("attention_mask")
    if positions is not None:
        return (2 * positions + 1).sum()
    if mask is not None and mask.dim() == 2:
        return (mask.sum(dim=1) ** 2).sum()
    return ids.numel() * ids.shape[1]


def gather(tokens: int, stretch: Stretch, processes: Processes) -> Ranks:
    """Return what all ranks have measured, in one collective: every rank calls it."""
    mine = [float(tokens), float(stretch.squared_lengths), stretch.data_wait, float(peak_memory())]
    rows = [mine]
    if processes.world_size > 1:
        import torch
        import torch.distributed

        device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
        row = torch.tensor(mine, dtype=torch.float64, device=device)
        found = [torch.empty_like(row) for _ in range(processes.world_size)]
        torch.distributed.all_gather(found, row)
        rows = [each.tolist() for each in found]
    columns = list(zip(*rows, strict=True))
    return Ranks(round(sum(columns[0])), sum(columns[1]), max(columns[2]), round(max(columns[3])))


def peak_memory() -> int:
    """Return the peak in bytes: what torch has allocated on the GPU, or what this process has held in memory."""
    import resource

    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
