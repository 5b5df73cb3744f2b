"""`--micro_batch N|auto`: sequences of one process in one forward pass; `auto` is the largest number that fits."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training import deepspeed as deepspeed_config
from training import files, host_memory
from training.batch import batches, probe, tries
from training.batch.search import Search, divisors
from training.errors import JobError
from training.processes import Processes
from training.run import RunFolder
from training.settings import Settings

probing = probe.probing
# What changes how much memory a step takes; names that a script does not have are left out.
SETTINGS = (
    *("model_name_or_path", "model_revision", "config_name", "config_overrides", "model_type", "vocabulary_size"),
    *("tokenizer_name", "dtype", "torch_dtype", "attn_implementation", "bf16", "fp16", "optim", "torch_compile"),
    *("activation_checkpointing", "gradient_checkpointing", "gradient_checkpointing_kwargs", "loss_path", "loss_type"),
    *("packing", "packing_strategy", "padding_free", "use_liger_kernel", "liger_kernel_config", "loading"),
    *("use_peft", "lora_r", "lora_target_modules", "lora_modules_to_save", "load_in_4bit", "load_in_8bit", "use_cpu"),
)
LIBRARIES = ("torch", "transformers", "trl", "deepspeed", "peft", "liger-kernel")
SHARE = 0.9  # of a machine's memory without a limit: the rest is for what else runs


def settle(settings: Settings, run: RunFolder, peers: Processes, length: int | None) -> None:
    """Put per_device_train_batch_size, and for `auto` the accumulation, in the place of `--micro_batch`.

    To be called before a process group exists and before the GPU is touched: `auto` starts children of this script.
    """
    if probing():
        probe.settle(settings)
        return
    wanted = settings.get("micro_batch")
    if wanted is None:
        return
    if settings.given("per_device_train_batch_size"):
        raise JobError(
            "--micro_batch and --per_device_train_batch_size are both given", "they are one number", "leave one out"
        )
    if str(wanted).lower() != "auto":
        settings.derive("per_device_train_batch_size", _number(str(wanted)), "from micro_batch")
        return
    _refuse_fixed(settings)
    each = _sequences_per_process(settings, peers)
    if length is None:
        raise JobError(
            "--micro_batch auto does not know how long a sequence may be",
            "no length is set, so one long row may need any amount of memory",
            "--max_length TOKENS, or --micro_batch NUMBER",
        )
    micro = _find(settings, run, peers, each, length)
    settings.derive("per_device_train_batch_size", micro, "micro_batch auto")
    settings.derive("gradient_accumulation_steps", each // micro, "from global_batch_size")


def _number(text: str) -> int:
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise JobError(
        f"--micro_batch {text!r} is no number", "it is a count of 1 or more, or `auto`", "--micro_batch auto"
    )


def _sequences_per_process(settings: Settings, peers: Processes) -> int:
    """Return what each process takes per optimizer step: a global batch that is given, or that of the other numbers."""
    given = settings.get("global_batch_size")
    accumulation = 1 if given else settings["gradient_accumulation_steps"]
    micro = 1 if given else settings["per_device_train_batch_size"]
    if given and settings.given("gradient_accumulation_steps"):
        raise JobError(
            "--gradient_accumulation_steps is given beside --micro_batch auto and --global_batch_size",
            "it follows from the two",
            "leave it out",
        )
    batch = batches.plan(micro, accumulation, peers.world_size, None, given)
    settings.derive(
        "global_batch_size", batch.sequences, settings.sources["global_batch_size"] if given else "the step"
    )
    # What the default would be is no longer a wish: the global batch gives it.
    settings.derive("gradient_accumulation_steps", 1, "from global_batch_size")
    return batch.sequences // peers.world_size


def _refuse_fixed(settings: Settings) -> None:
    """Raise JobError where the DeepSpeed file says the number that is to be found."""
    path = _deepspeed_file(settings)
    config = deepspeed_config.read(path) if path else {}
    for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"):
        if config.get(name, "auto") != "auto":
            raise JobError(
                f"{path} says {name} = {config[name]}, and --micro_batch auto is to find the micro batch",
                "DeepSpeed stops when the two differ",
                f'write "auto" for {name} in the file, or give --micro_batch NUMBER',
            )


def _find(settings: Settings, run: RunFolder, peers: Processes, each: int, length: int) -> int:
    """Return the largest micro batch that fits on all ranks: remembered, or tried."""
    started, talk = time.monotonic(), tries.Peers(peers, os.environ)
    key = _key(settings, peers, each, length)
    name = f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]}.json"
    places = (run.path / "micro_batch" / name, run.cache / "micro_batch" / name)
    known = talk.once("known", lambda: remembered(places, key))
    if known is not None:
        if peers.first:
            print(f"micro batch: {known}, remembered in {places[1]}", flush=True)
        return int(known)
    search, number, short = Search(divisors(each)), 0, -1
    limit = None if _has_gpu() else memory_share(peers.local_world_size)
    if peers.first:
        print(f"micro batch: looking for the largest of {', '.join(map(str, search.candidates))} that fits", flush=True)
    while round_ := search.next_round():
        accumulation = min(2, each // round_[0])
        fitted, rank = tries.take(number, round_, accumulation, settings.words, run, talk, limit)
        search, number, short = search.after(round_, fitted), number + 1, rank if rank >= 0 else short
        if search.fails == search.candidates[0]:
            raise _nothing_fits(rank, length, run)
    if peers.first:
        for place in places:
            files.write_json(place, {"micro_batch": search.fits, "for": key})
        because = f"{search.fails} runs out of memory on rank {short}" if search.fails else "the whole step in one pass"
        took = f"{number} round{'s' if number > 1 else ''}, {time.monotonic() - started:.0f} s"
        print(f"micro batch: {search.fits}; {because} ({took}; kept in {places[1]})", flush=True)
    talk.gather("end", True)  # rank 0 may be the one that keeps the store: it stays until all have read
    return search.fits


def _nothing_fits(rank: int, length: int, run: RunFolder) -> JobError:
    return JobError(
        f"one sequence of {length} tokens does not fit into memory (rank {rank})",
        f"model, optimizer and activations need more than there is; the log is below {run.attempt / 'probe'}",
        "--activation_checkpointing true, a shorter length, --deepspeed zero3 or zero3-offload, or more GPUs",
    )


def remembered(places: Sequence[Path], key: dict[str, Any]) -> int | None:
    """Return the answer that was written for exactly this key; the run's own counts before the shared one."""
    for place in places:
        try:
            kept = json.loads(place.read_text(encoding="utf-8"))
            if kept["for"] == json.loads(json.dumps(key)):
                return int(kept["micro_batch"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _key(settings: Settings, peers: Processes, each: int, length: int) -> dict[str, Any]:
    """Everything that the answer hangs on, as JSON."""
    chosen = {name: str(settings.get(name)) for name in SETTINGS if settings.get(name) is not None}
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "script": Path(sys.argv[0]).name,
        "settings": chosen,
        "deepspeed": _sum(path) if (path := _deepspeed_file(settings)) else None,
        "model_config": _sum(Path(str(settings.get("model_name_or_path") or "")) / "config.json"),
        "device": _device(),
        "world_size": peers.world_size,
        "processes_per_node": peers.local_world_size,
        "sequences_per_process": each,
        "length": length,
        "versions": versions,
    }


def _deepspeed_file(settings: Settings) -> Path | None:
    name = settings.get("deepspeed")
    return None if not name or str(name).lower() == "none" else deepspeed_config.resolve(str(name))


def _sum(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _device() -> dict[str, Any]:
    import torch

    if _has_gpu():
        properties = torch.cuda.get_device_properties(0)
        return {"name": properties.name, "memory_bytes": properties.total_memory}
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    group = host_memory.control_group()
    return {"name": "cpu", "limits": limits, "memory_bytes": group[0] if group else host_memory.total_bytes()}


def memory_share(local_world_size: int) -> int:
    """Return bytes of resident memory that one of this node's processes may take where there is no GPU."""
    free, group = host_memory.available_bytes(), host_memory.control_group()
    return int(SHARE * min(free, group[0] if group else free)) // local_world_size
