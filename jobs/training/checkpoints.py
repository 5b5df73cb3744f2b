"""Checkpoints that become visible complete, and replace older ones only then."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training import deepspeed, files, marker, records, resume
from training.errors import JobError
from training.processes import Processes, any_rank, barrier, gather, once
from training.run import RunFolder

PROBE_BYTES = 16 * 2**20
RANK_ZERO_FIRST_SECONDS = 1.0  # lets rank 0 report a failed write before another rank removes the folder


@dataclass
class Pending:
    """A checkpoint whose files are written; a thread of each rank syncs and hashes its share."""

    folder: Path  # .checkpoint-N.partial/checkpoint-N
    path: Path  # checkpoint-N
    step: int
    started: float
    best: str | None
    thread: threading.Thread
    waited_seconds: float = 0.0
    found: dict[str, marker.Digest] = field(default_factory=dict)


class CompleteCheckpoints(TrainerCallback):
    """Writes a checkpoint under a hidden name; marks and renames it once all ranks have it on the disk.

    The training waits for the writing only. Syncing and hashing run beside the next steps; the marker and the name
    follow after one of them. `attach` it to the trainer, and put it behind `SaveAndExit` among the callbacks.
    """

    trainer: Any = None

    def __init__(self, run: RunFolder, processes: Processes) -> None:
        self.run, self.processes = run, processes
        self.keep: int | None = None
        self.pending: Pending | None = None
        self.seconds = 0.0
        self.facts: dict[str, Any] = {}
        self.saved: Callable[[float, float], None] = lambda waited, took: None

    def attach(self, trainer: Any, step: int, began: Sequence[str] = ()) -> None:
        """Make the trainer save through this object. Its own removal of old checkpoints also counts incomplete ones.

        step    the one after which the training starts
        began   see resume.began_at
        """
        args = trainer.args
        self.keep, args.save_total_limit = args.save_total_limit, None
        sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps * self.processes.world_size
        stage = deepspeed.stage_of(args)
        epochs = 0.0 if args.max_steps > 0 else float(args.num_train_epochs)
        self.facts = {"world_size": self.processes.world_size, "zero_stage": stage, "sequences": sequences}
        self.facts["epochs"] = epochs
        self.trainer, write = trainer, trainer._save_checkpoint
        trainer._save_checkpoint = lambda *arguments, **named: self._save(trainer, write, *arguments, **named)
        if str(getattr(args.save_strategy, "value", args.save_strategy)) == "best":
            trainer._determine_best_metric = _keeping_requests(trainer, trainer._determine_best_metric)
        once(self.processes, lambda: _sweep(Path(args.output_dir)))
        self.facts["began"] = [*began]
        self.facts["generation"] = once(self.processes, lambda: resume.next_generation(Path(args.output_dir), step))

    def take_seconds(self) -> float:
        """Return the seconds that the training has waited for checkpoints since the last call."""
        taken, self.seconds = self.seconds, 0.0
        return taken

    def _save(self, trainer: Any, write: Any, *arguments: Any, **named: Any) -> None:
        """Write one checkpoint and leave the rest to threads. A collective."""
        self._finish()
        started = time.monotonic()
        state, output = trainer.state, Path(trainer.args.output_dir)
        path = output / f"checkpoint-{state.global_step}"
        partial = path.with_name(f".{path.name}.partial")
        with self._removed_on_failure(partial, state.global_step), _redirected(trainer, partial):
            once(self.processes, lambda: partial.mkdir(parents=True, exist_ok=True))
            write(*arguments, **named)
        barrier(self.processes)  # all have written
        processes = self.processes
        sizes = files.sizes(partial / path.name)
        mine = marker.share(sizes, processes.rank, processes.world_size, processes.local_world_size)
        if getattr(state, "best_global_step", None) == state.global_step:
            state.best_model_checkpoint = str(partial / path.name)
        best = state.best_model_checkpoint
        if best and Path(best).parent == partial:  # the trainer noted where it wrote it
            best = state.best_model_checkpoint = str(output / Path(best).name)
        barrier(self.processes)  # all have listed the files as they are
        once(self.processes, lambda: _write_best(partial / path.name / "trainer_state.json", best))

        def work() -> None:
            pending.found.update(marker.digests(pending.folder, mine, sync=True))

        thread = threading.Thread(target=work, name=f"sync {path.name}", daemon=True)
        pending = Pending(partial / path.name, path, state.global_step, started, best, thread)
        thread.start()
        self.pending = pending
        self._waited(pending, time.monotonic() - started)
        if state.global_step >= state.max_steps or trainer.control.should_training_stop:
            self._finish()  # the best checkpoint may be loaded next

    @contextlib.contextmanager
    def _removed_on_failure(self, partial: Path, step: int) -> Iterator[None]:
        """Turn a failed write into one error and remove what was written; older checkpoints stay."""
        try:
            yield
        except Exception as error:
            if not self.processes.first:
                time.sleep(RANK_ZERO_FIRST_SECONDS)
            failure = _not_written(partial, step, error)
            shutil.rmtree(partial, ignore_errors=True)
            raise failure from error

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        engine = getattr(self.trainer, "deepspeed", None)
        if (
            engine is not None
        ):  # what training/universal.py has set: the best checkpoint, loaded at the end, is ordinary
            engine._config.load_universal_checkpoint = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if control.should_save:
            control.should_log = True  # a restart from here would lose the losses since the last log step
        if self.pending is not None and not any_rank(self.pending.thread.is_alive(), self.processes):
            self._finish()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        control.should_log = control.should_log or control.should_save
        if control.should_training_stop or state.global_step >= state.max_steps:
            self._finish()  # with `--save_strategy best`, the last step may save nothing, and the best is loaded next

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._finish()

    def _finish(self) -> None:
        """Wait for the threads of the pending checkpoint, then mark and rename it. A collective."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        since = time.monotonic()
        pending.thread.join()
        found = {name: entry for part in gather(pending.found, self.processes) for name, entry in part.items()}
        self._waited(pending, time.monotonic() - since)
        once(self.processes, lambda: self._publish(pending, found))

    def _waited(self, pending: Pending, seconds: float) -> None:
        pending.waited_seconds += seconds
        self.seconds += seconds

    def _publish(self, pending: Pending, found: dict[str, marker.Digest]) -> None:
        sizes = files.sizes(pending.folder)
        faults = [f"{name}: {entry.fault}" for name, entry in found.items() if entry.fault]
        faults += [f"no rank has checked {name} after writing" for name in sorted(sizes.keys() - found.keys())]
        if faults:
            failure = _not_written(pending.folder.parent, pending.step, OSError(faults[0]))
            shutil.rmtree(pending.folder.parent, ignore_errors=True)
            raise failure
        marker.write(pending.folder, found, {"step": pending.step, **self.facts})
        replaced = pending.path.with_name(f".{pending.path.name}{resume.REPLACED}")
        if pending.path.exists():  # incomplete, or of an earlier attempt
            shutil.rmtree(replaced, ignore_errors=True)
            pending.path.rename(replaced)
        pending.folder.rename(pending.path)
        pending.folder.parent.rmdir()
        files.sync_folder(pending.path.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        self._report(pending, sum(entry.size_bytes for entry in found.values()))
        if self.keep and self.keep > 0:  # as in transformers, 0 and less keep all
            remove_old(pending.path.parent, self.keep, pending.best)

    def _report(self, pending: Pending, size_bytes: int) -> None:
        """Print and note the seconds; `checkpoint_seconds` decides when a signal before the time limit is asked for."""
        seconds, waited = time.monotonic() - pending.started, pending.waited_seconds
        print(
            f"checkpoint {pending.path}: {size_bytes / 1e6:.1f} MB complete after {seconds:.2f} s;"
            f" the training waited {waited:.2f} s",
            flush=True,
        )
        entry = {"step": pending.step, "attempt": self.run.attempt_number, "checkpoint_bytes": size_bytes}
        times = {"checkpoint_seconds": round(seconds, 3), "checkpoint_wait_seconds": round(waited, 3)}
        records.append(self.run.metrics, {**entry, **times, "time": round(time.time(), 3)})
        self.saved(waited, seconds)


def _keeping_requests(trainer: Any, is_better: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap what `--save_strategy best` asks after an evaluation: whether to save.

    The answer replaces what the callbacks have asked for: a save by wall time, or at the end. transformers before 5
    does not note the step of the best model, and `--save_total_limit` would remove it for a newer one.
    Source: transformers 4.57 and 5.23, Trainer._maybe_log_save_evaluate and _determine_best_metric.
    """

    def answer(*arguments: Any, **named: Any) -> bool:
        requested = bool(trainer.control.should_save)
        better = is_better(*arguments, **named)
        if better:
            trainer.state.best_global_step = trainer.state.global_step
        return better or requested

    return answer


def remove_old(folder: Path, keep: int, best: str | None = None) -> None:
    """Keep the newest `keep` complete checkpoints and the best one. Incomplete ones are not ours: they stay."""
    complete = [path for path in resume.by_age(folder) if marker.missing_or_cut(path) is None]
    for path in complete[max(1, keep) :]:
        if best is None or path.resolve() != Path(best).resolve():
            _remove(path)


def _remove(path: Path) -> None:
    doomed = path.with_name(f".{path.name}.removing")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what a killed attempt was writing or removing."""
    for pattern in (".checkpoint-*.partial", ".checkpoint-*.removing", f".checkpoint-*{resume.REPLACED}"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _redirected(trainer: Any, partial: Path) -> Iterator[None]:
    """Let the trainer write below `partial`. Source: transformers 4.57 and 5.23, Trainer._save_checkpoint."""
    usual = trainer._get_output_dir
    trainer._get_output_dir = lambda trial=None: str(partial)
    try:
        yield
    finally:
        trainer._get_output_dir = usual


def _write_best(state: Path, best: str | None) -> None:
    """Write the final name of the best checkpoint into trainer_state.json."""
    facts = json.loads(state.read_text(encoding="utf-8"))
    if facts.get("best_model_checkpoint") != best:
        text = json.dumps({**facts, "best_model_checkpoint": best}, indent=2, sort_keys=True) + "\n"
        state.write_text(text, encoding="utf-8")


def _not_written(path: Path, step: int, error: Exception) -> JobError:
    """Return the error for the user. torch reports a full disk as "failed writing file", so the disk is asked."""
    free = shutil.disk_usage(path.parent).free
    cause = _disk_fault(path)
    is_full = cause in (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
    fix = "free some space, or set a lower --save_total_limit" if is_full else "fix this error"
    return JobError(
        f"the checkpoint of step {step} could not be written to {path.parent}",
        f"{cause} ({free / 1e6:.0f} MB free)" if cause else " ".join(str(error).split()) or type(error).__name__,
        f"{fix}; a restart resumes from the newest complete checkpoint",
    )


def _disk_fault(folder: Path) -> str | None:
    """Return the error of writing a small file, such as "No space left on device" or "Disk quota exceeded"."""
    try:
        folder.mkdir(exist_ok=True)
        with (folder / "room").open("wb", buffering=0) as file:
            for _ in range(PROBE_BYTES // 2**20):
                file.write(bytes(2**20))
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror
    return None
