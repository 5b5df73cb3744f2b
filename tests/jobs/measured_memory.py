"""Bytes of tensors that one process holds in a real training step, by phase.

    torchrun --nproc-per-node 2 tests/jobs/measured_memory.py CASES.json RESULTS.json

CASES.json: a list of {"config": {...config.json of a model...}, "deepspeed": {...}, "micro_batch": 2, "length": 128,
"accumulation": 1, "bf16": false, "checkpointing": false, "attention": "sdpa", "lora_r": 0}. On a GPU it is
`max_memory_allocated`; on a CPU the same sum, counted by watching every tensor that is made and freed.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEPS = 3  # DeepSpeed's third stage learns in the first what it keeps from the second on


def main(argv: Sequence[str]) -> int:
    cases = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "jobs"))
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from training import deepspeed as deepspeed_config

        deepspeed_config.skip_unbuilt_shm_comm()
    found = [measure(case) for case in cases]
    if int(os.environ.get("RANK", "0")) == 0:
        Path(argv[1]).write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()
    return 0


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Return the peak bytes of each phase, over what lived before, and the count of weights."""
    import torch

    meter = Gpu() if torch.cuda.is_available() else counting()
    phases: dict[str, int] = {}

    def read(phase: str) -> None:
        phases[phase] = max(phases.get(phase, 0), meter.peak_since_the_last())

    with meter:
        trainer = make_trainer(case, read)
        trainer.train()
    return {"phases": phases, "parameters": trainer.counted}


class Gpu:
    """What the caching allocator has given out."""

    def __enter__(self) -> None:
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()
        self.before = torch.cuda.memory_allocated()

    def __exit__(self, *error: object) -> None:
        pass

    def peak_since_the_last(self) -> int:
        import torch

        peak = torch.cuda.max_memory_allocated() - self.before
        torch.cuda.reset_peak_memory_stats()
        return int(peak)


def counting() -> Any:
    """Return a context in which `now` and `peak` are the bytes of all storages that live."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    class Counting(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.now = self.peak = 0
            self.known: dict[int, int] = {}

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            import torch

            for tensor in tree_iter(made):
                if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                    self.note(tensor.untyped_storage())
            return made

        def note(self, storage: Any) -> None:
            key = storage._cdata
            if key in self.known:
                return
            size = storage.nbytes()
            self.known[key] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.forget, key)

        def peak_since_the_last(self) -> int:
            peak, self.peak = self.peak, self.now
            return peak

        def forget(self, key: int) -> None:
            self.now -= self.known.pop(key, 0)

    return Counting()


def make_trainer(case: dict[str, Any], read: Any) -> Any:
    """Return transformers' Trainer on random tokens; `read(phase)` is called when a phase ends."""
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    transformers.logging.set_verbosity_error()
    arguments = TrainingArguments(
        output_dir=os.environ.get("TMPDIR", "/tmp") + "/measured-memory",
        per_device_train_batch_size=case["micro_batch"],
        gradient_accumulation_steps=case.get("accumulation", 1),
        max_steps=STEPS,
        bf16=case.get("bf16", False),
        use_cpu=not torch.cuda.is_available(),
        deepspeed=case["deepspeed"],
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **checkpointing(TrainingArguments, case.get("checkpointing", False)),
    )
    from deepspeed.comm import init_distributed

    init_distributed(auto_mpi_discovery=False, verbose=False)
    shape = dict(case["config"])
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    config._attn_implementation = case.get("attention", "sdpa")
    model = AutoModelForCausalLM.from_config(config, attn_implementation=case.get("attention", "sdpa"))
    if case.get("lora_r"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=case["lora_r"], target_modules="all-linear", task_type="CAUSAL_LM"))
        model.enable_input_require_grads()
    rows = [{"input_ids": torch.randint(0, config.vocab_size, (case["length"],))} for _ in range(64)]
    for row in rows:
        row["labels"] = row["input_ids"]

    class Phases(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            read("start")
            watch(trainer.model_wrapped, read)

    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Phases()])
    trainer.counted = sum(getattr(weight, "ds_numel", weight.numel()) for weight in model.parameters())
    return trainer


def watch(engine: Any, read: Any) -> None:
    """Call `read` before and after DeepSpeed's backward pass and after its step."""
    backward, step = engine.backward, engine.step

    def watched_backward(*args: Any, **kwargs: Any) -> Any:
        read("forward")
        result = backward(*args, **kwargs)
        read("backward")
        return result

    def watched_step(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        read("step")
        return result

    engine.backward, engine.step = watched_backward, watched_step


def checkpointing(arguments: Any, wanted: bool) -> dict[str, Any]:
    """transformers 5.23 renamed gradient_checkpointing."""
    import dataclasses

    names = {each.name for each in dataclasses.fields(arguments)}
    return {"activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing": wanted}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
