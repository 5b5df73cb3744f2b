"""`--micro_batch N|auto`: sequences of one process in one forward pass; `auto` is the largest number that fits.

`auto` starts this script again on every rank, as a child that trains a few steps on full-length sequences with one size
after another: doubling, then the sizes in between. After each size the ranks agree on the memory that it took. A size
that would need more than 92% of the memory, as the two sizes before it tell, is not tried. accelerate's
`find_executable_batch_size` decides for one process alone, and the others would wait in a collective for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from training import batch, files, host_memory, probe
from training.errors import JobError
from training.processes import Processes, free_port
from training.run import RunFolder
from training.settings import Settings

ROUND_SECONDS = 1800.0
FromFirst = Callable[[str, Callable[[], int]], int]


def settle(settings: Settings, run: RunFolder, peers: Processes, length: int | None) -> None:
    """Set per_device_train_batch_size, and for `auto` the accumulation, from `--micro_batch`.

    Call it before there is a process group and before the GPU is used. `length`: tokens of the longest sequence.
    """
    if probe.probing():
        return probe.settle(settings)
    wanted = settings.get("micro_batch")
    if wanted is None:
        return
    if settings.given("per_device_train_batch_size"):
        raise JobError(
            "--micro_batch and --per_device_train_batch_size are both given", "they set the same number", "drop one"
        )
    if str(wanted).lower() != "auto":
        if not str(wanted).isdigit() or int(wanted) < 1:
            raise JobError(f"--micro_batch {wanted!r} is not a number", "1 or more, or `auto`", "--micro_batch auto")
        return settings.derive("per_device_train_batch_size", int(wanted), "from micro_batch")
    if length is None:
        raise JobError(
            "--micro_batch auto needs a maximum sequence length",
            "without one, a single long row can need any amount of memory",
            "--max_length TOKENS, or --micro_batch NUMBER",
        )
    each = _sequences_per_process(settings, peers)
    micro = _find(settings, run, peers, each, length)
    settings.derive("per_device_train_batch_size", micro, "micro_batch auto")
    settings.derive("gradient_accumulation_steps", each // micro, "from global_batch_size")


def _sequences_per_process(settings: Settings, peers: Processes) -> int:
    """Return the sequences of one process in one optimizer step; a step stays as large as it was set."""
    wanted = settings.get("global_batch_size")
    micro = 1 if wanted else settings["per_device_train_batch_size"]
    accumulation = 1 if wanted else settings["gradient_accumulation_steps"]
    step = batch.plan(micro, accumulation, peers.world_size, None, wanted)
    settings.derive("global_batch_size", step.sequences, settings.sources["global_batch_size"] if wanted else "default")
    settings.derive("gradient_accumulation_steps", 1, "from global_batch_size")
    return step.sequences // peers.world_size


def _find(settings: Settings, run: RunFolder, peers: Processes, each: int, length: int) -> int:
    """Return the largest micro batch that fits on all ranks; a restart of the run takes the one found before."""
    kept, started = run.path / "micro_batch.json", time.monotonic()
    question = {"words": list(settings.words), "processes": peers.world_size, "sequences": each, "length": length}
    with talking(peers) as from_first:
        known = from_first("known", lambda: remembered(kept, question))
        if known:
            if peers.first:
                print(f"micro batch: {known}, as found before ({kept})", flush=True)
            return known
        found = _search(settings.words, run, peers, each, from_first)
    if found.fits == 0:
        raise JobError(
            f"one sequence of {length} tokens does not fit into memory (rank {found.rank})",
            f"model, optimizer and activations need more than there is; logs: {run.attempt / 'probe'}",
            "--activation_checkpointing true, a shorter length, --deepspeed zero3 or zero3-offload, or more GPUs",
        )
    if peers.first:
        files.write_json(kept, {"micro_batch": found.fits, "for": question})
        largest = "the whole step in one pass" if found.fits == each else "the next size needs too much memory"
        why = f"{found.fails} runs out of memory on rank {found.rank}" if found.fails else largest
        print(f"micro batch: {found.fits}; {why} ({time.monotonic() - started:.0f} s)", flush=True)
    return found.fits


def _search(words: Sequence[str], run: RunFolder, peers: Processes, each: int, from_first: FromFirst) -> probe.Outcome:
    """Return what fits: a round of tries, and another one where a size ran out of memory and others lie below it."""
    found = probe.Outcome()
    while sizes := [size for size in range(found.fits + 1, (found.fails or each + 1)) if each % size == 0]:
        if peers.first:
            print(f"micro batch: trying {', '.join(map(str, sizes))}", flush=True)
        port = from_first(f"port-{sizes[0]}", lambda: free_port(""))
        after = _round(sizes, min(2, each // sizes[0]), words, run, peers, port)
        if after.fails is None:
            return after
        found = probe.Outcome(max(found.fits, after.fits), after.fails, after.rank)
        if found.fits == 0:
            break
    return found


def remembered(path: Path, question: Mapping[str, Any]) -> int:
    """Return the answer to exactly this question, or 0."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return int(kept["micro_batch"]) if kept["for"] == question else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


