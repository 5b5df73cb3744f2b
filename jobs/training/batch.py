"""The arithmetic of a training step: micro batch x accumulation x world size = sequences and tokens per step."""

from __future__ import annotations

from dataclasses import dataclass

from training.errors import JobError


@dataclass(frozen=True)
class Batch:
    micro: int  # sequences of one process in one forward pass
    accumulation: int  # forward passes per optimizer step
    world_size: int
    length: int | None  # tokens per sequence at most; None where sequences are not cut

    @property
    def sequences(self) -> int:
        """Sequences per optimizer step, over all processes."""
        return self.micro * self.accumulation * self.world_size

    @property
    def tokens(self) -> int | None:
        """Tokens per optimizer step at most: all of them when sequences are packed."""
        return None if self.length is None else self.sequences * self.length

    def __str__(self) -> str:
        tokens = "" if self.tokens is None else f" of {self.length} tokens = {self.tokens} tokens per step"
        return (
            f"{self.micro} per process x {self.accumulation} accumulation x {self.world_size} processes"
            f" = {self.sequences} sequences per step{tokens}"
        )


def plan(
    micro: int, accumulation: int, world_size: int, length: int | None, global_batch: int | None, nearest: bool = False
) -> Batch:
    """Return the batch; a global batch gives the accumulation. Raises JobError if it does not divide.

    With `nearest`, take the nearest size that does: the run continues with another number of processes.
    """
    if global_batch is None:
        return Batch(micro, accumulation, world_size, length)
    per_pass = micro * world_size
    if not nearest and (global_batch < per_pass or global_batch % per_pass):
        near = sorted({max(per_pass, global_batch // per_pass * per_pass), (global_batch // per_pass + 1) * per_pass})
        raise JobError(
            f"a global batch of {global_batch} sequences cannot be split evenly",
            f"{micro} per process x {world_size} processes = {per_pass} per pass,"
            f" and {global_batch} is not a multiple of {per_pass}",
            f"--global_batch_size {' or '.join(map(str, near))}, or another micro batch size or number of processes",
        )
    return Batch(micro, max(1, round(global_batch / per_pass)), world_size, length)
