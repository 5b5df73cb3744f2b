"""transformers' Trainer, counting tokens, whose evaluation gives the same perplexity on any number of processes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer

from training.fast import head_loss
from training.metrics import TokenCounter

ROW = "row"  # which block it is; taken out before the model sees the batch


class Numbered(Dataset[dict[str, Any]]):
    """The same blocks, each with its number."""

    def __init__(self, blocks: Any) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {**self.blocks[number], ROW: torch.tensor(number)}


class CountingTrainer(Trainer):  # type: ignore[misc]
    """In an evaluation, blocks that come twice count once.

    Where the last round of batches is not full, accelerate fills it up with blocks from the beginning, and transformers
    takes the mean over them all.
    """

    def __init__(self, *args: Any, counter: TokenCounter, wanted_loss: str = "auto", **kwargs: Any) -> None:
        self.token_counter = counter
        self.rounds = self.blocks_counted = 0
        self.loss_sum = 0.0
        super().__init__(*args, **kwargs)
        self.whole_logits = choose_loss(wanted_loss, self.model, self.args)
        if not self.whole_logits:
            head_loss.install(self.model)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.model.training:
            self.token_counter.count += inputs["input_ids"].numel()
            inputs["use_cache"] = False
            if not self.whole_logits:
                inputs.update(loss_places(inputs["input_ids"]))
        else:
            num_items_in_batch = None  # the mean over this batch alone; transformers 5 counts those of all processes
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        rows = inputs.pop(ROW, None)
        if rows is None:
            return super().prediction_step(model, inputs, *args, **kwargs)
        place = self.rounds * self.args.world_size + self.args.process_index
        again = rows < place * self.args.eval_batch_size
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


def loss_places(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the rows of the head that are wanted, and their targets: each token but the last of a block has its next.

    ids: int64 (batch, block); loss_rows, loss_targets: int64 (batch * (block - 1)).
    """
    places = torch.arange(ids.numel(), device=ids.device).view_as(ids)
    return {"loss_rows": places[:, :-1].reshape(-1), "loss_targets": ids[:, 1:].reshape(-1)}


def choose_loss(wanted: str, model: Any, config: Any) -> str:
    """Return why the logits are made whole; nothing where head and loss are done in pieces."""
    if wanted == "plain":
        return "--loss_path plain"
    if config.label_smoothing_factor:
        return "label smoothing"
    return "fp16 has no room for a slope that is not scaled" if config.fp16 else head_loss.why_not(model)


def perplexity(loss: float) -> float:
    """Return e to the loss; infinity where no number is large enough."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