@contextlib.contextmanager
def talking(peers: Processes) -> Iterator[FromFirst]:
    """Give a function that returns what rank 0 made, on every rank, while there is no process group.

    It uses the store of torchrun's agent; with another launcher rank 0 opens one beside the port of the process group.
    """
    if peers.world_size == 1:
        yield lambda key, make: make()
        return
    from torch import distributed

    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = int(os.environ["MASTER_PORT"]) + (0 if agent else 1)
    server = peers.first and not agent
    wait = timedelta(seconds=ROUND_SECONDS + 60)
    shared: Any = distributed.TCPStore(
        os.environ["MASTER_ADDR"], port, peers.world_size, server, wait, wait_for_workers=False
    )
    store: Any = distributed.PrefixStore(f"micro_batch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)

    def from_first(key: str, make: Callable[[], int]) -> int:
        if peers.first:
            store.set(key, str(make()))
        return int(store.get(key))

    yield from_first
    store.add("left", 1)
    while server and store.add("left", 0) < peers.world_size:  # the store is in this process
        time.sleep(0.05)


def _round(
    sizes: Sequence[int], accumulation: int, words: Sequence[str], run: RunFolder, peers: Processes, port: int
) -> probe.Outcome:
    """Start this rank's child with the sizes to try and return what it found. Raises JobError on another failure."""
    folder = run.attempt / "probe" / f"{sizes[0]}-{sizes[-1]}"
    (folder / f"rank-{peers.rank}").mkdir(parents=True, exist_ok=True)
    order, log = folder / f"rank-{peers.rank}.json", folder / f"rank-{peers.rank}.log"
    share = host_memory.free_bytes() // peers.local_world_size  # for a machine without a GPU
    files.write_json(order, {"sizes": list(sizes), "accumulation": accumulation, "memory_bytes": share})
    own = {
        probe.VARIABLE: order, "MASTER_PORT": port, "RUNNER_CACHE": run.cache, "RUNNER_RUN": folder,
        "WANDB_MODE": "disabled", "RUNNER_ATTEMPT": folder / f"rank-{peers.rank}",
        "RUNNER_SAVE_AND_EXIT": folder / "never",
    }  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    environment = {**kept, **{name: str(value) for name, value in own.items()}}
    command = (sys.executable, str(Path(sys.argv[0]).resolve()), *words)
    with log.open("wb") as stream:
        try:
            code = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, timeout=ROUND_SECONDS
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    result = order.with_suffix(".outcome")
    if code in (0, probe.OUT_OF_MEMORY) and result.is_file():
        return probe.Outcome(**json.loads(result.read_text(encoding="utf-8")))
    raise _error(peers.rank, code, log, folder / f"rank-{peers.rank}" / "error.txt")


def _error(rank: int, code: int, log: Path, note: Path) -> JobError:
    """Return the child's own error, else the last line of its log."""
    with contextlib.suppress(OSError, ValueError):
        what, rest = note.read_text(encoding="utf-8").strip().split("\n  because: ")
        why, fix = rest.split("\n  try:     ", 1)
        return JobError(what.split(": ", 1)[-1], why, fix)
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else "it printed nothing"
    return JobError(
        f"the search for --micro_batch auto failed on rank {rank} with exit code {code}",
        f"no answer in {ROUND_SECONDS:.0f} s" if code == -1 else last,
        f"see {log}, or give --micro_batch NUMBER",
    )
