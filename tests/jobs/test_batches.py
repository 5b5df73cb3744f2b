"""The batch of a step is what its parts multiply to, or the job refuses to start."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from training import arguments, micro_batch
from training import batch as batches
from training.errors import JobError
from training.processes import Processes
from training.run import RunFolder
from training.settings import Settings


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


@pytest.mark.parametrize(("nodes", "requested"), [("3", "4"), ("3", "3"), ("3", None)])
@pytest.mark.parametrize(("attempt", "micro"), [(1, None), (2, None), (1, "auto")])
def test_on_fewer_nodes_than_requested_the_nearest_global_batch_is_taken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: str,
    requested: str | None,
    attempt: int,
    micro: str | None,
) -> None:
    """A node may be lost, or fail a check, before a step has been trained: no metrics tell that."""
    monkeypatch.setattr(micro_batch, "_find", lambda settings, run, peers, each, length: each)  # all of them fit
    monkeypatch.setenv("RUNNER_NODES", nodes)
    monkeypatch.delenv("RUNNER_REQUESTED_NODES", raising=False)
    if requested:
        monkeypatch.setenv("RUNNER_REQUESTED_NODES", requested)
    values = {"global_batch_size": 8, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    settings = Settings({**values, "micro_batch": micro}, {"global_batch_size": "command line"})
    run = RunFolder(tmp_path, tmp_path / f"attempts/{attempt}", tmp_path / "save", tmp_path / "cache", by_hand=False)
    job: Any = SimpleNamespace(run=run, processes=Processes(0, 0, 3, 1, "torchrun"))
    if requested == "4":
        assert arguments.plan_batch(settings, job, 16).sequences == 9
    else:
        with pytest.raises(JobError, match="cannot be split evenly"):
            arguments.plan_batch(settings, job, 16)
