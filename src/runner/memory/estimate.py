"""Estimate memory per GPU: what is allocated permanently, and the peak during a training step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.errors import RunnerError
from runner.memory.shape import Shape, Weights, count_weights, linear_layers
from runner.project import page


@dataclass(frozen=True)
class Plan:
    """What to train, and on which resources."""

    gpus: int
    micro_batch: int
    length: int
    accumulation: int = 1
    width: int = 2  # bytes of a weight and an activation: 2 in bf16 and fp16, 4 in fp32
    attention: str = "sdpa"
    checkpointing: bool = False
    lora_r: int = 0

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.length


@dataclass(frozen=True)
class Estimate:
    """Bytes per GPU at the peak of a step, by purpose."""

    zero: str
    stage: int
    micro_batch: int
    moment: str  # loss, head, recompute, backward or step
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    loss: int = 0
    buffers: int = 0
    host: int = 0  # bytes of the node's memory per GPU, with offload

    @property
    def total(self) -> int:
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.loss
            + self.buffers
        )


def estimate(shape: Shape, zero: Zero, plan: Plan) -> Estimate:
    """The moment of a step that needs the most. Compared with real steps in tests/jobs/test_memory_on_paper.py."""
    weights = count_weights(shape, threshold=zero.persistence, lora_r=plan.lora_r)
    return max(_moments(shape, weights, zero, plan), key=lambda each: each.total)


def _always(weights: Weights, zero: Zero, plan: Plan) -> Estimate:
    """Weights, master copy, Adam's states, and what DeepSpeed keeps between steps."""
    trained, width = weights.trained, plan.width
    every = trained + (weights.total if plan.lora_r else 0)
    share = -(-trained // plan.gpus)
    # With ZeRO, the optimizer has its own copy of its share in fp32 too; in stage 3, because DeepSpeed's comparison of
    # a device with its name always fails.
    found = Estimate(
        zero.name, zero.stage, plan.micro_batch, "", weights=every * width, optimizer=12 * share
    )
    if zero.stage == 0:
        return replace(found, optimizer=trained * (8 + _copy(width)))
    if zero.stage < 3:
        offloaded = (16 + width) * share
    else:
        # Small tensors are not partitioned, and their share is stored in addition.
        split, small = -(-every // plan.gpus) * width, weights.small * width
        kept, host = (small, split) if zero.offload_param else (split + small, 0)
        bucket = zero.reduce_bucket * width
        found = replace(found, weights=kept, gradients=share * width, buffers=bucket, host=host)
        offloaded = 16 * share + found.gradients
    if zero.offload_optimizer:
        return replace(found, gradients=0, optimizer=0, host=found.host + offloaded)
    return found


def _copy(width: int) -> int:
    """The bytes of an fp32 copy of an element; 0 if the element is in fp32 itself."""
    return 4 if width < 4 else 0


def _moments(shape: Shape, weights: Weights, zero: Zero, plan: Plan) -> Iterator[Estimate]:
    """The moments at which a step may need the most."""
    always = _always(weights, zero, plan)

    def at(
        name: str,
        kept: int = 0,
        *,
        gathered: int = 0,
        gradients: int = 0,
        loss: int = 0,
        buckets: int = 0,
    ) -> Estimate:
        weights, buffers = always.weights + gathered, always.buffers + buckets
        gradients += always.gradients
        return replace(
            always,
            moment=name,
            weights=weights,
            gradients=gradients,
            activations=kept,
            loss=loss,
            buffers=buffers,
        )

    activations, tokens = activations_per_token(shape, zero, plan), plan.tokens
    trained = weights.trained * plan.width
    gathered = accumulated = 0
    # they stay while the loss is computed, because the backward pass needs them
    if zero.stage == 3 and plan.gpus > 1:
        gathered = (
            min(weights.total + weights.lora - weights.small, zero.reuse_distance // 2) * plan.width
        )
    if zero.stage < 3 and plan.accumulation > 1:  # gradients of earlier micro batches
        accumulated = trained // plan.gpus if zero.stage == 2 else trained
    checkpointing = plan.checkpointing or zero.checkpointing
    layer = activations.layer_input if checkpointing else activations.layer
    kept = tokens * (shape.layers * layer + activations.outside)
    yield at("loss", kept, gathered=gathered, gradients=accumulated, loss=tokens * activations.loss)

    # The first gradient, that of the head, is computed from the logits' gradient while all activations still exist.
    first = 0 if plan.lora_r else weights.embedding * plan.width
    kept += tokens * activations.layer_input
    logits = tokens * shape.vocabulary * plan.width
    # Stages 1 and 2 allocate their buckets with the first gradient; stage 3 always has them.
    buckets = zero.buckets * zero.reduce_bucket * plan.width if zero.stage in (1, 2) else 0
    yield at(
        "head", kept, gathered=gathered, gradients=accumulated + first, loss=logits, buckets=buckets
    )

    working = activations.layer + activations.layer_work
    if checkpointing:  # the last layer is recomputed while the inputs of all layers still exist
        gradients = accumulated + (first if zero.stage < 2 else 0)
        kept = tokens * (shape.layers * activations.layer_input + working)
        yield at("recompute", kept, gathered=gathered, gradients=gradients, buckets=buckets)

    # The end: all gradients exist, and one layer is being computed.
    gradients = trained if zero.stage < 2 else 0
    if zero.stage == 2 and not zero.offload_optimizer:
        gradients = trained // plan.gpus
    yield at("backward", tokens * working, gathered=gathered, gradients=gradients, buckets=buckets)
    yield at("step", gradients=_gradients_in_step(weights.trained, zero, plan))


def _gradients_in_step(trained: int, zero: Zero, plan: Plan) -> int:
    """Bytes of the fp32 gradients in the optimizer step, in addition to those from which they are converted."""
    width, copy = plan.width, _copy(plan.width)
    share = -(-trained // plan.gpus)
    if zero.stage == 0:
        return trained * (width + copy)
    if zero.offload_optimizer:
        return 0
    if zero.stage == 3:
        return min(share, zero.sub_group) * (4 + (width if copy else 0))
    # The gradients of this share, a flat copy, and a flat fp32 copy; in stage 1, the other shares' gradients exist too.
    gradients = share * (2 * width + copy)
    return max(gradients, trained * width) if zero.stage == 1 else gradients


@dataclass(frozen=True)
class Activations:
    """Bytes per token."""

    layer: int  # stored by one layer
    layer_input: int  # stored by a layer that is recomputed
    layer_work: int  # gradients that exist at the same time during a layer's backward pass
    outside: int  # embeddings, last norm
    loss: int  # logits and similar tensors while the gradient of the loss is computed


def activations_per_token(shape: Shape, zero: Zero, plan: Plan) -> Activations:
    """The bytes per token. With eager attention, they grow with the sequence length."""
    width = plan.width
    masks = shape.hidden if shape.dropout else 0  # one byte each
    layer_input = shape.hidden * width
    mlp_work = (3 if shape.family.gated else 2) * shape.intermediate * width
    scores = shape.heads * plan.length * (4 + 2 * width) if plan.attention == "eager" else 0
    norm = _norm(shape, width)
    layer = shape.family.norms * norm + _attention(shape, plan) + _mlp(shape, width)
    if shape.family.parallel and shape.family.norms == 2:  # both norms have the same input
        layer -= layer_input
    if plan.lora_r:  # only stage 3 does not cast the fp32 weights that peft creates
        layer += _lora(shape, width, plan.lora_r, 4 if zero.stage == 3 else width)
    return Activations(
        layer=layer + (2 if shape.family.norms > 1 else 1) * masks,
        layer_input=layer_input,
        layer_work=max(mlp_work, scores) + layer_input,
        outside=norm + layer_input + masks,
        loss=shape.vocabulary * 12,
    )


def _norm(shape: Shape, width: int) -> int:
    """One norm: what it stores of its input (and so of the residual stream), and its output, which others store."""
    hidden = shape.hidden
    if shape.family.norm == "layer":
        return 2 * hidden * width
    if shape.family.float_norm:  # x in fp32, x normalised in fp32, output
        return hidden * (4 + 4 + width)
    return hidden * (4 + width + width)


def _attention(shape: Shape, plan: Plan) -> int:
    width = plan.width
    query, key_value = shape.query, shape.key_value
    head_norm = (
        (query + key_value) * (4 + (width if width < 4 else 4)) if shape.family.head_norm else 0
    )
    if plan.attention != "eager":
        kept = 2 * query + 2 * key_value  # queries, keys, values and the output
        if shape.family.joined_rotary:
            kept += query
            # The values are a view of the fused product, which keeps queries and keys before the rotation alive.
            kept += query + key_value if shape.family.fused_qkv else 0
        return kept * width + head_norm + 4 * shape.heads
    # Keys and values are repeated for the query heads; the softmax is computed in fp32, then cast.
    repeated = 4 * query
    scores = shape.heads * plan.length * (4 + (width if width < 4 else 0))
    return repeated * width + head_norm + scores


def _mlp(shape: Shape, width: int) -> int:
    inner = shape.intermediate
    if shape.family.gated:  # gate, activated gate, up, their product
        return 4 * inner * width
    return (5 if shape.family.activation == "written" else 2) * inner * width


def _lora(shape: Shape, width: int, rank: int, adapter_width: int) -> int:
    """What LoRA adds: the inner product of each adapter, minus what a frozen norm does not store for its weight.

    fp32 adapters in a bf16 model each make their own copy of their layer's input.
    """
    linear = list(linear_layers(shape))
    copies = (
        sum(columns for _, columns, _ in linear) * adapter_width if adapter_width > width else 0
    )
    frozen = shape.family.norms * shape.hidden * width if shape.family.norm == "rms" else 0
    return rank * len(linear) * adapter_width + copies - frozen


@dataclass(frozen=True)
class Zero:
    """DeepSpeed's ZeRO settings. Sizes are in elements. Defaults: DeepSpeed 0.19.8, runtime/zero/config.py."""

    name: str
    stage: int = 0
    reduce_bucket: int = 500_000_000
    buckets: int = 1  # two if communication of gradients overlaps with computation
    persistence: int = 100_000
    reuse_distance: int = 1_000_000_000
    sub_group: int = 1_000_000_000
    offload_optimizer: bool = False
    offload_param: bool = False
    checkpointing: bool = False  # the file has a section activation_checkpointing


def read(path: Path, hidden: int) -> Zero:
    """Read a DeepSpeed file. Raises RunnerError if it cannot be read.

    Source of the values for `auto`: transformers 5.23, integrations/deepspeed.py.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        section = dict(config.get("zero_optimization") or {})
        stage = int(section.get("stage", 0))

        def number(key: str, default: int, auto: int) -> int:
            value = section.get(key, default)
            return auto if value == "auto" else int(value)

        return Zero(
            name=path.stem,
            stage=stage,
            reduce_bucket=number("reduce_bucket_size", 500_000_000, hidden * hidden),
            buckets=2 if section.get("overlap_comm") and stage in (1, 2) else 1,
            persistence=number("stage3_param_persistence_threshold", 100_000, 10 * hidden),
            reuse_distance=number("stage3_max_reuse_distance", 1_000_000_000, 1_000_000_000),
            sub_group=number("sub_group_size", 1_000_000_000, 1_000_000_000),
            offload_optimizer=_on(section.get("offload_optimizer")),
            offload_param=_on(section.get("offload_param")),
            checkpointing="activation_checkpointing" in config,
        )
    except (OSError, UnicodeDecodeError) as error:
        raise RunnerError(
            f"cannot read {path}",
            str(error),
            "pass the name of a preset, or the path of a JSON file",
        ) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise RunnerError(
            f"{path} is not a DeepSpeed configuration", str(error), f"see {page('deepspeed')}"
        ) from error


def _on(value: Any) -> bool:
    return isinstance(value, dict) and value.get("device") in ("cpu", "nvme")
