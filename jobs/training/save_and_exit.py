"""Save and exit: all ranks save the same step, and the exit code asks for another start."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training import files
from training.processes import Processes, highest
from training.run import RunFolder

CONTINUE = 75  # EX_TEMPFAIL of sysexits.h: not a failure; start again
SAVE, EXIT = 1, 2  # what a rank wants after a step


class SaveAndExit(TrainerCallback):
    """Stops the training after the step in which any rank sees the flag file or a signal.

    Rank 0 looks for the flag file, and every rank catches SIGUSR2 and SIGTERM. One collective after each step lets all
    ranks stop at the same step. Signals alone would not do: launchers and NCCL may swallow them. By the same collective
    all ranks save when rank 0 finds that a save is due.
    """

    def __init__(self, run: RunFolder, processes: Processes) -> None:
        self.flag = run.save_and_exit
        self.processes = processes
        self.signal_name = ""
        self.save_is_due: Callable[[], bool] = lambda: False
        self.reason = ""  # set on every rank once the training stops before its end

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, self._note)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        wanted = SAVE if self.processes.first and self.save_is_due() else 0
        if self.signal_name or (self.processes.first and self.flag.exists()):
            wanted = EXIT
        agreed = highest(wanted, self.processes)
        control.should_save = control.should_save or agreed >= SAVE
        if agreed < EXIT:
            return
        self.reason = self.signal_name or (str(self.flag) if self.processes.first else "another rank")
        control.should_log = True  # otherwise the losses since the last log step are lost
        control.should_training_stop = True
        if state.global_step < state.max_steps:
            # the evaluation would come before the save, and may outlast the job; with `best`, it decides about the save
            control.should_evaluate = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.reason and state.global_step < state.max_steps:  # saved already; the epoch may not even be over
            control.should_evaluate = control.should_save = False

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
