"""The loss of a language model's head together with its gradient, in pieces: logits are never kept, never made twice.

A stock step makes logits of tokens x vocabulary, a log-softmax of the same size, and in the backward pass their slope.
Here each piece of rows goes through head, log-softmax and both gradient products while it lies in the caches, and only
rows whose label counts go through the head at all. The products are those of the stock step, no more and no fewer.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Rows of one piece. On the CPU what lies in the caches is quick, but each piece goes over the whole weight's gradient
# again: with 8,192 tokens of vocabulary 64 to 256 rows were equally quick, with 50,257 fewer than 160 were slower. On a
# GPU large products are quick: what counts is the memory that the float32 logits of a piece take.
PIECE_ROWS_ON_CPU = 160
PIECE_BYTES_ON_GPU = 512 * 2**20
# Models whose logits are head(backbone(x)) and nothing else. tests/jobs/test_fast.py holds each to the stock loss.
PLAIN_HEADS = frozenset(
    ("gpt2", "gpt_neox", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2")
)
SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")


@dataclass
class Watch:
    """What TRL logs beside the loss, of the rows of one call: filled in where a call is given one."""

    entropy: float = 0.0
    accuracy: float = 0.0


class _LossWithGradient(torch.autograd.Function):
    """scale x the sum over rows of -log softmax(hidden @ weight.T + bias)[target]."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        scale: float,
        watch: Watch | None,
    ) -> torch.Tensor:
        """hidden: (rows, width); weight: (vocabulary, width); targets: int64 (rows), none of them -100."""
        device = hidden.device.type
        wanted = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        with torch.autocast(device, enabled=False):
            rows, head = hidden.detach().to(wanted), weight.detach().to(wanted)
            offset = None if bias is None else bias.detach().to(wanted)
            total, grads = _in_pieces(rows, head, offset, targets, scale, ctx.needs_input_grad[:3], watch)
        ctx.kept = [
            None if grad is None else grad.to(of.dtype) for grad, of in zip(grads, (hidden, weight, bias), strict=True)
        ]
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        kept, ctx.kept = ctx.kept, None  # they are used up: the weight's is as large as the weight
        if grad.device.type != "cpu" or float(grad) != 1.0:
            for found in kept:
                if found is not None:
                    found.mul_(grad)
        return (*kept, None, None, None)


def _in_pieces(
    rows: torch.Tensor,
    head: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    scale: float,
    wanted: tuple[bool, ...],
    watch: Watch | None,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return the scaled loss (float32) and its gradients with respect to rows, head and bias, where wanted."""
    count, vocabulary = rows.shape[0], head.shape[0]
    on_gpu = PIECE_BYTES_ON_GPU // (vocabulary * 4)
    size = max(1, min(count, PIECE_ROWS_ON_CPU if rows.device.type == "cpu" else on_gpu))
    exact = head.dtype == torch.float32
    total = torch.zeros((), dtype=torch.float32, device=rows.device)
    d_rows = torch.empty_like(rows) if wanted[0] else None
    # Sums over pieces are kept in float32, whatever the products are in.
    d_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device) if wanted[1] else None
    d_bias = torch.zeros(vocabulary, dtype=torch.float32, device=head.device) if wanted[2] else None
    logits_buffer = torch.empty((size, vocabulary), dtype=head.dtype, device=head.device)
    for start in range(0, count, size):
        piece, target = rows[start : start + size], targets[start : start + size]
        logits = torch.mm(piece, head.t(), out=logits_buffer[: len(piece)])
        if bias is not None:
            logits.add_(bias)
        found = torch.log_softmax(logits.float(), dim=-1)
        total -= found.gather(1, target[:, None]).sum()
        if watch is not None:
            watch.accuracy += int((logits.argmax(-1) == target).sum()) / count
            watch.entropy -= float((found.exp() * found).sum()) / count
        if not any(wanted):
            continue
        found.exp_()
        found[torch.arange(len(piece), device=found.device), target] -= 1
        slope = found if exact else found.to(head.dtype)
        if d_rows is not None:
            torch.mm(slope, head, out=d_rows[start : start + size])
        if d_head is not None:
            if exact:
                d_head.addmm_(slope.t(), piece, alpha=scale)
            else:
                d_head.add_(torch.mm(slope.t(), piece), alpha=scale)
        if d_bias is not None:
            d_bias.add_(found.sum(0), alpha=scale)
    if d_rows is not None and scale != 1.0:
        d_rows.mul_(scale)
    return total * scale, [d_rows, d_head, d_bias]


def why_not(model: PreTrainedModel) -> str:
    """Return why the head's loss cannot be had for this model; nothing where it can."""
    config = model.config
    if config.model_type not in PLAIN_HEADS:
        return f"the head of a {config.model_type} model is not known to be plain"
    scaled = [name for name in SCALES if getattr(config, name, None) not in (None, 1.0)]
    if scaled:
        return f"its logits are scaled ({scaled[0]})"
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        return f"its head is a {type(head).__name__}, no plain linear layer"
    return ""


def install(model: PreTrainedModel) -> None:
    """Let `model(..., loss_rows=, loss_targets=)` return the loss alone; without them it is what it was.

    The head is called as a module, so that what hangs on its call (ZeRO-3 gathers its weight there) still happens, and
    it needs its weight in the forward pass only.
    """
    head, stock = model.get_output_embeddings(), model.forward
    head.forward = types.MethodType(_head_forward, head)

    @functools.wraps(stock)
    def forward(
        self: Any,
        *arguments: Any,
        loss_rows: torch.Tensor | None = None,
        loss_targets: torch.Tensor | None = None,
        loss_watch: Watch | None = None,
        **named: Any,
    ) -> Any:
        if loss_rows is None or loss_targets is None:
            return stock(*arguments, **named)
        from transformers.modeling_outputs import CausalLMOutput

        named.pop("labels", None)
        items = named.pop("num_items_in_batch", None)
        hidden = self.base_model(*arguments, **named)[0]
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, loss_rows)
        share = 1.0 / max(len(loss_targets), 1) if items is None else 1.0 / items
        return CausalLMOutput(loss=head(chosen, targets=loss_targets, share=share, watch=loss_watch))

    model.forward = types.MethodType(forward, model)


def _head_forward(
    self: torch.nn.Linear,
    hidden: torch.Tensor,
    targets: torch.Tensor | None = None,
    share: float | torch.Tensor = 1.0,
    watch: Watch | None = None,
) -> torch.Tensor:
    if targets is None:
        return torch.nn.functional.linear(hidden, self.weight, self.bias)
    if hidden.device.type == "cpu" or not isinstance(share, torch.Tensor):
        return _LossWithGradient.apply(hidden, self.weight, self.bias, targets, float(share), watch)
    # A number on the GPU is not waited for.
    return _LossWithGradient.apply(hidden, self.weight, self.bias, targets, 1.0, watch) * share
