"""Save and exit: all ranks save the same step, and the exit code asks for another start."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training import files
from training.processes import Processes, any_rank
from training.run import RunFolder

CONTINUE = 75  # EX_TEMPFAIL of sysexits.h: not a failure; start again


class SaveAndExit(TrainerCallback):
    """Stops the training after the step in which any rank sees the flag file or a signal.

    Rank 0 looks for the flag file, and every rank catches SIGUSR2 and SIGTERM. One collective after each step lets all
    ranks stop at the same step. Signals alone would not do: launchers and NCCL may swallow them.
    """

    def __init__(self, run: RunFolder, processes: Processes) -> None:
        self.flag = run.save_and_exit
        self.processes = processes
        self.signal_name = ""
        self.reason = ""  # set on every rank once the training stops before its end

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
        control.should_log = True  # otherwise the losses since the last log step are lost
        control.should_save = True
        control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step >= state.max_steps:
            self.reason = ""  # that was the last step anyway

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name


def write_note(run: RunFolder, step: int, checkpoint: Path, reason: str) -> None:
    """Write `attempts/N/continue`: torchrun turns every exit code of a worker into 1, so the code is not enough."""
    files.write_json(run.attempt / "continue", {"step": step, "checkpoint": str(checkpoint), "reason": reason})
