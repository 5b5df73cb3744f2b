"""What the backward pass needs of the forward pass, in bytes per token: kernel by kernel, as transformers writes them.

Each tensor is counted once, where it is kept; `width` is the size of an activation's element (2 in bf16, 4 in fp32).
Source: transformers 5.23, models/*/modeling_*.py; torch 2.13, derivatives.yaml (what each operation saves).
"""

from __future__ import annotations

from dataclasses import dataclass

from runner.runs.memory.weights import linear_layers

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from runner.runs.memory.shape import Shape


@dataclass(frozen=True)
class Activations:
    """Bytes per token."""

    layer: int  # kept by one layer
    layer_input: int  # what is kept of a layer that is computed again
    layer_work: int  # gradients that live at once while a layer's backward pass runs
    outside: int  # embeddings, last norm
    loss_forward: int  # logits and their like while the loss is taken
    loss_backward: int  # and while its gradient is


def per_token(
    shape: Shape, *, width: int, attention: str, length: int, lora_r: int = 0, adapter_width: int = 0
) -> Activations:
    """The bytes that each token costs; with eager attention they grow with the length of the sequence."""
    masks = shape.hidden if shape.dropout else 0  # one byte each
    vocabulary, hidden = shape.vocabulary, shape.hidden
    mlp_work = (3 if shape.family.gated else 2) * shape.intermediate * width
    scores = 0 if attention == "sdpa" else shape.heads * length * (4 + 2 * width)
    layer = _norms(shape, width) + _attention(shape, width, attention, length) + _mlp(shape, width)
    adapters = _lora(shape, width, lora_r, adapter_width or width) if lora_r else 0
    return Activations(
        layer=layer + (2 if shape.family.norms > 1 else 1) * masks + adapters,
        layer_input=hidden * width,
        layer_work=max(mlp_work, scores) + hidden * width,
        outside=_norm(shape, width) + hidden * width + masks,
        loss_forward=vocabulary * (width + 4 + (4 if width < 4 else 0)),
        loss_backward=vocabulary * 12,
    )  # fmt: skip


def _norm(shape: Shape, width: int) -> int:
    """One norm: what it keeps of its input (and so of the residual stream), and its output, kept by who reads it."""
    hidden = shape.hidden
    if shape.family.norm == "layer":
        return 2 * hidden * width
    if shape.family.float_norm:  # x in fp32, x normalised in fp32, output
        return hidden * (4 + 4 + width)
    return hidden * (4 + width + width)


def _norms(shape: Shape, width: int) -> int:
    same_input = shape.hidden * width if shape.family.parallel and shape.family.norms == 2 else 0
    return shape.family.norms * _norm(shape, width) - same_input


def _attention(shape: Shape, width: int, attention: str, length: int) -> int:
    query, key_value = shape.query, shape.key_value
    kept = 2 * query + 2 * key_value  # queries, keys, values, and what comes out
    head_norm = (query + key_value) * (4 + (width if width < 4 else 4)) if shape.family.head_norm else 0
    if attention == "sdpa":
        if shape.family.joined_rotary:
            kept += query
            # The values are a view of the fused product, which keeps what queries and keys were before.
            kept += query + key_value if shape.family.fused_qkv else 0
        return kept * width + head_norm + 4 * shape.heads
    # Keys and values are repeated for the query heads; the softmax is taken in fp32, and cast.
    repeated = 4 * query
    scores = shape.heads * length * (4 + (width if width < 4 else 0))
    return repeated * width + head_norm + scores


def _mlp(shape: Shape, width: int) -> int:
    inner = shape.intermediate
    if shape.family.gated:  # gate, activated gate, up, their product
        return 4 * inner * width
    return (5 if shape.family.activation == "written" else 2) * inner * width


def _lora(shape: Shape, width: int, rank: int, adapter_width: int) -> int:
    """What LoRA adds: the inner product of each adapter, less what a frozen norm does not keep for its own weight.

    Adapters in fp32 beside a model in bf16 take a copy of every layer's input, each its own.
    """
    linear = list(linear_layers(shape))
    copies = sum(columns for _, columns in linear) * adapter_width if adapter_width > width else 0
    frozen = shape.family.norms * shape.hidden * width if shape.family.norm == "rms" else 0
    return rank * len(linear) * adapter_width + copies - frozen
