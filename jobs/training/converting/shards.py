"""The weights of a DeepSpeed checkpoint, one at a time: ZeRO 0, 1, 2 and 3 of any number of processes.

Source of the formats: DeepSpeed 0.17.6 to 0.19.8, runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py. The
tests compare every weight with what DeepSpeed's own zero_to_fp32 gives.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from training.converting import pickles
from training.errors import JobError

ZERO_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(?:optim|model)_states\.pt")


Read = Callable[[], Any]  # returns a weight's tensor; nothing is kept


@dataclass(frozen=True)
class Shards:
    """All weights of a checkpoint, by the name that the model gives them."""

    what: str  # e.g. `ZeRO-3 of 4 processes, DeepSpeed 0.19.8`
    weights: Mapping[str, Read]


def open_shards(folder: Path) -> Shards:
    """Return what a folder of shards holds; no weight is read yet. Raises JobError if a part is missing."""
    found = _zero(folder)
    # torch.compile puts its own name in front of the model's.
    weights = {name.replace("_orig_mod.", ""): read for name, read in found.weights.items()}
    return Shards(found.what, weights)


def _zero(folder: Path) -> Shards:
    if (folder / "zero").is_dir():
        why = "only a training run can read this format; `convert` reads the shards in the checkpoint folder"
        raise JobError(f"{folder} is a universal checkpoint", why, "pass the `checkpoint-N` folder instead")
    states = _of_ranks(folder, "model") or _of_ranks(folder, "model", ("mp_rank_*_model_states.pt",))
    if not states:
        raise JobError(f"{folder} has no weights", "it contains no *_model_states.pt", "pass another checkpoint")
    version = states[0].get("ds_version", "of unknown version")
    shards = [state["optimizer_state_dict"] for state in _of_ranks(folder, "optim")]
    if not shards or not states[0].get("param_shapes"):
        return Shards(f"ZeRO-0, DeepSpeed {version}", _of_module(states[0]["module"]))
    stage, count = _zero_stage(shards[0].get("zero_stage", 1)), shards[0].get("partition_count", len(shards))
    count = max(count) if isinstance(count, (list, tuple)) else count
    if count != len(shards):
        raise JobError(
            f"{folder} has the shards of {len(shards)} processes, but {count} processes wrote the checkpoint",
            f"*_optim_states.pt of {count - len(shards)} processes are missing",
            "pass another checkpoint",
        )
    names = set(states[0].get("buffer_names") or ())
    weights = _of_module({name: value for name, value in states[0]["module"].items() if name in names})
    merge = _stage_3 if stage == 3 else _stage_1_and_2
    weights.update(merge(states, shards))
    for alias, name in dict(states[0].get("shared_params") or {}).items():
        if name in weights:
            weights[alias] = weights[name]
    return Shards(f"ZeRO-{stage} of {count} processes, DeepSpeed {version}", weights)


def _zero_stage(value: Any) -> int:
    """Return the stage of a number, or of a member of DeepSpeed's ZeroStageEnum, which is pickled by value or name."""
    if isinstance(value, pickles.Placeholder):
        value = value.arguments[0] if value.arguments else None
    stage = ZERO_STAGES.get(value) if isinstance(value, str) else value
    if stage not in ZERO_STAGES.values():
        raise JobError(f"unknown ZeRO stage {stage!r}", "DeepSpeed has stages 0 to 3", "pass another checkpoint")
    return int(stage or 0)


def _of_ranks(folder: Path, part: str, patterns: Sequence[str] = ("*zero_pp_rank_*_{}_states.pt",)) -> list[Any]:
    """Return the contents of one file per process, in the order of the ranks."""
    paths = [path for pattern in patterns for path in folder.glob(pattern.format(part))]
    ranks = {path: RANK.fullmatch(path.name) for path in paths}
    if any(match and int(match[2]) for match in ranks.values()) or (folder / "mp_rank_01_model_states.pt").exists():
        raise JobError(
            f"{folder} was written with tensor parallelism",
            "each process has a part of every weight, and only the program that split the weights can join them",
            "first convert the checkpoint with the program that wrote it",
        )
    in_order = sorted(ranks.items(), key=lambda item: int(item[1][1]) if item[1] else 0)
    return [pickles.load(path) for path, _ in in_order]


