"""Signs of life: a file that is touched on progress, and the stacks of all threads on request.

The batch script ends a run after `hang_seconds` without progress. It sees progress by `attempts/N/heartbeat`.
Before it ends the run it asks every rank for its stacks, by SIGUSR1 and by the file `attempts/N/stacks/wanted`, since
launchers and NCCL may swallow signals.
"""

from __future__ import annotations

import faulthandler
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training.processes import Processes
from training.run import RunFolder

TOUCH_SECONDS = 5.0  # between two touches at least: the run folder is on a shared file system
LOOK_SECONDS = 10.0  # between two looks for the file that asks for stacks


class Heartbeat(TrainerCallback):
    """Rank 0 touches the heartbeat at each step, evaluation step, log and save; every rank writes its stacks if asked.

    Made before the model is loaded, so that a hang there is seen too.
    """

    def __init__(self, run: RunFolder, processes: Processes) -> None:
        self.file = run.attempt / "heartbeat"
        self.processes = processes
        self.last = 0.0
        write_stacks_on_request(run.attempt / "stacks", processes.rank)
        self.beat()

    def beat(self) -> None:
        """Report progress. A full disk is not an error here."""
        now = time.monotonic()
        if self.processes.first and now - self.last >= TOUCH_SECONDS:
            self.last = now
            with suppress(OSError):
                self.file.touch()

    def _progress(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.beat()

    on_train_begin = on_substep_end = on_step_end = on_prediction_step = _progress
    on_evaluate = on_save = on_log = on_train_end = _progress


def write_stacks_on_request(folder: Path, rank: int) -> None:
    """Write all threads' stacks to FOLDER/rank-R.txt on SIGUSR1, or when FOLDER/wanted appears.

    faulthandler writes from inside the signal handler, so it works while a thread hangs in C code.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"rank-{rank}.txt").open("w", encoding="utf-8")  # a signal handler cannot open files
    if threading.current_thread() is threading.main_thread():
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)
    thread = threading.Thread(target=_look, args=(folder, rank, file), name="stacks", daemon=True)
    thread.start()


def _look(folder: Path, rank: int, file: TextIO) -> None:
    while not (folder / "wanted").exists():
        time.sleep(LOOK_SECONDS)
    with suppress(OSError, ValueError):
        file.flush()
        if not (folder / f"rank-{rank}.txt").stat().st_size:  # the signal did not arrive
            faulthandler.dump_traceback(file=file, all_threads=True)
    with suppress(Exception):
        _flight_recorder(folder / f"nccl-rank-{rank}")


def _flight_recorder(path: Path) -> None:
    """Write NCCL's last collectives in the format of torch's own dump (a pickle, for `torchfrtrace`)."""
    import torch.distributed

    if path.exists() or not torch.distributed.is_initialized() or torch.distributed.get_backend() != "nccl":
        return
    from torch._C._distributed_c10d import _dump_nccl_trace  # private; the caller suppresses any error

    path.write_bytes(_dump_nccl_trace())
