"""`--micro_batch N|auto`: sequences of one process in one forward pass; `auto` is the largest number that fits.

`auto` starts this script again on every rank, as a child that trains a few steps on full-length sequences with one size
after another (probe.py). If a size runs out of memory on one rank, the others would wait in a collective forever: this
process ends its child then. accelerate's `find_executable_batch_size` decides for one process alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from training import batch, files, probe
from training.errors import JobError
from training.processes import Processes, free_port
from training.run import PROBE, RunFolder, probing
from training.settings import Settings

SEARCH_SECONDS = 1800.0
GRACE_SECONDS = 5.0  # a child fails where another rank's has just run out of memory: wait for that rank's answer
OUTCOME = "outcome"  # key in the store: what fits, of the first rank that ran out of memory


def settle(settings: Settings, run: RunFolder, peers: Processes, length: int | None, nearest: bool = False) -> None:
    """Set per_device_train_batch_size, and for `auto` the accumulation, from `--micro_batch`.

    Call it before there is a process group and before the GPU is used. `length`: tokens of the longest sequence.
    `nearest`: see batch.plan.
    """
    if probing():
        return probe.settle(settings)
    wanted = settings.get("micro_batch")
    if wanted is None or settings.overrides("per_device_train_batch_size", "micro_batch"):
        return
    if settings.given("per_device_train_batch_size") and not settings.overrides(
        "micro_batch", "per_device_train_batch_size"
    ):
        raise JobError(
            "--micro_batch and --per_device_train_batch_size are both given",
            "both set the micro batch size",
            "remove one of the two",
        )
    if str(wanted).lower() != "auto":
        if not str(wanted).isdigit() or int(wanted) < 1:
            raise JobError(
                f"--micro_batch cannot be {wanted!r}", "it must be `auto` or a positive integer", "--micro_batch auto"
            )
        return settings.derive("per_device_train_batch_size", int(wanted), "from micro_batch")
    if length is None:
        raise JobError(
            "--micro_batch auto needs a maximum sequence length",
            "without a maximum, a single long row can need any amount of memory",
            "--max_length TOKENS, or --micro_batch NUMBER",
        )
    step = settings.get("global_batch_size") or (
        settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] * peers.world_size
    )
    each = batch.plan(1, 1, peers.world_size, None, step, nearest).accumulation  # sequences of one process in a step
    micro = _find(settings, run, peers, each, length)
    settings.derive("per_device_train_batch_size", micro, "micro_batch auto")
    settings.derive("gradient_accumulation_steps", each // micro, "from global_batch_size")
    settings.derive("global_batch_size", step, settings.sources.get("global_batch_size", "default"))


def _find(settings: Settings, run: RunFolder, peers: Processes, each: int, length: int) -> int:
    """Return the largest micro batch that fits on all ranks; a restart of the run takes the one found before."""
    kept, started = run.path / "micro_batch.json", time.monotonic()
    question = {"words": list(settings.words), "processes": peers.world_size, "sequences": each, "length": length}
    with shared_store(peers) as store:
        if peers.first:
            answer = 0  # also if the file is damaged: the other ranks wait for this key
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found_before = json.loads(kept.read_text(encoding="utf-8"))
                answer = int(found_before["micro_batch"]) if found_before["for"] == question else 0
            store.set("known", str(answer))
            store.set("port", str(free_port("")))
        known = int(store.get("known"))
        if known:
            if peers.first:
                print(f"micro batch: {known}, from an earlier search ({kept})", flush=True)
            return known
        sizes = [size for size in range(1, each + 1) if each % size == 0]
        if peers.first:
            print(f"micro batch: trying {', '.join(map(str, sizes))}", flush=True)
        found = search(sizes, settings, run, peers, store)
    if found == 0:
        raise JobError(
            f"one sequence of {length} tokens does not fit into memory",
            f"model, optimizer and activations need more memory than there is; logs: {run.attempt / 'probe'}",
            "use --activation_checkpointing true, shorter sequences, --deepspeed zero3 or zero3-offload, or more GPUs",
        )
    if peers.first:
        files.write_json(kept, {"micro_batch": found, "for": question})
        why = "one pass takes all sequences of a step" if found == each else "a larger size needs too much memory"
        print(f"micro batch: {found}; {why} ({time.monotonic() - started:.0f} s)", flush=True)
    return found


@contextlib.contextmanager
def shared_store(peers: Processes) -> Iterator[Any]:
    """Give a store that all ranks share while there is no process group.

    It is that of torchrun's agent; with another launcher rank 0 opens one beside the port of the process group.
    """
    from torch import distributed

    if peers.world_size == 1:
        yield distributed.HashStore()
        return
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = int(os.environ["MASTER_PORT"]) + (0 if agent else 1)
    server = peers.first and not agent
    wait = timedelta(seconds=SEARCH_SECONDS + 60)
    address = os.environ["MASTER_ADDR"]
    shared = distributed.TCPStore(address, port, peers.world_size, server, wait, wait_for_workers=False)
    store = distributed.PrefixStore(f"micro_batch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)
    yield store
    store.add("left", 1)
    while server and store.add("left", 0) < peers.world_size:  # the store is in this process
        time.sleep(0.05)


def search(sizes: list[int], settings: Settings, run: RunFolder, peers: Processes, store: Any) -> int:
    """Start this rank's child with the sizes to try and return what fits on all ranks. Raises JobError if it fails."""
    own = run.attempt / "probe" / f"rank-{peers.rank}"
    own.mkdir(parents=True, exist_ok=True)
    order = {"sizes": sizes, "accumulation": min(2, sizes[-1]), "processes_per_node": peers.local_world_size}
    variables = {
        PROBE: json.dumps(order), "MASTER_PORT": int(store.get("port")), "RUNNER_CACHE": run.cache,
        "RUNNER_RUN": own.parent, "RUNNER_ATTEMPT": own, "RUNNER_SAVE_AND_EXIT": own / "never",
        "WANDB_MODE": "disabled",
    }  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    environment = {**kept, **{name: str(value) for name, value in variables.items()}}
    command = (sys.executable, str(Path(sys.argv[0]).resolve()), *settings.words)
    with (own / "log").open("wb") as log:
        child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    end = time.monotonic() + SEARCH_SECONDS
    while child.poll() is None:
        if store.check([OUTCOME]) or time.monotonic() > end:
            child.kill()
        time.sleep(0.25)
    if child.returncode == probe.OUT_OF_MEMORY:
        store.set(OUTCOME, (own / probe.ANSWER).read_text(encoding="utf-8"))
    elif child.returncode != 0:
        with contextlib.suppress(Exception):  # no rank ran out of memory: the library's error for a key without value
            store.wait([OUTCOME], timedelta(seconds=GRACE_SECONDS))
    if store.check([OUTCOME]):
        return int(store.get(OUTCOME))
    if child.returncode != 0:
        lines = (own / "log").read_text(encoding="utf-8", errors="replace").split("\n")
        raise JobError(
            f"the search for --micro_batch auto failed on rank {peers.rank} with exit code {child.returncode}",
            " ".join([line.strip() for line in lines if line.strip()][-3:]) or "it printed nothing",
            f"read {own / 'log'}, or set --micro_batch NUMBER",
        )
    return int((own / probe.ANSWER).read_text(encoding="utf-8"))
