"""What a person looks at while a job trains: metrics.jsonl and one plain progress line."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training import flops, trackers
from training.processes import Processes
from training.records import append, read
from training.run import RunFolder
from training.settings import Settings
from training.stretch import Stretch, Timed, gather, squared_lengths

LINE_SECONDS = 1.0  # no more than one progress line in this time
SLOW_DATA = 0.05  # the share of waiting for data from which on the progress line speaks of it


@dataclass
class TokenCounter:
    """Tokens that this process has trained on since the last reading; the trainer adds to it.

    The count may lie on the GPU: it is brought over only when read, so that adding never waits for the device.
    """

    count: Any = 0

    def take(self) -> int:
        taken, self.count = int(self.count), 0
        return taken


@dataclass
class Clock:
    """When what began, on this process (time.monotonic)."""

    started: float = 0.0
    entry: float = 0.0
    line: float = 0.0


@dataclass
class Progress:
    first_step: int = 0
    step: int = 0
    tokens: int = 0
    clock: Clock = field(default_factory=Clock)


class Metrics(TrainerCallback):
    """Writes one JSON object per log step, on rank 0, and prints the progress. `attach` it once the trainer exists.

    An entry: step, total_steps (of the whole run), loss (mean since the last entry), grad_norm, learning_rate, tokens
    (since the last entry, all processes), total_tokens, tokens_per_second (all processes; saving and evaluating left
    out), tokens_per_second_per_process, mfu (where a peak is known), memory_bytes (peak of the rank that needs most:
    of its GPU, else of its process), data_wait_seconds (of the rank that waited longest, since the last entry),
    evaluation_seconds (since the last entry, where there was one), step_seconds, seconds (of this attempt), attempt,
    time (Unix). Each save leaves an entry of its own, checkpoint_seconds in it (checkpoints/saving.py). Each attempt
    begins with a `header`, which names the formula of mfu, the peak and its source.
    """

    def __init__(self, run: RunFolder, processes: Processes, counter: TokenCounter) -> None:
        self.run, self.processes, self.counter = run, processes, counter
        self.stretch, self.progress = Stretch(), Progress()
        self.cost: flops.Cost | None = None
        self.peak: flops.Peak | None = None
        self.trackers: tuple[trackers.Tracker, ...] = ()
        self.saver_seconds: Callable[[], float] | None = None

    def attach(self, trainer: Any, settings: Settings) -> None:
        """Measure this trainer from here on: what it waits for, what it computes, and who is told of it."""
        self.peak = flops.choose_peak(settings.get("peak_flops"))
        self.cost = flops.of_model(trainer.model) if self.peak else None
        savers = [each for each in trainer.callback_handler.callbacks if hasattr(each, "take_seconds")]
        self.saver_seconds = savers[0].take_seconds if savers else None
        trainer.get_batch_samples = self._timed_batches(trainer.get_batch_samples)
        trainer.evaluate = self._timed(trainer.evaluate, "evaluation")
        if self.saver_seconds is None:
            trainer._save_checkpoint = self._timed(trainer._save_checkpoint, "checkpoint")
        trackers.replace_callbacks(trainer)
        if self.processes.first:
            self.trackers = trackers.make(settings, self.run)
            append(self.run.metrics, {"header": self._header()})

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        now = time.monotonic()
        before = [entry for entry in read(self.run.metrics) if entry["step"] <= state.global_step]
        tokens = before[-1]["total_tokens"] if before else 0
        self.progress = Progress(state.global_step, state.global_step, tokens, Clock(now, now))
        for tracker in self.trackers:
            tracker.start(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not logs or "loss" not in logs or state.global_step <= self.progress.step:
            self._other(logs or {}, state)
            return
        entry = self._entry(logs, state)
        if self.processes.first:
            append(self.run.metrics, entry)
            for tracker in self.trackers:
                tracker.write(state.global_step, {**logs, **entry})
            self._line(entry, state, bool(control.should_training_stop))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for tracker in self.trackers:
            tracker.close()

    def _entry(self, logs: dict[str, float], state: TrainerState) -> dict[str, Any]:
        """Return the entry of this step. A collective: every rank calls it."""
        stretch, self.stretch = self.stretch, Stretch()
        if self.saver_seconds is not None:
            stretch.checkpoint += self.saver_seconds()
        ranks = gather(self.counter.take(), stretch, self.processes)
        progress, now = self.progress, time.monotonic()
        clock = progress.clock
        # A rank that has saved for longer than the others is what all have waited for; rank 0 speaks for them.
        aside = stretch.checkpoint + stretch.evaluation
        seconds = max(now - clock.entry - aside, 1e-9)
        steps = state.global_step - progress.step
        progress.step, clock.entry = state.global_step, now
        progress.tokens += ranks.tokens
        rate = ranks.tokens / seconds
        entry = {
            "step": state.global_step,
            "total_steps": state.max_steps,
            "loss": logs["loss"],
            "grad_norm": logs.get("grad_norm"),
            "learning_rate": logs.get("learning_rate"),
            "tokens": ranks.tokens,
            "total_tokens": progress.tokens,
            "tokens_per_second": round(rate, 1),
            "tokens_per_second_per_process": round(rate / self.processes.world_size, 1),
            "memory_bytes": ranks.memory_bytes,
            "data_wait_seconds": round(ranks.data_wait, 4),
            "step_seconds": round(seconds / max(steps, 1), 4),
            "seconds": round(now - clock.started, 3),
            "attempt": self.run.attempt_number,
            "time": round(time.time(), 3),
        }
        if stretch.evaluation:
            entry["evaluation_seconds"] = round(stretch.evaluation, 3)
        if self.cost and self.peak:
            done = self.cost.flops(ranks.tokens, ranks.squared_lengths)
            entry["mfu"] = round(done / seconds / (self.peak.flops * self.processes.world_size), 5)
        return entry

    def _line(self, entry: dict[str, Any], state: TrainerState, ending: bool) -> None:
        clock, now = self.progress.clock, time.monotonic()
        last = ending or state.global_step >= state.max_steps
        if not last and now - clock.line < LINE_SECONDS:
            return
        clock.line = now
        done = state.global_step - self.progress.first_step
        left = (state.max_steps - state.global_step) * (now - clock.started) / max(done, 1)
        print(progress_line(entry, state.max_steps, left), flush=True)

    def _other(self, logs: dict[str, float], state: TrainerState) -> None:
        """Keep what an evaluation logs; the closing summary of transformers' Trainer says nothing new."""
        found = {name: value for name, value in logs.items() if name.startswith("eval_")}
        if not found or not self.processes.first:
            return
        place = {"step": state.global_step, "attempt": self.run.attempt_number, "time": round(time.time(), 3)}
        append(self.run.metrics, {**place, **found})
        for tracker in self.trackers:
            tracker.write(state.global_step, found)
        loss = found.get("eval_loss", float("nan"))
        print(f"step {state.global_step}/{state.max_steps} eval_loss {loss:.4f}", flush=True)

    def _header(self) -> dict[str, Any]:
        """Return what holds for the whole attempt."""
        import torch

        gpu = torch.cuda.is_available()
        header: dict[str, Any] = {
            "attempt": self.run.attempt_number,
            "time": round(time.time(), 3),
            "processes": self.processes.world_size,
            "device": torch.cuda.get_device_name() if gpu else "cpu",
            "torch": torch.__version__,
            "trackers": [tracker.name for tracker in self.trackers],
        }
        if gpu:
            header["device_memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
        if self.peak and self.cost:
            header["mfu"] = {
                "formula": flops.FORMULA, "peak_flops": self.peak.flops, "peak_source": self.peak.source,
                "trained_weights": self.cost.trained, "frozen_weights": self.cost.frozen,
                "layers_times_width": self.cost.attention,
            }  # fmt: skip
            print(f"MFU against {self.peak.flops / 1e12:g} TFLOP/s per process ({self.peak.source})", flush=True)
        return header

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                setattr(self.stretch, name, getattr(self.stretch, name) + time.monotonic() - begun)

        return timed

    def _timed_batches(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Trainer.get_batch_samples: what `next` takes is waiting; what comes of it has lengths."""

        def timed(epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
            batches, count = function(Timed(epoch_iterator, self.stretch), *args, **kwargs)
            if self.cost is not None:
                for batch in batches:
                    self.stretch.squared_lengths += squared_lengths(batch)
            return batches, count

        return timed


def progress_line(entry: dict[str, Any], max_steps: int, seconds_left: float) -> str:
    """Return e.g. `step 30/60 loss 5.1234 1200 tok/s eta 0:21`: no cursor tricks, so that a log file stays readable.

    The share of the peak and the memory stand there where they are known, waiting for data where it costs something.
    """
    width = len(str(max_steps))
    minutes, seconds = divmod(round(seconds_left), 60)
    eta = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"
    parts = [
        f"step {entry['step']:>{width}}/{max_steps}",
        f"loss {entry['loss']:.4f}",
        f"{entry['tokens_per_second']:.0f} tok/s",
    ]
    if entry.get("mfu") is not None:
        parts.append(f"MFU {entry['mfu']:.1%}")
    if entry.get("mfu") is not None and entry.get("memory_bytes"):
        parts.append(f"{entry['memory_bytes'] / 2**30:.1f} GiB")
    waited = entry.get("data_wait_seconds") or 0.0
    whole = entry["tokens"] / entry["tokens_per_second"] if waited and entry.get("tokens_per_second") else 0.0
    if whole and waited / whole >= SLOW_DATA:
        parts.append(f"waits {waited / whole:.0%} for data")
    return " ".join([*parts, f"eta {eta}"])
