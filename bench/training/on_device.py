"""One way of one case, in a process of its own: `python -m bench.training.on_device WAY CASE.json`; prints JSON.

WAY: `run_clm` (transformers' example, its train path typed again in this file), `trl` (TRL's own script), `clm` and
`sft` (ours). The arguments of the script come from the case; the figures from around `Trainer.training_step`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROFILED = 2  # steps that are watched when a profile is asked for, after the warm ones


class Meter:
    """Wall seconds of each step with the device waited for, its loss, and the peak of memory."""

    def __init__(self, warm: int, profile: bool) -> None:
        self.warm, self.profile, self.profiler = warm, profile, None
        self.seconds: list[float] = []
        self.losses: list[Any] = []
        self.micro: list[Any] = []

    def install(self) -> None:
        import transformers
        from transformers import trainer

        meter, stock = self, transformers.Trainer.training_step

        def training_step(self: Any, *arguments: Any, **named: Any) -> Any:
            loss = stock(self, *arguments, **named)
            meter.micro.append(loss.detach())
            return loss

        class Clock(transformers.TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                meter.begin()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                meter.end()

        transformers.Trainer.training_step = training_step
        trainer.DEFAULT_CALLBACKS.append(Clock)

    def begin(self) -> None:
        if self.profile and len(self.seconds) == self.warm:
            from torch.profiler import ProfilerActivity, profile

            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda() else [])]
            self.profiler = profile(activities=kinds)
            self.profiler.__enter__()
        wait()
        self.began = time.perf_counter()

    def end(self) -> None:
        wait()
        self.seconds.append(time.perf_counter() - self.began)
        self.losses.append(float(sum(self.micro)))
        self.micro = []
        if self.profiler is not None and len(self.seconds) == self.warm + PROFILED:
            self.profiler.__exit__(None, None, None)

    def result(self) -> dict[str, Any]:
        import torch

        found: dict[str, Any] = {"seconds": self.seconds, "losses": self.losses}
        if cuda():
            found["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if self.profiler is not None:
            found["profile"] = grouped(self.profiler)
        return found


def cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def wait() -> None:
    if cuda():
        import torch

        torch.cuda.synchronize()


GROUPS = (
    ("attention", ("flash", "fmha", "attention", "sdpa", "cudnn_generated")),
    ("matrix products", ("gemm", "cutlass", "xmma", "nvjet", "mm", "linear")),
    ("softmax and loss", ("softmax", "cross_entropy", "nll")),
    ("optimizer and clipping", ("multi_tensor", "adam", "foreach", "norm_kernel")),
    ("norms, gates, rotary, other elementwise", ("elementwise", "layer_norm", "rms", "triton", "vectorized")),
    ("reductions", ("reduce",)),
    ("copies", ("memcpy", "memset", "copy", "cat", "index", "gather", "scatter", "embedding")),
)


def grouped(profiler: Any) -> dict[str, float]:
    """Return milliseconds per step by kind: of the GPU's kernels, or of the CPU's operators where there is none."""
    found: dict[str, float] = {}
    for event in profiler.key_averages():
        own = event.self_device_time_total if cuda() else event.self_cpu_time_total
        if cuda() and "cuda" not in str(event.device_type).lower():
            continue
        name = event.key.lower()
        group = next((group for group, words in GROUPS if any(word in name for word in words)), "other")
        found[group] = found.get(group, 0.0) + own / 1000 / PROFILED
    return found


def run_clm(words: list[str]) -> None:
    """Train as transformers' examples/pytorch/language-modeling/run_clm.py does, by those of its arguments in use."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments
    from transformers import default_data_collator as collate

    parser = HfArgumentParser((TrainingArguments,))
    for name in ("model_name_or_path", "train_file", "dtype", "attn_implementation"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--block_size", type=int)
    config, other = parser.parse_args_into_dataclasses(words)
    tokenizer = AutoTokenizer.from_pretrained(other.model_name_or_path)
    loading = {"dtype": other.dtype, "attn_implementation": other.attn_implementation}
    chosen = {name: value for name, value in loading.items() if value}
    model = AutoModelForCausalLM.from_pretrained(other.model_name_or_path, **chosen)
    rows = load_dataset("json", data_files=other.train_file)["train"]
    ids = rows.map(lambda some: tokenizer(some["text"]), batched=True, remove_columns=rows.column_names)

    def group(some: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        size = other.block_size
        joined = {name: list(chain(*lists)) for name, lists in some.items()}
        total = len(joined["input_ids"]) // size * size
        out = {name: [values[i : i + size] for i in range(0, total, size)] for name, values in joined.items()}
        return {**out, "labels": [list(block) for block in out["input_ids"]]}

    blocks = ids.map(group, batched=True)
    Trainer(model, config, train_dataset=blocks, processing_class=tokenizer, data_collator=collate).train()


def main(argv: list[str]) -> None:
    """Run one way and print `RESULT {...}`."""
    way, case = argv[0], json.loads(Path(argv[1]).read_text())
    words, run = case["arguments"], case["run"]
    meter = Meter(case["warm"], case["profile"])
    meter.install()
    sys.argv = [f"{way}.py", *words]
    if way == "run_clm":
        run_clm([*words, f"--output_dir={run}"])
    elif way == "trl":
        from trl.scripts import sft as stock

        sys.argv.append(f"--output_dir={run}")
        stock.main(*stock.make_parser().parse_args_and_config(fail_with_unknown_args=False))
    else:
        os.environ.update(RUNNER_RUN=run, RUNNER_CACHE=case["cache"])
        sys.path.insert(0, str(ROOT / "jobs"))
        from importlib import import_module

        if import_module(way).main(words):
            raise SystemExit(f"{way} did not end well")
    print("RESULT " + json.dumps(meter.result()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
