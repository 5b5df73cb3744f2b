"""Two faults in how DeepSpeed's ZeRO-3 loads a universal checkpoint, corrected after the load.

Seen in DeepSpeed 0.19.8, runtime/zero/stage3.py, load_hp_checkpoint_state_from_checkpoint_dir_stage3:

1. Every sub-group of parameters gets the same `step` tensor. torch's AdamW adds 1 to it in place, once per sub-group,
   so with n of them the bias correction runs n times too fast: 1e-3 in the loss after a few steps.
2. The hyper-parameters of the first parameter group are written to every group, so biases and norms, which have no
   weight decay, get it from the resume on.

Both are silent. This file can go when the first half of tests/jobs/test_zero3_faults.py fails: it shows both faults
without the correction. On a DeepSpeed without the faults, the correction changes nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training.converting import pickles

LOADER = "load_hp_checkpoint_state_from_checkpoint_dir_stage3"


def is_supported() -> bool:
    """False for DeepSpeed before 0.18, whose universal form of ZeRO-3 drops all groups of parameters but the first."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    return "param_shapes" not in inspect.signature(getattr(DeepSpeedZeroOptimizer_Stage3, LOADER)).parameters


def work_around() -> None:
    """Correct what a ZeRO-3 optimizer has loaded, each time it loads a universal checkpoint in this process."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    load = getattr(DeepSpeedZeroOptimizer_Stage3, LOADER)
    if hasattr(load, "__wrapped__"):
        return

    @functools.wraps(load)
    def load_and_correct(self: Any, checkpoint_dir: str, *arguments: Any, **named: Any) -> None:
        load(self, checkpoint_dir, *arguments, **named)
        untie_step_tensors(self.optimizer)
        restore_group_settings(self.optimizer.param_groups, saved_groups(Path(checkpoint_dir)))

    setattr(DeepSpeedZeroOptimizer_Stage3, LOADER, load_and_correct)


def untie_step_tensors(optimizer: Any) -> None:
    """Give each parameter a step tensor of its own, on the device where the optimizer needs it."""
    import torch

    by_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for parameter, state in optimizer.state.items():
        if torch.is_tensor(state.get("step")):
            device = parameter.device if by_device else torch.device("cpu")
            state["step"] = state["step"].detach().to(device, torch.float32, copy=True)


def restore_group_settings(groups: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Give each group the settings that it had; if their number has changed, nothing is done."""
    if len(groups) != len(saved):
        return
    for group, before in zip(groups, saved, strict=True):
        group.update({key: value for key, value in before.items() if key != "params"})


def saved_groups(folder: Path) -> Sequence[Mapping[str, Any]]:
    """Return the parameter groups of a universal checkpoint; its tensors stay on the disk."""
    state = pickles.load(folder / "zero" / "optimizer_state.pt")
    groups: Sequence[Mapping[str, Any]] = state["optimizer_state_dict"]["param_groups"]
    return groups
