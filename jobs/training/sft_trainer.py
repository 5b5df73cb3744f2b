"""TRL's SFTTrainer, which names the row at fault in its errors, and takes the model's own loss where that is faster.

TRL computes the loss in chunks, with entropy and accuracy of every token, by a Triton kernel. Without Triton, on a
CPU, it falls back to about ten passes of torch over the logits, and makes them again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
import trl

from training import models, rows
from training.errors import JobError


class SFTTrainer(trl.SFTTrainer):
    """`dataset_name` is for errors. `loss_path`: `--loss_path` of a training step.

    An evaluation is always TRL's. Raises JobError for rows that cannot be trained on, and for other arguments that TRL
    does not accept.
    """

    plain_loss = False

    def __init__(
        self, *, dataset_name: str, loss_path: str = "auto", quantization_config: Any = None, **arguments: Any
    ) -> None:
        if quantization_config is not None:  # older versions of TRL do not have this argument
            arguments["quantization_config"] = quantization_config
        given = arguments["train_dataset"]
        count = len(given) if hasattr(given, "__len__") else None
        with rows.explained(given, dataset_name, arguments["args"]):
            super().__init__(**arguments)
        self.plain_loss = is_plain(loss_path, self.model, self.args)
        tokenized = "input_ids" in (getattr(given, "column_names", None) or ())
        note = rows.check_prepared(self, dataset_name, count, tokenized)
        if note and self.is_world_process_zero():
            print(f"note: {note}", flush=True)

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
    elif models.has_experts(model.config):
        other = "a mixture of experts, whose router has a loss of its own"
    if wanted == "plain" and other:
        raise JobError(
            f"--loss_path plain cannot be used with {other}",
            "`plain` always computes the loss of the Transformers library",
            "use --loss_path auto",
        )
    same = not other and not getattr(config, "label_smoothing_factor", 0)
    return wanted == "plain" or (wanted == "auto" and same and not torch.cuda.is_available())
