"""The child's side of `--micro_batch auto`: a few training steps with one size after another.

Sizes are doubled. After each one the ranks agree on the memory that it took. A size that would need more than 92% of
the memory, as the two sizes before it tell, is not tried.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training import errors, files
from training.errors import JobError
from training.processes import die_with_parent
from training.run import PROBE
from training.settings import Settings

ANSWER = "fits"  # the file with the largest size that fits, in the child's folder of the attempt
STEPS = 2  # of each size: the first makes the optimizer's state, the second has it beside gradients and activations
SHARE = 0.92  # of the memory: the rest is for fragmentation and for rows that need a little more
OUT_OF_MEMORY = 86  # exit code of a child
SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc", "status_alloc_failed")


def settle(settings: Settings) -> None:
    """Set the first size, and turn off everything that a run keeps."""
    die_with_parent()  # this process would keep the GPU's memory otherwise
    order = json.loads(os.environ[PROBE])
    quiet = {
        "micro_batch": None, "per_device_train_batch_size": order["sizes"][0], "global_batch_size": None,
        "gradient_accumulation_steps": order["accumulation"], "max_steps": STEPS * len(order["sizes"]),
        "output_dir": str(Path(os.environ["RUNNER_ATTEMPT"]) / "output"), "resume_from_checkpoint": "false",
        "save_strategy": "no", "eval_strategy": "no", "load_best_model_at_end": False, "report_to": ["none"],
        "push_to_hub": False, "do_eval": False,
    }  # fmt: skip
    for name, value in quiet.items():
        if name in settings.values:
            settings.derive(name, value, "probe")


def probe(trainer: Any, length: int) -> None:
    """Train a few steps with each size, and write what fits. Leaves with OUT_OF_MEMORY if one does not."""
    import torch
    from transformers import TrainerCallback

    order = json.loads(os.environ[PROBE])
    search = Search(order["sizes"])
    collate, training_step = trainer.data_collator, trainer.training_step
    row = full_length(next(iter(trainer.train_dataset)), length)

    def full_step(model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        return training_step(model, collate([dict(row) for _ in range(search.size)]), *arguments, **named)

    class AfterStep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if state.global_step % STEPS == 0:
                own = torch.tensor([_memory(order["processes_per_node"])], dtype=torch.float64, device=args.device)
                everyone = trainer.accelerator.gather(own)
                control.should_training_stop = search.done(int(everyone[:, 0].max()), int(everyone[:, 1].min()))

    trainer.training_step = full_step
    trainer.add_callback(AfterStep())
    try:
        trainer.train()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        out_of_memory(search, error)
    _write(search.size)


def out_of_memory(search: Search, error: BaseException) -> None:
    """Write what fits and end this process; its parent tells the other ranks'."""
    print(f"micro batch {search.size}: {str(error) or 'MemoryError'}", flush=True)
    _write(max(search.used, default=0))
    errors.leave(OUT_OF_MEMORY)


def _write(fits: int) -> None:
    files.write_text(Path(os.environ["RUNNER_ATTEMPT"]) / ANSWER, str(fits))


class Search:
    """The sizes that are tried, one after another, and the memory that each took."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes, self.size = list(sizes), sizes[0]
        self.used: dict[int, int] = {}  # bytes by size, the most of any rank

    def done(self, used_bytes: int, limit_bytes: int) -> bool:
        """Note what a size took; choose the next one, at most twice as large, or return True if none should fit."""
        self.used[self.size] = used_bytes
        left = [size for size in self.sizes if size > self.size]
        if len(self.used) > 1:
            (before, less), (last, more) = sorted(self.used.items())[-2:]
            each = max(0, more - less) / (last - before)
            left = [size for size in left if more + each * (size - last) <= limit_bytes]
        if left:
            self.size = max((size for size in left if size <= 2 * self.size), default=left[0])
        return not left


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on a GPU or on the host; a library that gives up is not that."""
    return isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in SIGNS)


def full_length(row: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return a row of `length` tokens, all of them to be learned: memory does not depend on which they are."""
    tokens = list(row.get("input_ids", ()))
    if not tokens:
        columns = f"its columns are {', '.join(map(str, row))}"
        raise JobError(
            "--micro_batch auto found no tokens in the first row of the data", columns, "--micro_batch NUMBER"
        )
    full = (tokens * -(-length // len(tokens)))[:length]
    return {"input_ids": full, "labels": full}


def _memory(processes_per_node: int) -> tuple[int, int]:
    """Return the most bytes held since the last call, and what may be held: of the GPU, or of the host's share."""
    import torch

    if not torch.cuda.is_available():
        import resource

        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        (free,) = re.findall(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
        return held, int(SHARE * (held + int(free) * 1024 / processes_per_node))
    used, (free_bytes, total) = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()
    others = total - free_bytes - torch.cuda.memory_reserved()  # the context, NCCL, other programs
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return used, int(SHARE * (total - others))
