"""Checkpoints that become visible whole, count once they are on the disk, and give way only to whole ones."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training import files, marker, records, resume, universal
from training.errors import JobError
from training.processes import Processes, barrier, once
from training.run import RunFolder
from training.save_and_exit import any_rank

RENAME_SECONDS = 60.0
PROBE_BYTES = 16 * 2**20
LAST_WORD_SECONDS = 1.0  # a rank other than 0 lets rank 0 fail on its own before it removes what both write to


@dataclass
class Pending:
    """A checkpoint whose files are written; a thread of each rank sends its share to the disk and hashes it."""

    path: Path
    step: int
    started: float
    thread: threading.Thread
    waited: float = 0.0  # seconds
    found: dict[str, marker.Digest] = field(default_factory=dict)


class CompleteCheckpoints(TrainerCallback):
    """Saves into a partial name, marks a checkpoint once all ranks have it on the disk, then removes old ones.

    The training waits for the writing only: syncing and hashing go on beside the next steps, and the marker follows
    after one of them. `attach` it to the trainer; put it behind `SaveAndExit` among the callbacks.
    """

    trainer: Any = None

    def __init__(self, run: RunFolder, peers: Processes) -> None:
        self.run, self.peers = run, peers
        self.keep: int | None = None
        self.pending: Pending | None = None
        self.seconds = 0.0
        self.facts: dict[str, Any] = {}
        self.best: str | None = None

    def attach(self, trainer: Any) -> None:
        """Make the trainer save through this object; its own removal of old checkpoints is turned off."""
        # transformers would count incomplete ones as well
        self.keep, trainer.args.save_total_limit = trainer.args.save_total_limit, None
        self.trainer, self.facts = trainer, _facts(trainer.args, self.peers)
        write = trainer._save_checkpoint
        trainer._save_checkpoint = lambda *arguments, **named: self._save(trainer, write, *arguments, **named)
        once(self.peers, lambda: _sweep(Path(trainer.args.output_dir)))

    def take_seconds(self) -> float:
        """Return the seconds that the training has waited for checkpoints since this was last asked."""
        taken, self.seconds = self.seconds, 0.0
        return taken

    def _save(self, trainer: Any, write: Any, *arguments: Any, **named: Any) -> None:
        """Write one checkpoint, the same on all ranks, and leave the rest to threads. A collective."""
        self._finish()
        started = time.monotonic()
        step = trainer.state.global_step
        path = Path(trainer.args.output_dir) / f"checkpoint-{step}"
        partial = partial_of(path)
        with self._or_nothing(partial, step), _redirected(trainer, partial):
            once(self.peers, lambda: partial.mkdir(parents=True, exist_ok=True))
            write(*arguments, **named)
        barrier(self.peers)  # all is written
        mine = self._share(partial / path.name)
        barrier(self.peers)  # all have looked
        _mend_best(trainer.state, partial, path.parent)
        once(self.peers, lambda: _publish(partial, path, trainer.state.best_model_checkpoint))
        self.best = trainer.state.best_model_checkpoint
        self._begin(path, step, mine, started)

    @contextlib.contextmanager
    def _or_nothing(self, partial: Path, step: int) -> Iterator[None]:
        """Turn a failed write into one clear error, with nothing left that takes room; older checkpoints stay."""
        try:
            yield
        except Exception as error:
            if not self.peers.first:
                time.sleep(LAST_WORD_SECONDS)
            failure = _not_written(partial, step, error)
            shutil.rmtree(partial, ignore_errors=True)
            raise failure from error

    def _share(self, folder: Path) -> list[str]:
        """Return the files that this rank syncs and hashes: its own and its node's, seen under the name they had."""
        peers = self.peers
        return marker.share(files.sizes(folder), peers.rank, peers.world_size, peers.local_world_size)

    def _begin(self, path: Path, step: int, mine: list[str], started: float) -> None:
        def work() -> None:
            _await_name(path)
            pending.found.update(marker.digests(path, mine, marker.algorithm(), sync=True))

        pending = Pending(path, step, started, threading.Thread(target=work, name=f"sync {path.name}", daemon=True))
        pending.thread.start()
        self.pending = pending
        self._waited(pending, time.monotonic() - started)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        universal.loaded(self.trainer)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if control.should_save:
            control.should_log = True  # else a restart from here would forget the losses since the last log entry
        if self.pending is None:
            return
        if not any_rank(self.pending.thread.is_alive(), self.peers):
            self._finish()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        control.should_log = control.should_log or control.should_save

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._finish()

    def _finish(self) -> None:
        """Wait for the threads of the checkpoint under way, and mark it. A collective."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        since = time.monotonic()
        pending.thread.join()
        found = _of_all_ranks(pending.found, self.peers)
        self._waited(pending, time.monotonic() - since)
        once(self.peers, lambda: self._mark(pending, found))

    def _waited(self, pending: Pending, seconds: float) -> None:
        pending.waited += seconds
        self.seconds += seconds

    def _mark(self, pending: Pending, found: dict[str, marker.Digest]) -> None:
        faults = [f"{name}: {entry.fault}" for name, entry in found.items() if entry.fault]
        unread = sorted(files.sizes(pending.path).keys() - found.keys())
        if faults or unread:
            shutil.rmtree(pending.path, ignore_errors=True)
            raise _not_written(pending.path, pending.step, OSError(next(iter(faults), f"{unread} came from no rank")))
        marker.write(pending.path, found, marker.algorithm(), {"step": pending.step, **self.facts})
        self._report(pending, sum(entry.size_bytes for entry in found.values()))
        if self.keep:
            remove_old(pending.path.parent, self.keep, self.best)

    def _report(self, pending: Pending, size_bytes: int) -> None:
        """Print and note what it took; what asks for a signal before the time limit reads `checkpoint_seconds`."""
        seconds, waited = time.monotonic() - pending.started, pending.waited
        print(
            f"checkpoint {pending.path}: {size_bytes / 1e6:.1f} MB whole after {seconds:.2f} s,"
            f" of which the training waited {waited:.2f} s",
            flush=True,
        )
        entry = {"step": pending.step, "attempt": self.run.attempt_number, "checkpoint_bytes": size_bytes}
        times = {"checkpoint_seconds": round(seconds, 3), "checkpoint_wait_seconds": round(waited, 3)}
        records.append(self.run.metrics, {**entry, **times, "time": round(time.time(), 3)})


def _await_name(path: Path) -> None:
    """Wait for a name that rank 0 has given: other nodes of a network file system may see it seconds later."""
    deadline = time.monotonic() + RENAME_SECONDS
    while not path.is_dir() and time.monotonic() < deadline:
        time.sleep(0.05)


def partial_of(path: Path) -> Path:
    """Return the hidden folder in which a checkpoint is written; the Trainer makes `checkpoint-N` below it."""
    return path.with_name(f".{path.name}.partial")


def remove_old(folder: Path, keep: int, best: str | None = None) -> None:
    """Keep the newest `keep` whole checkpoints and the best one; what is incomplete is left for a person to look at."""
    whole = [path for path in resume.by_age(folder) if marker.missing_or_cut(path) is None]
    for path in whole[max(1, keep) :]:
        if best is None or path.resolve() != Path(best).resolve():
            _remove(path)


def _remove(path: Path) -> None:
    doomed = path.with_name(f".{path.name}.removing")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what a killed attempt was writing or removing."""
    for pattern in (".checkpoint-*.partial", ".checkpoint-*.removing"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _facts(args: Any, peers: Processes) -> dict[str, Any]:
    """Return what a later start has to know: processes, ZeRO stage, sequences per step."""
    sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps * peers.world_size
    return {"world_size": peers.world_size, "zero_stage": universal.stage_of(args), "sequences": sequences}


@contextlib.contextmanager
def _redirected(trainer: Any, partial: Path) -> Iterator[None]:
    """Let the Trainer write below `partial`. Source: transformers 4.57 and 5.23, Trainer._save_checkpoint."""
    usual = trainer._get_output_dir
    trainer._get_output_dir = lambda trial=None: str(partial)
    try:
        yield
    finally:
        trainer._get_output_dir = usual


def _mend_best(state: TrainerState, partial: Path, folder: Path) -> None:
    """The Trainer has noted the best checkpoint where it wrote it; give the name that it will have."""
    best = state.best_model_checkpoint
    if best and Path(best).parent == partial:
        state.best_model_checkpoint = str(folder / Path(best).name)


def _publish(partial: Path, path: Path, best: str | None) -> None:
    """Give the checkpoint its name; a folder of that name, which was not whole or is taken anew, gives way."""
    written = partial / path.name
    state = written / "trainer_state.json"
    facts = json.loads(state.read_text(encoding="utf-8"))
    if facts.get("best_model_checkpoint") != best:
        state.write_text(json.dumps({**facts, "best_model_checkpoint": best}, indent=2, sort_keys=True) + "\n", "utf-8")
    if path.exists():
        _remove(path)
    written.rename(path)
    partial.rmdir()
    files.sync_folder(path.parent)


def _of_all_ranks(mine: dict[str, marker.Digest], peers: Processes) -> dict[str, marker.Digest]:
    if peers.world_size == 1:
        return mine
    import torch.distributed

    parts: list[dict[str, marker.Digest]] = [{}] * peers.world_size
    torch.distributed.all_gather_object(parts, mine)
    return {name: entry for part in parts for name, entry in part.items()}


def _not_written(path: Path, step: int, error: Exception) -> JobError:
    """Return the error for the user; what torch says of a full disk is "failed writing file", so the disk is asked."""
    free = shutil.disk_usage(path.parent).free
    asked = _no_room(path)
    said = " ".join(str(error).split())
    return JobError(
        f"the checkpoint of step {step} could not be written to {path.parent}",
        f"{asked} ({free / 1e6:.0f} MB are free there)" if asked else said or type(error).__name__,
        "make room, or keep fewer with --save_total_limit; a restart goes on from the newest whole checkpoint",
    )


def _no_room(folder: Path) -> str | None:
    """Return what the system says to a small file there, such as "No space left on device" or "Disk quota exceeded"."""
    try:
        folder.mkdir(exist_ok=True)
        with (folder / "room").open("wb", buffering=0) as file:
            for _ in range(PROBE_BYTES // 2**20):
                file.write(bytes(2**20))
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror
    return None
