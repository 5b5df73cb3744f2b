"""Leaving in good order: all ranks save the same step, and the exit code says "continue me"."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training import files
from training.processes import Processes
from training.run import RunFolder

CONTINUE = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, start me again


class SaveAndExit(TrainerCallback):
    """Stops the training after the step in which the flag file or a signal was seen by any rank.

    Rank 0 looks at the flag file, every rank notes SIGUSR2 and SIGTERM, and one number rides in a collective after each
    step, so that no rank begins a step that another does not take. Signals are the second way only: launchers and NCCL
    may eat them.
    """

    def __init__(self, run: RunFolder, processes: Processes) -> None:
        self.flag = run.save_and_exit
        self.processes = processes
        self.signal_name = ""
        self.reason = ""  # set on every rank once the training is to stop

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, self._note)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        wanted = bool(self.signal_name) or (self.processes.first and self.flag.exists())
        if not any_rank(wanted, self.processes):
            return
        self.reason = self.signal_name or (str(self.flag) if self.processes.first else "another rank")
        control.should_log = True  # else the losses since the last log line would be forgotten
        control.should_save = True
        control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step >= state.max_steps:
            self.reason = ""  # that step was the last one anyway

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name


def any_rank(mine: bool, processes: Processes) -> bool:
    """Return whether any rank said yes. A collective: every rank calls it."""
    if processes.world_size == 1:
        return mine
    import torch
    import torch.distributed

    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    flag = torch.tensor([int(mine)], device=device)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return bool(flag.item())


def leave_note(run: RunFolder, step: int, checkpoint: Path, reason: str) -> None:
    """Write `attempts/N/continue`: torchrun turns every exit code of a worker into 1, so the code is not enough."""
    files.write_json(run.attempt / "continue", {"step": step, "checkpoint": str(checkpoint), "reason": reason})
