"""transformers' Trainer, whose evaluation gives the same perplexity on any number of processes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer

ROW = "row"  # the number of a block; removed before the model sees the batch


class Numbered(Dataset[dict[str, Any]]):
    """The same blocks, each with its number."""

    def __init__(self, blocks: Any) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {**self.blocks[number], ROW: torch.tensor(number)}


class BlockTrainer(Trainer):
    """Counts each block of an evaluation once.

    When the last round of batches is not full, accelerate fills it with blocks from the beginning, and transformers
    takes the mean over all of them.
    """

    def __init__(self, *args: Any, eval_dataset: Any = None, **kwargs: Any) -> None:
        self.rounds = self.blocks_counted = 0
        self.loss_sum = 0.0
        if hasattr(eval_dataset, "__len__"):
            eval_dataset = Numbered(eval_dataset)
        super().__init__(*args, eval_dataset=eval_dataset, **kwargs)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.model.training:
            inputs["use_cache"] = False
        else:
            num_items_in_batch = None  # the mean of this batch; transformers 5 counts those of all processes
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        rows = inputs.pop(ROW, None)
        if rows is None:
            return super().prediction_step(model, inputs, *args, **kwargs)
        place = self.rounds * self.args.world_size + self.args.process_index
        places = place * self.args.eval_batch_size + torch.arange(len(rows), device=rows.device)
        again = places >= len(self.eval_dataset)
        inputs["labels"] = inputs["labels"].masked_fill(again[:, None], -100)
        loss, *others = super().prediction_step(model, inputs, *args, **kwargs)
        kept = int((~again).sum())
        self.rounds += 1
        self.blocks_counted += kept
        self.loss_sum += float(loss) * kept if kept else 0.0
        return (loss, *others)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.rounds, self.blocks_counted, self.loss_sum = 0, 0, 0.0
        output = super().evaluation_loop(*args, **kwargs)
        if self.rounds:
            sums = torch.tensor([self.loss_sum, self.blocks_counted], dtype=torch.float64, device=self.args.device)
            if self.args.world_size > 1:
                torch.distributed.all_reduce(sums)
            output.metrics[f"{kwargs.get('metric_key_prefix', 'eval')}_loss"] = float(sums[0] / sums[1])
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "eval_loss" in logs:
            logs["eval_perplexity"] = perplexity(logs["eval_loss"])
        super().log(logs, *args, **kwargs)


def perplexity(loss: float) -> float:
    """Return e to the loss; infinity if that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
