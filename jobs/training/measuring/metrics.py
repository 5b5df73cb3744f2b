"""What a person looks at while a job trains: metrics.jsonl and one plain progress line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training.processes import Processes
from training.run_folder import RunFolder

LINE_SECONDS = 1.0  # no more than one progress line in this time


@dataclass
class TokenCounter:
    """Tokens that this process has trained on since the last reading; the trainer adds to it.

    The count may lie on the GPU: it is brought over only when read, so that adding never waits for the device.
    """

    count: Any = 0

    def take(self) -> int:
        taken, self.count = int(self.count), 0
        return taken


class Metrics(TrainerCallback):
    """Writes one JSON object per log step, on rank 0, and prints the progress.

    Keys: step, total_steps (of the whole run), loss (mean since the last entry), grad_norm, learning_rate, tokens (this
    entry, all processes), total_tokens, tokens_per_second (all processes), tokens_per_second_per_process, memory_bytes
    (peak: of the GPU of rank 0, else of its process), seconds (training time of this attempt), attempt, time (Unix).
    """

    def __init__(self, run: RunFolder, processes: Processes, counter: TokenCounter) -> None:
        self.run, self.processes, self.counter = run, processes, counter
        self.started = self.last_time = self.last_line = 0.0
        self.first_step = self.last_step = self.total_tokens = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.started = self.last_time = time.monotonic()
        self.first_step = self.last_step = state.global_step
        before = [entry for entry in read(self.run.metrics) if entry["step"] <= state.global_step]
        self.total_tokens = before[-1]["total_tokens"] if before else 0

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not logs or "loss" not in logs or state.global_step <= self.last_step:
            self._other(logs or {}, state)
            return
        tokens = total(self.counter.take(), self.processes)
        now = time.monotonic()
        rate = tokens / max(now - self.last_time, 1e-9)
        self.total_tokens += tokens
        entry = {
            "step": state.global_step,
            "total_steps": state.max_steps,
            "loss": logs["loss"],
            "grad_norm": logs.get("grad_norm"),
            "learning_rate": logs.get("learning_rate"),
            "tokens": tokens,
            "total_tokens": self.total_tokens,
            "tokens_per_second": round(rate, 1),
            "tokens_per_second_per_process": round(rate / self.processes.world_size, 1),
            "memory_bytes": peak_memory(),
            "seconds": round(now - self.started, 3),
            "attempt": self.run.attempt_number,
            "time": round(time.time(), 3),
        }
        self.last_time, self.last_step = now, state.global_step
        if self.processes.first:
            append(self.run.metrics, entry)
            self._line(entry, state, now, bool(control.should_training_stop))

    def _line(self, entry: dict[str, Any], state: TrainerState, now: float, ending: bool) -> None:
        last = ending or state.global_step >= state.max_steps
        if not last and now - self.last_line < LINE_SECONDS:
            return
        self.last_line = now
        done = state.global_step - self.first_step
        left = (state.max_steps - state.global_step) * (now - self.started) / max(done, 1)
        print(progress_line(entry, state.max_steps, left), flush=True)

    def _other(self, logs: dict[str, float], state: TrainerState) -> None:
        """Keep what an evaluation logs; the closing summary of transformers' Trainer says nothing new."""
        found = {name: value for name, value in logs.items() if name.startswith("eval_")}
        if found and self.processes.first:
            append(self.run.metrics, {"step": state.global_step, "attempt": self.run.attempt_number, **found})
            print(
                f"step {state.global_step}/{state.max_steps} eval_loss {found.get('eval_loss', float('nan')):.4f}",
                flush=True,
            )


def progress_line(entry: dict[str, Any], max_steps: int, seconds_left: float) -> str:
    """Return e.g. `step 30/60 loss 5.1234 1200 tok/s eta 0:21`: no cursor tricks, so that a log file stays readable."""
    width = len(str(max_steps))
    minutes, seconds = divmod(round(seconds_left), 60)
    eta = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"
    step, rate = f"step {entry['step']:>{width}}/{max_steps}", f"{entry['tokens_per_second']:.0f} tok/s"
    return f"{step} loss {entry['loss']:.4f} {rate} eta {eta}"


def append(path: Path, entry: dict[str, Any]) -> None:
    """Add one line in one write, so that a reader never sees half of it."""
    line = json.dumps(entry) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the training entries in the order of their steps; of a step taken twice, the later entry counts.

    A line cut by a full disk or a killed job is passed over.
    """
    by_step: dict[int, dict[str, Any]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if "loss" in entry:
            by_step[entry["step"]] = entry
    return [by_step[step] for step in sorted(by_step)]


def summarise(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return steps, first_loss, last_loss, tokens_per_second and seconds of training, over all attempts."""
    if not entries:
        return {
            "steps": 0,
            "first_loss": None,
            "last_loss": None,
            "tokens_per_second": None,
            "seconds": 0.0,
            "tokens": 0,
        }
    seconds = sum(entry["tokens"] / entry["tokens_per_second"] for entry in entries if entry["tokens_per_second"])
    tokens = sum(entry["tokens"] for entry in entries)
    return {
        "steps": entries[-1]["step"],
        "first_loss": entries[0]["loss"],
        "last_loss": entries[-1]["loss"],
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1) if seconds else None,
        "seconds": round(seconds, 3),
        "attempts": max(entry["attempt"] for entry in entries),
    }


def total(mine: int, processes: Processes) -> int:
    """Return the sum over all ranks. A collective: every rank calls it."""
    if processes.world_size == 1:
        return mine
    import torch
    import torch.distributed

    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    count = torch.tensor([mine], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(count)
    return int(count.item())


def peak_memory() -> int:
    """Return the peak in bytes: what torch has allocated on the GPU, or what this process has held in memory."""
    import resource

    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