def _of_module(module: Mapping[str, Any]) -> dict[str, Read]:
    tensors = {name: value for name, value in module.items() if hasattr(value, "shape")}
    return {name: _whole(value, tuple(value.shape)) for name, value in tensors.items()}


def _whole(tensor: Any, shape: tuple[int, ...]) -> Read:
    return lambda: tensor.reshape(shape)


def _stage_1_and_2(states: Sequence[Any], shards: Sequence[Any]) -> dict[str, Read]:
    """The weights of a group are one long vector; each process has an equal part of it."""
    weights = {}
    frozen = states[0].get("frozen_param_fragments") or {}
    for name, shape in (states[0].get("frozen_param_shapes") or {}).items():
        if name in frozen:
            weights[name] = _whole(frozen[name], tuple(shape))
    parts = [shard["single_partition_of_fp32_groups"] for shard in shards]
    # Newer versions begin each weight at an aligned place.
    paddings = shards[0].get("param_alignment_paddings")
    for group, shapes in enumerate(states[0]["param_shapes"]):
        pieces = [part[group] for part in parts]
        gaps = paddings[group] if paddings is not None else [0] * len(shapes)
        offset = 0
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            weights[name] = _joined([pieces], offset, math.prod(shape), tuple(shape))
            offset += math.prod(shape) + gap
        _refuse_short(offset, sum(piece.numel() for piece in pieces))
    return weights


def _stage_3(states: Sequence[Any], shards: Sequence[Any]) -> dict[str, Read]:
    """Each process has an equal part of every weight, one after the other in its sub-groups."""
    weights = {}
    for name, shape in (states[0].get("frozen_param_shapes") or {}).items():
        fragments: list[Any] = [(state.get("frozen_param_fragments") or {}).get(name) for state in states]
        if all(fragment is not None for fragment in fragments):
            weights[name] = _joined([[fragment] for fragment in fragments], 0, fragments[0].numel(), tuple(shape))
    ranks = [shard["fp32_flat_groups"] for shard in shards]
    offset = 0
    for name, shape in [item for shapes in states[0]["param_shapes"] for item in shapes.items()]:
        part = math.ceil(math.prod(shape) / len(ranks))
        weights[name] = _joined(ranks, offset, part, tuple(shape))
        offset += part
    _refuse_short(offset, sum(piece.numel() for piece in ranks[0]))
    return weights


def _joined(rows: Sequence[Sequence[Any]], offset: int, count: int, shape: tuple[int, ...]) -> Read:
    """Return the weight made of `count` numbers, from `offset` on, of each row of pieces. The rest is padding."""

    def read() -> Any:
        import torch

        parts = [part for pieces in rows for part in _span(pieces, offset, count)]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        return flat[: math.prod(shape)].reshape(shape)

    return read


def _span(pieces: Sequence[Any], offset: int, count: int) -> list[Any]:
    """Return the parts of the concatenated pieces from `offset` to `offset + count`."""
    ends = list(accumulate(piece.numel() for piece in pieces))
    found = []
    for piece, end in zip(pieces, ends, strict=True):
        begin = end - piece.numel()
        first, last = max(offset, begin), min(offset + count, end)
        if first < last:
            found.append(piece.reshape(-1)[first - begin : last - begin])
    return found


def _refuse_short(needed: int, there: int) -> None:
    if needed > there:
        raise JobError(
            f"the shards contain {there} weights, but the model has {needed}",
            "the files belong to different checkpoints, or have an unknown layout",
            "pass another checkpoint",
        )
