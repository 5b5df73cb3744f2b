"""Estimate memory per GPU: what is allocated permanently, and the peak during a training step."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.errors import RunnerError
from runner.memory.shape import count_weights, linear_layers

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from runner.memory.shape import Shape, Weights


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
    moment: str  # forward, loss, head, recompute, backward or step
    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    buffers: int
    host: int  # bytes of the node's memory per GPU, with offload

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.loss + self.buffers


def estimate(shape: Shape, zero: Zero, plan: Plan) -> Estimate:
    """The peak of six moments: loss, gradient of the loss, head, recomputation of a layer, end of backward, optimizer
    step.

    Compared with real steps in tests/jobs/test_memory_on_paper.py.
    """
    weights = count_weights(shape, threshold=zero.persistence, lora_r=plan.lora_r)
    activations = activations_per_token(
        shape,
        width=plan.width,
        attention=plan.attention,
        length=plan.length,
        lora_r=plan.lora_r,
        # only stage 3 does not cast the fp32 weights that peft creates
        adapter_width=4 if zero.stage == 3 else plan.width,
    )
    always = _always(weights, zero, plan)
    moments = (
        _forward(shape, weights, activations, zero, plan),
        _loss(shape, weights, activations, zero, plan),
        _head(shape, weights, activations, zero, plan),
        _recompute(shape, weights, activations, zero, plan),
        _backward(weights, activations, zero, plan),
        _step(weights, zero, plan),
    )
    return max((_add(always, zero, plan, moment) for moment in moments), key=lambda each: each.total)


@dataclass(frozen=True)
class _Moment:
    name: str
    gathered: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    loss: int = 0
    buffers: int = 0


@dataclass(frozen=True)
class _Always:
    weights: int
    gradients: int
    optimizer: int
    buffers: int
    host: int


def _add(always: _Always, zero: Zero, plan: Plan, moment: _Moment) -> Estimate:
    return Estimate(
        zero=zero.name,
        stage=zero.stage,
        micro_batch=plan.micro_batch,
        moment=moment.name,
        weights=always.weights + moment.gathered,
        gradients=always.gradients + moment.gradients,
        optimizer=always.optimizer + moment.optimizer,
        activations=moment.activations,
        loss=moment.loss,
        buffers=always.buffers + moment.buffers,
        host=always.host,
    )


def _trained(weights: Weights, plan: Plan) -> int:
    return weights.lora if plan.lora_r else weights.total


def _always(weights: Weights, zero: Zero, plan: Plan) -> _Always:
    """Weights, master copy, Adam's states, and what DeepSpeed keeps between steps."""
    trained, width, gpus = _trained(weights, plan), plan.width, plan.gpus
    frozen = weights.total if plan.lora_r else 0
    mixed = width < 4
    if zero.stage == 0:
        return _Always((trained + frozen) * width, 0, trained * (8 + (4 if mixed else 0)), 0, 0)
    share = -(-trained // gpus)
    if zero.stage < 3:
        # In fp32 too, the optimizer has its own copy of its share.
        states = 12 * share
        kept = (trained + frozen) * width
        if zero.offload_optimizer:
            return _Always(kept, 0, 0, 0, states + 4 * share + width * share)
        return _Always(kept, 0, states, 0, 0)
    # Small tensors are not partitioned, and their share is stored in addition.
    split = -(-(trained + frozen) // gpus) * width
    small = weights.small * width
    # In fp32 too, there is a copy, because DeepSpeed's comparison of a device with its name always fails.
    gradients, states = share * width, share * 12
    bucket = zero.reduce_bucket * width
    host = 0
    if zero.offload_optimizer:
        host, states, gradients = 4 * share * 4 + gradients, 0, 0
    if zero.offload_param:
        host, split = host + split, 0
    return _Always(split + small, gradients, states, bucket, host)


def _kept(shape: Shape, activations: Activations, plan: Plan) -> int:
    """Bytes of activations at the end of the forward pass."""
    layer = activations.layer_input if plan.checkpointing else activations.layer
    return plan.tokens * (shape.layers * layer + activations.outside)


def _gathered(weights: Weights, zero: Zero, plan: Plan) -> int:
    """ZeRO-3 weights that are gathered while the loss is computed, because the backward pass needs them soon."""
    if zero.stage < 3 or plan.gpus == 1:
        return 0
    every = weights.total + weights.lora - weights.small
    return min(every, zero.reuse_distance // 2) * plan.width


def _accumulated(weights: Weights, zero: Zero, plan: Plan) -> int:
    """Gradients of earlier micro batches of the same step."""
    if plan.accumulation == 1 or zero.stage == 3:
        return 0
    trained = _trained(weights, plan) * plan.width
    return trained if zero.stage < 2 else trained // plan.gpus


def _forward(shape: Shape, weights: Weights, activations: Activations, zero: Zero, plan: Plan) -> _Moment:
    return _Moment(
        "forward",
        gathered=_gathered(weights, zero, plan),
        gradients=_accumulated(weights, zero, plan),
        activations=_kept(shape, activations, plan),
        loss=plan.tokens * activations.loss_forward,
    )


def _loss(shape: Shape, weights: Weights, activations: Activations, zero: Zero, plan: Plan) -> _Moment:
    forward = _forward(shape, weights, activations, zero, plan)
    return replace(forward, name="loss", loss=plan.tokens * activations.loss_backward)


def _buckets(zero: Zero, plan: Plan) -> int:
    """Stages 1 and 2 allocate their buckets with the first gradient; stage 3 always has them."""
    return zero.buckets * zero.reduce_bucket * plan.width if zero.stage in (1, 2) else 0


def _head(shape: Shape, weights: Weights, activations: Activations, zero: Zero, plan: Plan) -> _Moment:
    """The first gradient, that of the head, computed from the logits' gradient while all activations still exist."""
    gradient = 0 if plan.lora_r else weights.embedding * plan.width
    return _Moment(
        "head",
        gathered=_gathered(weights, zero, plan),
        gradients=_accumulated(weights, zero, plan) + gradient,
        activations=_kept(shape, activations, plan) + plan.tokens * activations.layer_input,
        loss=plan.tokens * shape.vocabulary * plan.width,
        buffers=_buckets(zero, plan),
    )


def _recompute(shape: Shape, weights: Weights, activations: Activations, zero: Zero, plan: Plan) -> _Moment:
    """The recomputation of the last layer, while the inputs of all layers still exist."""
    if not plan.checkpointing:
        return _Moment("recompute")
    gradient = 0 if plan.lora_r or zero.stage > 1 else weights.embedding * plan.width
    kept = shape.layers * activations.layer_input + activations.layer + activations.layer_work
    return _Moment(
        "recompute",
        gathered=_gathered(weights, zero, plan),
        gradients=_accumulated(weights, zero, plan) + gradient,
        activations=plan.tokens * kept,
        buffers=_buckets(zero, plan),
    )


def _backward(weights: Weights, activations: Activations, zero: Zero, plan: Plan) -> _Moment:
    """The end of the backward pass: all gradients exist, and one layer is being computed."""
    trained = _trained(weights, plan) * plan.width
    gradients = {0: trained, 1: trained, 2: trained // plan.gpus, 3: 0}[zero.stage]
    if zero.stage == 2 and zero.offload_optimizer:
        gradients = 0
    return _Moment(
        "backward",
        gathered=_gathered(weights, zero, plan),
        gradients=gradients,
        activations=plan.tokens * (activations.layer + activations.layer_work),
        buffers=_buckets(zero, plan),
    )


def _step(weights: Weights, zero: Zero, plan: Plan) -> _Moment:
    """The optimizer step: fp32 gradients in addition to those from which they are converted."""
    trained = _trained(weights, plan)
    share = -(-trained // plan.gpus)
    if zero.stage == 0:
        return _Moment("step", gradients=trained * (plan.width + (4 if plan.width < 4 else 0)))
    if zero.offload_optimizer:
        return _Moment("step")
    mixed = 4 if plan.width < 4 else 0
    if zero.stage == 3:
        return _Moment("step", gradients=min(share, zero.sub_group) * (4 + (plan.width if mixed else 0)))
    # The gradients of this share, a flat copy, and a flat fp32 copy; in stage 1, the other shares' gradients exist too.
    gradients = share * (2 * plan.width + mixed)
    return _Moment("step", gradients=max(gradients, trained * plan.width) if zero.stage == 1 else gradients)


@dataclass(frozen=True)
class Activations:
    """Bytes per token."""

    layer: int  # stored by one layer
    layer_input: int  # stored by a layer that is recomputed
    layer_work: int  # gradients that exist at the same time during a layer's backward pass
    outside: int  # embeddings, last norm
    loss_forward: int  # logits and similar tensors while the loss is computed
    loss_backward: int  # the same while the gradient of the loss is computed


def activations_per_token(
    shape: Shape, *, width: int, attention: str, length: int, lora_r: int = 0, adapter_width: int = 0
) -> Activations:
    """The bytes per token. With eager attention, they grow with the sequence length."""
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
    )


def _norm(shape: Shape, width: int) -> int:
    """One norm: what it stores of its input (and so of the residual stream), and its output, which others store."""
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
    kept = 2 * query + 2 * key_value  # queries, keys, values and the output
    head_norm = (query + key_value) * (4 + (width if width < 4 else 4)) if shape.family.head_norm else 0
    if attention == "sdpa":
        if shape.family.joined_rotary:
            kept += query
            # The values are a view of the fused product, which keeps queries and keys before the rotation alive.
            kept += query + key_value if shape.family.fused_qkv else 0
        return kept * width + head_norm + 4 * shape.heads
    # Keys and values are repeated for the query heads; the softmax is computed in fp32, then cast.
    repeated = 4 * query
    scores = shape.heads * length * (4 + (width if width < 4 else 0))
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
    copies = sum(columns for _, columns in linear) * adapter_width if adapter_width > width else 0
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
    """Read a DeepSpeed file. `auto` gets transformers' value. Raises RunnerError if the file cannot be read."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        section = dict(config.get("zero_optimization") or {})
        return make(path.stem, config, section, hidden)
    except (OSError, UnicodeDecodeError) as error:
        raise RunnerError(
            f"cannot read {path}", str(error), "pass the name of a preset, or the path of a JSON file"
        ) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise RunnerError(f"{path} is not a DeepSpeed configuration", str(error), "see docs/deepspeed.md") from error


def make(name: str, config: Mapping[str, Any], section: Mapping[str, Any], hidden: int) -> Zero:
    """The settings of a configuration. Source for `auto`: transformers 5.23, integrations/deepspeed.py."""
    stage = int(section.get("stage", 0))

    def number(key: str, default: int, auto: int) -> int:
        value = section.get(key, default)
        return auto if value == "auto" else int(value)

    overlap = section.get("overlap_comm")
    return Zero(
        name=name,
        stage=stage,
        reduce_bucket=number("reduce_bucket_size", 500_000_000, hidden * hidden),
        buckets=2 if overlap and stage in (1, 2) else 1,
        persistence=number("stage3_param_persistence_threshold", 100_000, 10 * hidden),
        reuse_distance=number("stage3_max_reuse_distance", 1_000_000_000, 1_000_000_000),
        sub_group=number("sub_group_size", 1_000_000_000, 1_000_000_000),
        offload_optimizer=_on(section.get("offload_optimizer")),
        offload_param=_on(section.get("offload_param")),
        checkpointing="activation_checkpointing" in config,
    )


def _on(value: Any) -> bool:
    return isinstance(value, dict) and value.get("device") in ("cpu", "nvme")
