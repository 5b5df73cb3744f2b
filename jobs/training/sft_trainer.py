"""TRL's SFTTrainer, counting tokens, with the same loss by less work."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import transformers
from trl import SFTTrainer

from training.fast import documents, head_loss
from training.metrics import TokenCounter

# Logits of one micro batch up to this size are made whole; above it TRL's loss works through them in chunks.
PLAIN_LOGITS_BYTES = 2 * 1024**3


@dataclass(frozen=True)
class LossPath:
    """Which way the loss is computed, and why."""

    name: str  # pieces: head_loss; plain: the model's own; trl: TRL's
    why: str

    def __str__(self) -> str:
        told = {"pieces": "head and loss in pieces", "plain": "the model itself", "trl": "TRL's own"}
        return f"{told[self.name]} ({self.why})"


class CountingTrainer(SFTTrainer):
    """`path` says how the loss is computed in training; an evaluation is TRL's own, with entropy and accuracy.

    In pieces, TRL's entropy and accuracy are those of the last micro batch before a log step; TRL has their mean over
    all micro batches since the last one, at the price of further passes over the logits of each.
    """

    def __init__(self, *args: Any, counter: TokenCounter, wanted_loss: str, tokens: int | None, **kwargs: Any) -> None:
        self.token_counter = counter
        super().__init__(*args, **kwargs)
        adapted = hasattr(self.model, "get_base_model")
        model = self.model.get_base_model() if adapted else self.model
        prompt_learning = adapted and bool(getattr(self.model.active_peft_config, "is_prompt_learning", False))
        self.path = choose_loss(wanted_loss, model, self.args, tokens, prompt_learning)
        if self.path.name == "pieces":
            head_loss.install(model)
            flat, masked = _layout(model)
            if masked:
                documents.install()
            self.without_padding = documents.WithoutPadding(self.data_collator, flat, masked)

    def get_train_dataloader(self) -> Any:
        """Return batches as the loss path wants them; evaluations keep TRL's collator."""
        if self.path.name != "pieces":
            return super().get_train_dataloader()
        stock, self.data_collator = self.data_collator, self.without_padding
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = stock

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if not self.model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self.token_counter.count += _tokens(inputs)
        if self.path.name == "trl":
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs["use_cache"] = False
        watch = None
        if documents.ROWS in inputs and self._logs_next():
            watch = inputs["loss_watch"] = head_loss.Watch()
        loss = transformers.Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        if watch is not None and len(inputs[documents.ROWS]):
            self._metrics["train"]["entropy"] = [watch.entropy]
            self._metrics["train"]["mean_token_accuracy"] = [watch.accuracy]
        return loss

    def _logs_next(self) -> bool:
        """True in the last micro batch before a log step, where logs are counted in whole steps."""
        every = self.state.logging_steps
        return bool(self.accelerator.sync_gradients and every >= 1 and (self.state.global_step + 1) % every == 0)


def _tokens(inputs: MutableMapping[str, Any]) -> Any:
    """Return the real tokens of a batch; what WithoutPadding has counted is taken out of it."""
    if documents.TOKENS in inputs:
        return inputs.pop(documents.TOKENS)
    mask = inputs.get("attention_mask")
    return inputs["input_ids"].numel() if mask is None else mask.sum()


def _layout(model: Any) -> tuple[bool, bool]:
    """Return whether padding is taken out, and whether attention by document is ours (else flash-attention's)."""
    attention = str(model.config._attn_implementation)
    if "flash" in attention:
        return True, False
    ours = attention == "sdpa" and model.device.type == "cpu"
    return ours, ours


def choose_loss(wanted: str, model: Any, config: Any, tokens: int | None, prompt_learning: bool = False) -> LossPath:
    """Return how the loss is computed: `wanted`, or for `auto` the least work that gives the same loss."""
    loss_type = getattr(config, "loss_type", "nll")
    only_trl = [
        (loss_type not in ("nll", "chunked_nll"), f"loss_type {loss_type}"),
        (bool(getattr(config, "label_smoothing_factor", 0)), "label smoothing"),
        (
            getattr(model.config, "num_local_experts", None) or getattr(model.config, "num_experts", None),
            "a mixture of experts has a loss of its own",
        ),
    ]
    for found, why in only_trl:
        if found and wanted == "auto":
            return LossPath("trl", why)
    if wanted in ("plain", "trl"):
        return LossPath(wanted, "--loss_path")
    why = "fp16 has no room for a slope that is not scaled" if config.fp16 else head_loss.why_not(model)
    if prompt_learning:
        why = "learned prompts shift the places"
    if not why:
        return LossPath("pieces", "the same loss and gradients, logits made once and never kept")
    if wanted == "pieces":
        from training.errors import JobError

        raise JobError("--loss_path pieces is not possible here", why, "--loss_path auto")
    size = (tokens or 0) * model.config.get_text_config().vocab_size * 4
    if tokens is None or size > PLAIN_LOGITS_BYTES:
        return LossPath("trl", f"{why}; the logits of a micro batch may be large")
    return LossPath("plain", f"{why}; logits of {size / 2**20:.0f} MiB fit")
