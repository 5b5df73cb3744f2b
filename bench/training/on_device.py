"""One way of one case, in a process of its own: `python -m bench.training.on_device WAY ORDER.json`.

WAY: `run_clm` (run_clm.py), `trl` (TRL's own script), `clm` and `sft` (ours). The arguments of the script come from the
order; the figures from around `Trainer.training_step`. They are written to result.json in the order's folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Meter:
    """Wall seconds of each step with the device waited for, its loss, its tokens, and the peak of memory.

    The steps after the first `plain` ones are watched by the profiler, and are not among the figures.
    """

    def __init__(self, plain: int, profiled: int, file: Path) -> None:
        self.plain, self.profiled, self.file = plain, profiled, file
        self.profiler: Any = None
        self.watched = 0  # steps that ran under the profiler
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.tokens: list[int] = []
        self.micro: list[Any] = []
        self.inputs: list[Any] = []
        self.memory_gib = 0.0
        self.made = time.perf_counter()
        self.start_seconds = 0.0  # before the first step: imports, model, data, and the search of `--micro_batch auto`

    def install(self) -> None:
        import transformers
        from transformers import trainer

        meter, stock = self, transformers.Trainer.training_step

        def training_step(self: Any, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            meter.inputs.append(real_tokens(inputs))
            loss = stock(self, model, inputs, *more, **named)
            meter.micro.append(loss.detach())
            return loss

        class Clock(transformers.TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                meter.begin()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                meter.end()

            def on_train_end(self, *_: Any, **__: Any) -> None:
                meter.leave()

        transformers.Trainer.training_step = training_step
        trainer.DEFAULT_CALLBACKS.append(Clock)

    def begin(self) -> None:
        if self.profiled and len(self.seconds) == self.plain and self.profiler is None:
            from torch.profiler import ProfilerActivity, profile

            self.profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda() else [])])
            self.profiler.__enter__()
        wait()
        self.began = time.perf_counter()
        self.start_seconds = self.start_seconds or self.began - self.made

    def end(self) -> None:
        wait()
        if len(self.seconds) < self.plain:
            self.seconds.append(time.perf_counter() - self.began)
            self.losses.append(float(sum(self.micro)))
            self.tokens.append(int(sum(self.inputs)))
            if cuda():
                import torch

                self.memory_gib = torch.cuda.max_memory_allocated() / 2**30
        elif self.profiler is not None and self.watched < self.profiled:
            self.watched += 1
            if self.watched == self.profiled:  # not later: saving the model copies all weights from the GPU
                self.profiler.__exit__(None, None, None)
        self.micro, self.inputs = [], []

    def leave(self) -> None:
        """Write the result and end the process: writing the final model takes up to 30 s, and is not measured."""
        self.file.write_text(json.dumps(self.result()))
        sys.stdout.flush()
        os._exit(0)

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = {"seconds": self.seconds, "losses": self.losses, "tokens": self.tokens}
        found["start_seconds"] = self.start_seconds
        if cuda():
            found["memory_gib"] = self.memory_gib
        if self.profiler is not None and self.watched == self.profiled:
            found["profile"] = grouped(self.profiler, self.profiled)
        return found


def real_tokens(inputs: Any) -> Any:
    """Return the tokens of a batch without padding, on the device: reading them here would make it wait."""
    if "real_tokens" in inputs:
        return inputs["real_tokens"]
    mask = inputs.get("attention_mask")
    return inputs["input_ids"].numel() if mask is None else mask.sum()


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


def grouped(profiler: Any, steps: int) -> dict[str, float]:
    """Return milliseconds per step by kind: of the GPU's kernels, or of the CPU's operators where there is none."""
    found: dict[str, float] = {}
    for event in profiler.key_averages():
        own = event.self_device_time_total if cuda() else event.self_cpu_time_total
        if cuda() and "cuda" not in str(event.device_type).lower():
            continue
        name = event.key.lower()
        group = next((group for group, words in GROUPS if any(word in name for word in words)), "other")
        found[group] = found.get(group, 0.0) + own / 1000 / steps
    return found


def main(argv: list[str]) -> None:
    """Run one way and write what was measured."""
    way, order = argv[0], json.loads(Path(argv[1]).read_text())
    words, run = order["arguments"], order["run"]
    meter = Meter(order["plain"], order["profiled"], Path(run, "result.json"))
    meter.install()
    sys.argv = [str(ROOT / "jobs" / f"{way}.py"), *words]  # `--micro_batch auto` starts it again
    if way == "run_clm":
        from bench.training import run_clm

        run_clm.main([*words, f"--output_dir={run}"])
    elif way == "trl":
        from trl.scripts import sft as stock

        sys.argv.append(f"--output_dir={run}")
        stock.main(*stock.make_parser().parse_args_and_config(fail_with_unknown_args=False))
    else:
        os.environ.update(RUNNER_RUN=run, RUNNER_CACHE=order["cache"])
        sys.path.insert(0, str(ROOT / "jobs"))
        import_module(way).main(words)
    raise SystemExit(f"{way} ended without training")


if __name__ == "__main__":
    main(sys.argv[1:])
