"""The weights of a model, tensor by tensor: their count is exact."""

from __future__ import annotations

from dataclasses import dataclass

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from collections.abc import Iterator

    from runner.runs.memory.shape import Shape


@dataclass(frozen=True)
class Weights:
    """Elements of weights."""

    layer: int  # of one layer
    outside: int  # embeddings, last norm, head
    embedding: int  # the largest tensor: vocabulary x hidden
    small: int  # in tensors of fewer elements than asked for: what ZeRO-3 keeps whole
    lora_layer: int  # added by LoRA to one layer

    total: int
    lora: int


def count(shape: Shape, *, threshold: int = 0, lora_r: int = 0) -> Weights:
    """The weights. `threshold`: tensors with fewer elements count as small; `lora_r`: LoRA on all linear layers."""
    layer = list(layer_tensors(shape))
    outside = list(outer_tensors(shape))
    adapters = sum(lora_r * (rows + columns) for rows, columns in linear_layers(shape))
    small = shape.layers * sum(each for each in layer if each < threshold) + sum(
        each for each in outside if each < threshold
    )
    return Weights(
        layer=sum(layer), outside=sum(outside), embedding=shape.vocabulary * shape.hidden, small=small,
        lora_layer=adapters, total=shape.layers * sum(layer) + sum(outside), lora=shape.layers * adapters,
    )  # fmt: skip


def linear_layers(shape: Shape) -> Iterator[tuple[int, int]]:
    """(out, in) of each linear layer of one block, as LoRA sees them."""
    family = shape.family
    if family.fused_qkv:
        yield shape.query + 2 * shape.key_value, shape.hidden
    else:
        yield shape.query, shape.hidden
        yield shape.key_value, shape.hidden
        yield shape.key_value, shape.hidden
    yield shape.hidden, shape.query
    if family.fused_gate:
        yield 2 * shape.intermediate, shape.hidden
    else:
        for _ in range(2 if family.gated else 1):
            yield shape.intermediate, shape.hidden
    yield shape.hidden, shape.intermediate


def layer_tensors(shape: Shape) -> Iterator[int]:
    """Elements of each tensor of one layer."""
    family = shape.family
    linear = list(linear_layers(shape))
    attention = len(linear) - (2 if not family.gated or family.fused_gate else 3)
    for index, (rows, columns) in enumerate(linear):
        yield rows * columns
        if index < attention - 1:
            bias = family.qkv_bias
        else:
            bias = family.output_bias if index == attention - 1 else family.mlp_bias
        if bias:
            yield rows
    if family.head_norm:
        yield shape.head_dim
        yield shape.head_dim
    for _ in range(family.norms):
        yield shape.hidden
        if family.norm == "layer":
            yield shape.hidden


def outer_tensors(shape: Shape) -> Iterator[int]:
    """Elements of the embeddings, the last norm and the head."""
    family = shape.family
    yield shape.vocabulary * shape.hidden
    if family.learned_positions:
        yield shape.positions * shape.hidden
    yield shape.hidden
    if family.norm == "layer":
        yield shape.hidden
    if not shape.tied:
        yield shape.vocabulary * shape.hidden
    if family.head_bias:
        yield shape.vocabulary
