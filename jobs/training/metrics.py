"""metrics.jsonl and one plain progress line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training import processes
from training.processes import Processes
from training.records import append, read
from training.run import RunFolder, note_time

if TYPE_CHECKING:
    from training import flops

LINE_SECONDS = 1.0  # between two progress lines at least
SLOW_DATA = 0.05  # from this share of the time on, the progress line reports waiting for data

END = object()  # of an iterator


@dataclass
class Stretch:
    """What this process has measured since the last entry. Counts may be tensors on the GPU, read only at the end."""

    tokens: Any = 0
    squared_lengths: Any = 0
    windowed_lengths: Any = 0
    data_wait: float = 0.0  # seconds, as are the others below
    checkpoint: float = 0.0
    evaluation: float = 0.0

    def waits(self) -> dict[str, float]:
        """Return how long the training stood still for saves and evaluations, for an entry."""
        waited = {"saving_seconds": self.checkpoint, "evaluation_seconds": self.evaluation}
        return {name: round(seconds, 3) for name, seconds in waited.items() if seconds}


@dataclass(frozen=True)
class Ranks:
    """What all ranks have measured since the last entry."""

    tokens: int
    squared_lengths: float
    windowed_lengths: float
    data_wait: float  # of the rank that waited longest: the others wait for it
    memory_bytes: int  # of the rank that needs most


@dataclass
class Progress:
    """How far this attempt is; times are those of time.monotonic."""

    first_step: int = 0
    step: int = 0
    tokens: int = 0
    started: float = 0.0
    last_entry: float = 0.0
    last_line: float = 0.0


class Metrics(TrainerCallback):
    """Writes one JSON object per log step on rank 0 and prints the progress. `attach` it once the trainer exists.

    An entry: step, total_steps (of the whole run), loss (mean since the last entry), grad_norm, learning_rate, tokens
    (since the last entry, all processes, without padding), total_tokens, tokens_per_second (all processes; saving and
    evaluating left out), tokens_per_second_per_process, mfu and mfu_palm (if a peak is known), memory_bytes (peak of
    the rank that needs most: of its GPU, else of its process), data_wait_seconds (of the rank that waited longest,
    since the last entry), saving_seconds and evaluation_seconds (the training stood still for them since the last
    entry), step_seconds, seconds (of this attempt), attempt, time (Unix). Each save writes an entry of its own, with
    checkpoint_seconds. Each attempt begins with a `header`, which has the formula of mfu, the peak and its source.
    """

    def __init__(self, run: RunFolder, processes: Processes) -> None:
        self.run, self.processes = run, processes
        self.stretch, self.progress = Stretch(), Progress()
        self.cost: flops.Cost | None = None
        self.peak: flops.Peak | None = None
        self.saver_seconds: Callable[[], float] = lambda: 0.0

    def attach(self, trainer: Any, peak_flops: float | None, saver_seconds: Callable[[], float]) -> None:
        """Measure this trainer: its batches, its evaluations, its checkpoints."""
        import torch

        if peak_flops is not None or torch.cuda.is_available():
            from training import flops

            self.peak = flops.choose_peak(peak_flops)
            self.cost = flops.of_model(trainer.model) if self.peak else None
        self.saver_seconds = saver_seconds
        trainer.get_batch_samples = self._measured(trainer.get_batch_samples)
        trainer.evaluate = self._timed(trainer.evaluate)
        # W&B and TensorBoard log what they are given: let them have these values too
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop(callbacks.index(self)))
        if self.processes.first:
            append(self.run.metrics, {"header": self._header()})

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        now = time.monotonic()
        before = [entry for entry in read(self.run.metrics) if entry["step"] <= state.global_step]
        tokens = before[-1]["total_tokens"] if before else 0
        self.progress = Progress(state.global_step, state.global_step, tokens, now, now)
        note_time(self.run, self.processes, "train")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == self.progress.first_step + 1:
            note_time(self.run, self.processes, "first_step")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        note_time(self.run, self.processes, "trained")
        self.stretch.checkpoint += self.saver_seconds()
        if self.processes.first and (rest := self.stretch.waits()):  # after the last entry
            append(self.run.metrics, {**self._place(state), **rest})

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not logs or "loss" not in logs or state.global_step <= self.progress.step:
            self._evaluation(logs or {}, state)
            return
        entry = self._entry(logs, state)
        if self.processes.first:
            append(self.run.metrics, entry)
            self._line(entry, state, bool(control.should_training_stop))
            logs.update({name: entry[name] for name in entry.keys() - {"step", "total_steps", "attempt", "time"}})

    def _entry(self, logs: dict[str, float], state: TrainerState) -> dict[str, Any]:
        """Return the entry of this step. A collective."""
        stretch, self.stretch = self.stretch, Stretch()
        stretch.checkpoint += self.saver_seconds()
        ranks = gather(stretch, self.processes)
        progress, now = self.progress, time.monotonic()
        # All ranks wait for the one that saves longest; rank 0 stands for them.
        seconds = max(now - progress.last_entry - stretch.checkpoint - stretch.evaluation, 1e-9)
        steps = state.global_step - progress.step
        progress.step, progress.last_entry = state.global_step, now
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
            "seconds": round(now - progress.started, 3),
            "attempt": self.run.attempt_number,
            "time": round(time.time(), 3),
        }
        entry |= stretch.waits()
        if self.cost and self.peak:
            possible = seconds * self.peak.flops * self.processes.world_size
            done = self.cost.flops(ranks.tokens, ranks.squared_lengths, ranks.windowed_lengths)
            entry["mfu"] = round(done / possible, 5)
            entry["mfu_palm"] = round(self.cost.flops_palm(ranks.tokens, ranks.squared_lengths) / possible, 5)
        return entry

    def _place(self, state: TrainerState) -> dict[str, Any]:
        return {"step": state.global_step, "attempt": self.run.attempt_number, "time": round(time.time(), 3)}

    def _line(self, entry: dict[str, Any], state: TrainerState, ending: bool) -> None:
        progress, now = self.progress, time.monotonic()
        last = ending or state.global_step >= state.max_steps
        if not last and now - progress.last_line < LINE_SECONDS:
            return
        progress.last_line = now
        done = state.global_step - progress.first_step
        left = (state.max_steps - state.global_step) * (now - progress.started) / max(done, 1)
        print(progress_line(entry, state.max_steps, left), flush=True)

    def _evaluation(self, logs: dict[str, float], state: TrainerState) -> None:
        """Keep what an evaluation logs; the closing summary of transformers' Trainer adds nothing."""
        found = {name: value for name, value in logs.items() if name.startswith("eval_")}
        if not found or not self.processes.first:
            return
        append(self.run.metrics, {**self._place(state), **found})
        loss = found.get("eval_loss", float("nan"))
        print(f"step {state.global_step}/{state.max_steps} eval_loss {loss:.4f}", flush=True)

    def _header(self) -> dict[str, Any]:
        """Return what is true of the whole attempt."""
        import torch

        gpu = torch.cuda.is_available()
        header: dict[str, Any] = {
            "attempt": self.run.attempt_number,
            "time": round(time.time(), 3),
            "processes": self.processes.world_size,
            "device": torch.cuda.get_device_name() if gpu else "cpu",
            "torch": torch.__version__,
        }
        if gpu:
            header["device_memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
        if self.peak and self.cost:
            header["mfu"] = self.cost.header(self.peak)
        return header

    def _timed(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            begun = time.monotonic()
            try:
                return evaluate(*args, **kwargs)
            finally:
                self.stretch.evaluation += time.monotonic() - begun

        return measured

    def _measured(self, get_batch_samples: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Trainer.get_batch_samples: its `next` calls wait for data, and its batches have tokens and lengths."""

        def measured(epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
            stretch = self.stretch
            batches, count = get_batch_samples(timed(epoch_iterator, stretch), *args, **kwargs)
            for batch in batches:
                stretch.tokens += count_tokens(batch)
                if self.cost is not None:
                    squared, windowed = self.cost.lengths(batch)
                    stretch.squared_lengths += squared
                    stretch.windowed_lengths += windowed
            return batches, count

        return measured


def timed(iterator: Iterator[Any], stretch: Stretch) -> Iterator[Any]:
    """Yield what the iterator gives, and add up how long each `next` takes."""
    while True:
        begun = time.monotonic()
        item = next(iterator, END)
        stretch.data_wait += time.monotonic() - begun
        if item is END:
            return
        yield item


def count_tokens(batch: Any) -> Any:
    """Return the tokens of a batch without padding, as a number or a tensor on the batch's device."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if ids is None:
        return 0
    return mask.sum() if mask is not None and mask.shape == ids.shape else ids.numel()


def gather(stretch: Stretch, peers: Processes) -> Ranks:
    """Return what all ranks have measured. A collective."""
    counts = map(float, (stretch.tokens, stretch.squared_lengths, stretch.windowed_lengths))
    rows = processes.gather((*counts, stretch.data_wait, float(peak_memory())), peers)
    tokens, squared, windowed, waits, peaks = zip(*rows, strict=True)
    return Ranks(round(sum(tokens)), sum(squared), sum(windowed), max(waits), round(max(peaks)))


def peak_memory() -> int:
    """Return the peak in bytes: what torch has allocated on the GPU, or the resident memory of this process."""
    import resource

    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def progress_line(entry: dict[str, Any], max_steps: int, seconds_left: float) -> str:
    """Return e.g. `step 30/60 loss 5.1234 1200 tok/s eta 0:21`: no cursor tricks, so that a log file stays readable.

    MFU and memory appear if they are known, waiting for data if it costs something.
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
        parts.append(f"waits for data {waited / whole:.0%} of the time")
    return " ".join([*parts, f"eta {eta}"])
