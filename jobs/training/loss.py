"""TRL's SFTTrainer, with the model's own loss where that is faster.

TRL computes the loss in chunks, with entropy and accuracy of every token, by a Triton kernel. Without Triton, on a
CPU, it falls back to about ten passes of torch over the logits, and makes them again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from trl import SFTTrainer

from training import models
from training.errors import JobError

LOSS_PATHS = ("auto", "plain", "trl")


class Trainer(SFTTrainer):
    """With `plain_loss`, a training step takes transformers' loss; an evaluation is always TRL's."""

    plain_loss = False

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if not (self.plain_loss and self.model.training):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs["use_cache"] = False
        return transformers.Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)


def is_plain(wanted: str, model: Any, config: Any) -> bool:
    """Return whether the model's own loss is used: with `plain`, or with `auto` on a CPU if it is the same loss."""
    other = ""
    if getattr(config, "loss_type", "nll") not in ("nll", "chunked_nll"):
        other = f"--loss_type {config.loss_type}"
    elif models.has_experts(model):
        other = "a mixture of experts, whose router has a loss of its own"
    if wanted == "plain" and other:
        raise JobError(
            f"--loss_path plain cannot be used with {other}",
            "`plain` always computes the loss of the Transformers library",
            "use --loss_path auto",
        )
    same = not other and not getattr(config, "label_smoothing_factor", 0)
    return wanted == "plain" or (wanted == "auto" and same and not torch.cuda.is_available())
