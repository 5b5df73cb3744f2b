"""The child's side of `--micro_batch auto`: a few training steps with one size after another."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training import errors, files
from training.errors import JobError
from training.settings import Settings

VARIABLE = "RUNNER_PROBE"  # in a child: the file that says what to try
STEPS = 2  # of each size: the first makes the optimizer's state, the second has it beside gradients and activations
SHARE = 0.92  # of the memory: the rest is for fragmentation and for rows that need a little more
GRACE_SECONDS = 2.0  # for a rank that has not yet written the last size that all had finished
OUT_OF_MEMORY = 86  # exit code of a child
SHORT = "micro_batch/short"  # key in the store of the process group: the rank that ran out of memory


@dataclass(frozen=True)
class Outcome:
    """What a round of tries has found, the same on all ranks."""

    fits: int = 0
    fails: int | None = None  # ran out of memory
    rank: int = -1  # that ran out first


def probing() -> bool:
    """Return whether this process was started to try micro batches only."""
    return VARIABLE in os.environ


def settle(settings: Settings) -> None:
    """Set the first size, and turn off everything that a run keeps."""
    import ctypes
    import signal

    die_with_parent = 1  # PR_SET_PDEATHSIG of prctl(2): this process would keep the GPU's memory otherwise
    ctypes.CDLL(None).prctl(die_with_parent, int(signal.SIGKILL))
    order = json.loads(Path(os.environ[VARIABLE]).read_text(encoding="utf-8"))
    quiet = {
        "micro_batch": None, "per_device_train_batch_size": order["sizes"][0], "global_batch_size": None,
        "gradient_accumulation_steps": order["accumulation"], "max_steps": STEPS * len(order["sizes"]),
        "output_dir": str(Path(os.environ["RUNNER_ATTEMPT"]) / "output"), "resume_from_checkpoint": "false",
        "save_strategy": "no", "eval_strategy": "no", "load_best_model_at_end": False, "report_to": ["none"],
        "push_to_hub": False, "save_on_each_node": False, "do_eval": False,
    }  # fmt: skip
    for name, value in quiet.items():
        if name in settings.values:
            settings.derive(name, value, "probe")


def probe(trainer: Any, length: int) -> int:
    """Train a few steps with each size, write what fits, and return 0. Leaves with OUT_OF_MEMORY where one does not."""
    import torch
    from transformers import TrainerCallback

    order_file = Path(os.environ[VARIABLE])
    order = json.loads(order_file.read_text(encoding="utf-8"))
    search = Search(order["sizes"], order_file.with_suffix(".outcome"))
    collate = trainer.data_collator
    row = full_length(next(iter(trainer.train_dataset)), length)
    training_step = trainer.training_step

    def full_step(model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        return training_step(model, collate([dict(row) for _ in range(search.size)]), *arguments, **named)

    class AfterStep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if state.global_step % STEPS == 0:
                own = torch.tensor([_memory(order["memory_bytes"])], dtype=torch.float64, device=args.device)
                everyone = trainer.accelerator.gather(own)
                control.should_training_stop = search.done(int(everyone[:, 0].max()), int(everyone[:, 1].min()))

    trainer.training_step = full_step
    trainer.add_callback(AfterStep())
    with search.leaving_together():
        trainer.train()
    return 0


class Search:
    """The sizes that are tried, one after another, and what is known of them."""

    def __init__(self, sizes: Sequence[int], result: Path) -> None:
        self.sizes, self.result, self.size = list(sizes), result, sizes[0]
        self.used: dict[int, int] = {}  # bytes by size, the most of any rank

    def done(self, used_bytes: int, limit_bytes: int) -> bool:
        """Note the memory of the fullest rank; continue with the next size, or return True after the last one."""
        self.used[self.size] = used_bytes
        self.write(Outcome(self.size))
        following = self.following(limit_bytes)
        self.size = following or self.size
        return following is None

    def following(self, limit_bytes: int) -> int | None:
        """Return the next size that should fit: at most the double, or the next one where that is more."""
        left = [size for size in self.sizes if size > self.size]
        if len(self.used) > 1:
            (before, less), (last, more) = sorted(self.used.items())[-2:]
            each = max(0, more - less) / (last - before)
            left = [size for size in left if more + each * (size - last) <= limit_bytes]
        return max((size for size in left if size <= 2 * self.size), default=left[0] if left else None)

    def write(self, outcome: Outcome) -> None:
        files.write_json(self.result, asdict(outcome))

    @contextlib.contextmanager
    def leaving_together(self) -> Any:
        """End this process with OUT_OF_MEMORY when it, or any other rank, runs out of memory."""
        import torch.distributed

        group = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        store = torch.distributed.distributed_c10d._get_default_store() if group else None
        if store is not None:
            threading.Thread(target=self._watch, args=(store,), daemon=True).start()
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                rank = torch.distributed.get_rank() if group else 0
                print(f"rank {rank}, micro batch {self.size}: {str(error) or 'MemoryError'}", flush=True)
                if store is not None:
                    store.set(SHORT, str(rank))
                self._leave(rank)
            time.sleep(2 * GRACE_SECONDS if group else 0)  # a collective breaks where another rank has just left
            raise

    def _watch(self, store: Any) -> None:
        while not store.check([SHORT]):
            time.sleep(0.25)
        self._leave(int(store.get(SHORT)))

    def _leave(self, rank: int) -> None:
        time.sleep(GRACE_SECONDS)  # others may still be writing the size before
        self.write(Outcome(max(self.used, default=0), self.size, rank))
        if rank == int(os.environ.get("RANK", "0")) or os.environ.get("RANK", "0") == "0":
            time.sleep(GRACE_SECONDS)  # this rank may keep the store
        errors.leave(OUT_OF_MEMORY)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on a GPU or on the host; a library that gives up is not that."""
    from accelerate.utils.memory import should_reduce_batch_size

    words = str(error).lower()
    signs = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc", "status_alloc_failed")
    known = isinstance(error, Exception) and should_reduce_batch_size(error)
    return isinstance(error, MemoryError) or known or any(sign in words for sign in signs)


def full_length(row: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return the row with everything that is as long as its tokens repeated or cut to `length`; text left out."""
    tokens = row.get("input_ids")
    if tokens is None or len(tokens) == 0:
        raise JobError(
            "--micro_batch auto found no tokens in the first row of the data",
            f"its columns are {', '.join(map(str, row))}",
            "--micro_batch NUMBER",
        )
    full: dict[str, Any] = {}
    for name, value in row.items():
        if name == "seq_lengths":
            full[name] = [length]
        elif name == "position_ids":
            full[name] = list(range(length))
        elif hasattr(value, "__len__") and not isinstance(value, str) and len(value) == len(tokens):
            times = -(-length // len(value))
            full[name] = (value.repeat(times) if hasattr(value, "repeat") else list(value) * times)[:length]
    return full


def _memory(share_bytes: int) -> tuple[int, int]:
    """Return the most bytes held since the last call, and what may be held: of the GPU, or of the host's share."""
    import torch

    if not torch.cuda.is_available():
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, int(SHARE * share_bytes)
    used, (free, total) = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()  # the context, NCCL, other programs
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return used, int(SHARE * (total - others))
