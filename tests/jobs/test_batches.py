"""The batch of a step is what its parts multiply to, or the job refuses to start."""

import pytest

from training import batch as batches
from training.errors import JobError


def test_parts_multiply_to_sequences_and_tokens() -> None:
    batch = batches.plan(micro=4, accumulation=2, world_size=8, length=1024, global_batch=None)
    assert (batch.sequences, batch.tokens) == (64, 65536)
    assert str(batch) == (
        "4 per process x 2 accumulation x 8 processes = 64 sequences per step of 1024 tokens = 65536 tokens per step"
    )


def test_without_a_length_the_tokens_are_not_known() -> None:
    batch = batches.plan(micro=1, accumulation=1, world_size=1, length=None, global_batch=None)
    assert batch.tokens is None
    assert str(batch).endswith("= 1 sequences per step")


@pytest.mark.parametrize(("micro", "world_size", "global_batch", "accumulation"), [(4, 8, 128, 4), (1, 1, 7, 7)])
def test_a_global_batch_gives_the_accumulation(
    micro: int, world_size: int, global_batch: int, accumulation: int
) -> None:
    batch = batches.plan(micro, 1, world_size, 16, global_batch)
    assert (batch.accumulation, batch.sequences) == (accumulation, global_batch)


@pytest.mark.parametrize(("global_batch", "near"), [(7, "4 or 8"), (3, "4"), (10, "8 or 12")])
def test_a_global_batch_that_does_not_divide_is_refused_with_its_neighbours(global_batch: int, near: str) -> None:
    with pytest.raises(JobError) as caught:
        batches.plan(2, 1, 2, 16, global_batch)
    assert f"a global batch of {global_batch}" in caught.value.what
    assert f"--global_batch_size {near}," in caught.value.fix
