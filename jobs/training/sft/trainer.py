"""TRL's SFTTrainer, counting tokens, with the choice of the model's own loss."""

from __future__ import annotations

from typing import Any

import transformers
from trl import SFTTrainer

from training.measuring.metrics import TokenCounter

# Logits of one micro batch up to this size are made whole; above it TRL's loss works through them in chunks.
PLAIN_LOGITS_BYTES = 2 * 1024**3


class CountingTrainer(SFTTrainer):
    """`plain_loss` leaves out TRL's entropy and accuracy, which cost as much as the step itself on a small model."""

    def __init__(self, *args: Any, counter: TokenCounter, plain_loss: bool, **kwargs: Any) -> None:
        self.token_counter = counter
        self.plain_loss = plain_loss
        super().__init__(*args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.model.training:
            mask = inputs.get("attention_mask")
            self.token_counter.count += inputs["input_ids"].numel() if mask is None else mask.sum()
        if not self.plain_loss:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs["use_cache"] = False
        return transformers.Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)


def choose_loss(wanted: str, tokens: int | None, vocabulary: int, loss_type: str, experts: bool) -> tuple[bool, str]:
    """Return whether the plain loss is used, and why."""
    if wanted != "auto":
        return wanted == "plain", "--loss_path"
    if loss_type not in ("nll", "chunked_nll") or experts:
        return False, f"loss_type {loss_type}" if not experts else "a mixture of experts has a loss of its own"
    size = (tokens or 0) * vocabulary * 4
    if tokens is None or size > PLAIN_LOGITS_BYTES:
        return (
            False,
            "the logits of a micro batch may be large" if tokens is None else f"logits of {size / 2**30:.1f} GiB",
        )
    return True, f"logits of {size / 2**20:.0f} MiB fit; no entropy and accuracy are computed"
