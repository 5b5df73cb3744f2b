"""Batches without padding, and attention that sees one document at a time.

TRL's padded batch becomes one row of its real tokens; the row that its padding-free collator makes stays as it is. The
stock sdpa path answers such a row with a mask of tokens x tokens and computes all of it; here each document attends to
itself only, which is what the mask says. flash-attention does the same on a GPU, so there the row goes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

STARTS = "cu_seq_lens_q"  # transformers' name for where documents start and end in the row: int32 (documents + 1)
ROWS = "loss_rows"  # which rows of the hidden states have a loss
TOKENS = "real_tokens"  # of a batch, a plain number: whoever calls the model takes it out


class WithoutPadding:
    """A collator around TRL's: what it makes, plus where a loss is taken, without padding where `flat`.

    Beside the model's inputs: labels (as TRL's collator made them: the trainer counts them, the model does not see
    them), loss_rows, loss_targets: int64 (places with a loss), real_tokens.
    """

    def __init__(self, collate: Callable[..., dict[str, Any]], flat: bool, masked: bool) -> None:
        self.collate, self.flat, self.masked = collate, flat, masked

    def __call__(self, examples: Sequence[Any], return_tensors: str | None = None) -> dict[str, Any]:
        batch = dict(self.collate(examples))
        ids, labels, mask = batch["input_ids"], batch["labels"], batch.get("attention_mask")
        positions = batch.get("position_ids")
        if positions is None and mask is not None and not bool(mask.all()) and self.flat:
            kept = mask.bool()
            positions = torch.cat([torch.arange(int(length)) for length in kept.sum(1)])[None]
            ids, shown = ids[kept][None], labels[kept][None]
        else:
            shown = labels
        real = ids.numel() if mask is None or ids.shape[0] == 1 else int(mask.sum())
        out: dict[str, Any] = {"input_ids": ids, "labels": labels, TOKENS: real}
        if positions is not None and ids.shape[0] == 1:
            shown = shown.masked_fill(positions == 0, -100)
            out.update(position_ids=positions, **_starts(positions[0]))
            if self.masked:
                out["attention_mask"] = torch.ones((1, 1, 1, 1), dtype=torch.bool)
        # Padding stands to the right, where causal attention does not look: its mask changes no loss.
        return {**out, **_places(shown)}


def _starts(positions: torch.Tensor) -> dict[str, Any]:
    """Return transformers' description of a row of documents: where each starts, and the longest."""
    starts = (positions == 0).nonzero().flatten()
    bounds = torch.cat([starts, torch.tensor([len(positions)])]).to(torch.int32)
    longest = int(bounds.diff().max())
    return {STARTS: bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def _places(labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return which rows of the hidden states (batch and sequence laid flat) have a next token to learn, and which."""
    rows, length = labels.shape
    following = labels[:, 1:]
    counted = following != -100
    places = torch.arange(rows * length).view(rows, length)[:, :-1]
    return {ROWS: places[counted], "loss_targets": following[counted]}


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention of each document to itself: (1, tokens, heads, width). Else what the stock sdpa returns.

    query: (1, heads, tokens, width); key and value may have fewer heads.
    """
    bounds = named.get(STARTS)
    if bounds is None or attention_mask is None or attention_mask.numel() != 1:
        return _stock(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **named)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    lengths = bounds.diff().tolist()
    window = named.get("sliding_window")
    pieces = [
        _one(*piece, dropout, scaling, window)
        for piece in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    ]
    return torch.cat(pieces, dim=1), None


def _one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Return the attention of one document, heads behind tokens."""
    length = query.shape[2]
    mask = None
    if window is not None and length > window:
        mask = torch.ones((length, length), dtype=torch.bool, device=query.device).tril_().triu_(1 - window)
    found = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, is_causal=mask is None
    )
    return found.transpose(1, 2)


def install() -> None:
    """Put `attend` in the place of transformers' sdpa; the name stays, so that a saved config is not changed by it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    global _stock
    if ALL_ATTENTION_FUNCTIONS["sdpa"] is not attend:
        _stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
        ALL_ATTENTION_FUNCTIONS.register("sdpa", attend)


def _stock(*arguments: Any, **named: Any) -> tuple[torch.Tensor, None]:
    """Stand for transformers' function; `install` puts that here."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    found: tuple[torch.Tensor, None] = sdpa_attention_forward(*arguments, **named)
    return found
