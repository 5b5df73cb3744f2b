"""The child's side of `--micro_batch auto`: real optimizer steps on full sequences, one micro batch after another."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from training import errors
from training.errors import JobError
from training.settings import Settings

VARIABLE = "RUNNER_PROBE"  # names the file in which a child finds what to try, and writes what has fitted
OUT_OF_MEMORY = 86  # exit code
STEPS = 2  # the first makes the optimizer's states, the second has them beside activations and gradients
SIGNS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "memoryerror",
    "cublas_status_alloc",
)


def probing() -> bool:
    """True in a process that was started to try micro batches only."""
    return VARIABLE in os.environ


def settle(settings: Settings) -> None:
    """Give a child its numbers, and keep it from writing anything that a run keeps."""
    _die_with_parent()
    order = json.loads(Path(os.environ[VARIABLE]).read_text(encoding="utf-8"))
    source = "probe"
    settings.derive("micro_batch", str(order["candidates"][0]), source)
    settings.derive("per_device_train_batch_size", order["candidates"][0], source)
    settings.derive("gradient_accumulation_steps", order["accumulation"], source)
    settings.derive("global_batch_size", None, source)
    quiet = {
        "output_dir": order["folder"],
        "resume_from_checkpoint": "false",
        "save_strategy": "no",
        "eval_strategy": "no",
        "load_best_model_at_end": False,
        "report_to": ["none"],
        "push_to_hub": False,
        "save_on_each_node": False,
        "max_steps": STEPS * len(order["candidates"]),
        "do_eval": False,
    }
    for name, value in quiet.items():
        if name in settings.values:
            settings.derive(name, value, source)


def probe(trainer: Any, length: int) -> int:
    """Take the tries, note each that fits, and return 0; leave with OUT_OF_MEMORY at the first that does not.

    `length`: tokens of the longest sequence that the training may meet.
    """
    path = Path(os.environ[VARIABLE])
    order = json.loads(path.read_text(encoding="utf-8"))
    candidates: list[int] = order["candidates"]
    batches = _Batches(trainer, candidates, order["accumulation"], length)
    trainer.get_train_dataloader = batches.loader
    trainer.add_callback(_notes(path, candidates))
    try:
        trainer.train()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(str(error) or type(error).__name__):
            raise
        print(f"probe: {str(error).splitlines()[0] if str(error) else 'MemoryError'}", flush=True)
        errors.leave(OUT_OF_MEMORY)
    return 0


def is_out_of_memory(text: str) -> bool:
    lowered = text.lower()
    return any(sign in lowered for sign in SIGNS)


def peak_bytes() -> int:
    """Return the most memory that this process has held: of the GPU where there is one, else resident."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_reserved())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _Batches:
    """Micro batches of each size in turn, from the first rows of the data, drawn out to the full length."""

    def __init__(self, trainer: Any, candidates: list[int], accumulation: int, length: int) -> None:
        # sft's trainer leaves padding out around the collator: what it trains on is what is tried.
        self.collate = getattr(trainer, "without_padding", trainer.data_collator)
        first = next(iter(trainer.train_dataset))
        self.row = full_length(first, length)
        self.sizes = [size for size in candidates for _ in range(STEPS * accumulation)]

    def loader(self) -> Any:
        from torch.utils.data import DataLoader, IterableDataset

        outer = self

        class Rows(IterableDataset):  # type: ignore[type-arg]
            def __iter__(self) -> Iterator[Any]:
                for size in outer.sizes:
                    yield outer.collate([dict(outer.row) for _ in range(size)])

            def __len__(self) -> int:
                return len(outer.sizes)

        return DataLoader(Rows(), batch_size=None)


def full_length(row: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return the row with everything that is as long as its tokens repeated or cut to `length`; words left out."""
    tokens = row.get("input_ids")
    if tokens is None or len(tokens) == 0:
        raise JobError(
            "--micro_batch auto found no tokens in the first row of the data",
            f"its columns are {', '.join(map(str, row))}",
            "--micro_batch NUMBER",
        )
    drawn: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, str) or value is None or not hasattr(value, "__len__"):
            continue
        if name == "seq_lengths":
            drawn[name] = [length]
        elif name == "position_ids":
            drawn[name] = list(range(length))
        elif len(value) == len(tokens):
            drawn[name] = _repeated(value, length)
    return drawn


def _repeated(value: Any, length: int) -> Any:
    times = -(-length // len(value))
    if hasattr(value, "repeat"):  # a tensor, or an array of numpy (which repeats item by item: the order is no matter)
        return value.repeat(times)[:length]
    return (list(value) * times)[:length]


def _notes(path: Path, candidates: list[int]) -> Any:
    from transformers import TrainerCallback

    class Notes(TrainerCallback):
        """Writes a line for each size once its steps are done, and frees what they held."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            done, rest = divmod(state.global_step, STEPS)
            if rest or done > len(candidates):
                return
            line = {"micro_batch": candidates[done - 1], "peak_bytes": peak_bytes()}
            with path.with_suffix(".fitted").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            _free()

    return Notes()


def _free() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _die_with_parent() -> None:
    """Ask the kernel to end this process with the one that started it: it would keep the GPU's memory otherwise."""
    import contextlib
    import ctypes
    import signal

    parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(parent_death_signal, int(signal.SIGKILL))
