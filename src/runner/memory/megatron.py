"""Estimate memory per GPU for Megatron-LM's GPT, and choose its parallel sizes.

The formulas for activations are those of "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti
et al., 2022), for fused attention and sequence parallelism.
"""

from dataclasses import dataclass
from typing import NamedTuple

from runner.memory.shape import Shape, count_weights, make_shape

# Table 1 of "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (Narayanan et al., 2021).
SIZES = {
    "1.7B": (24, 2304, 24),
    "3.6B": (30, 3072, 32),
    "7.5B": (36, 4096, 32),
    "18.4B": (40, 6144, 48),
    "39.1B": (48, 8192, 64),
    "76.1B": (60, 10240, 80),
    "145.6B": (80, 12288, 96),
    "310.1B": (96, 16384, 128),
}
"""name -> layers, hidden size, attention heads"""
VOCABULARY = 50257
"""of GPT-2's tokenizer"""
LONG = 8192
"""from this sequence length on, context parallelism is considered"""


class Layout(NamedTuple):
    """The parallel sizes, and whether each layer is recomputed in the backward pass."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    recompute: bool = False

    @property
    def gpus(self) -> int:
        """The number of GPUs that hold the model once."""
        return self.tensor * self.pipeline * self.context

    @property
    def text(self) -> str:
        """The layout for the user."""
        recompute = ", each layer recomputed" if self.recompute else ""
        sizes = f"tensor parallel {self.tensor}, pipeline parallel {self.pipeline}, context parallel {self.context}"
        return sizes + recompute


class Work(NamedTuple):
    """What the GPUs train on."""

    gpus: int
    length: int = 2048
    micro_batch: int = 1


@dataclass(frozen=True)
class Estimate:
    """Bytes per GPU on the pipeline stage that needs most."""

    layout: Layout
    micro_batch: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def gpt(
    layers: int,
    hidden: int,
    heads: int,
    positions: int,
    vocabulary: int = VOCABULARY,
    tensor: int = 1,
) -> Shape:
    """The shape of Megatron's GPT. It pads the vocabulary to a multiple of 128 per tensor-parallel rank."""
    multiple = 128 * tensor
    config = {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "n_positions": positions,
        "vocab_size": -(-vocabulary // multiple) * multiple,
    }
    return make_shape(config, "Megatron GPT")


def estimate(shape: Shape, layout: Layout, work: Work) -> Estimate:
    """The larger of the first and the last pipeline stage, with the distributed optimizer and fp32 gradients."""
    weights = count_weights(shape)
    layers = shape.layers // layout.pipeline
    embedding = shape.vocabulary * shape.hidden // layout.tensor
    stage = layers * weights.layer // layout.tensor + embedding + shape.positions * shape.hidden
    hidden = work.micro_batch * work.length * shape.hidden // (layout.tensor * layout.context)
    layer = 34 * hidden  # 16-bit values, and dropout's masks of one byte
    kept = 2 * hidden if layout.recompute else layer
    once = layer if layout.recompute else 0  # the layer that is being recomputed
    # in 16 bits, in fp32, and their gradient
    logits = 10 * hidden * shape.vocabulary // shape.hidden
    # the first stage holds one micro batch per stage, and the last one holds the logits
    first, last = layout.pipeline * layers * kept + once, layers * kept + once
    activations = last
    if first > last + logits:
        activations, logits = first, 0
    shards = work.gpus // (layout.tensor * layout.pipeline)
    return Estimate(
        layout=layout,
        micro_batch=work.micro_batch,
        weights=2 * stage,
        gradients=4 * stage,
        optimizer=12 * -(-stage // shards),
        activations=activations,
        logits=logits,
    )


def layouts(shape: Shape, gpus_per_node: int, work: Work) -> list[Layout]:
    """The possible layouts, the preferred first: no recomputation, few pipeline stages, and small sizes."""
    found = []
    for tensor in _powers(gpus_per_node):
        for pipeline in range(1, min(shape.layers, work.gpus // tensor) + 1):
            for context in _powers(work.gpus) if work.length >= LONG else (1,):
                layout = Layout(tensor, pipeline, context)
                if not problem(shape, layout, work):
                    found += [layout, layout._replace(recompute=True)]
    return sorted(
        found, key=lambda each: (each.recompute, each.pipeline, each.context, each.tensor)
    )


def problem(shape: Shape, layout: Layout, work: Work) -> str:
    """Why Megatron refuses the layout; empty if it does not."""
    if shape.heads % layout.tensor:
        return f"tensor parallel size {layout.tensor} does not divide the {shape.heads} attention heads"
    if shape.layers % layout.pipeline:
        return f"pipeline parallel size {layout.pipeline} does not divide the {shape.layers} layers"
    if layout.context > 1 and work.length % (2 * layout.context):
        twice = f"twice the context parallel size {layout.context}"
        return f"{twice} does not divide the {work.length} tokens of a sequence"
    if work.gpus % layout.gpus:
        sizes = f"{layout.tensor} x {layout.pipeline} x {layout.context}"
        return f"a copy of the model takes {sizes} GPUs, and {work.gpus} GPUs is not a multiple of that number"
    return ""


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if most % 2**power == 0]
