"""transformers' Trainer, counting tokens, with the perplexity beside the loss of an evaluation."""

from __future__ import annotations

import math
from typing import Any

from transformers import Trainer

from training.measuring.metrics import TokenCounter


class CountingTrainer(Trainer):  # type: ignore[misc]
    def __init__(self, *args: Any, counter: TokenCounter, **kwargs: Any) -> None:
        self.token_counter = counter
        super().__init__(*args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.model.training:
            self.token_counter.count += inputs["input_ids"].numel()
            inputs["use_cache"] = False
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "eval_loss" in logs:
            logs["eval_perplexity"] = perplexity(logs["eval_loss"])
        super().log(logs, *args, **kwargs)


def perplexity(loss: float) -> float:
    """Return e to the loss; infinity where no number is large enough."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
