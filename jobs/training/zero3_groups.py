"""ZeRO-3 on another number of processes with DeepSpeed before 0.18: 0.17.6 is the newest that lives with torch 2.4.

Its universal form holds the first group of parameters only, where transformers makes two (with and without weight
decay), and its loader takes a node's own count of ranks for the whole one. Here the same form is written and read for
all groups, and this rank's shard, put together from it, is loaded as if it had been saved so: the two faults of
zero3_faults.py are not met. This file can go with the last image that has such a DeepSpeed.

As a program it is DeepSpeed's converter: python zero3_groups.py --input_folder FOLDER --output_folder FOLDER
Source: DeepSpeed 0.17.6, checkpoint/ds_to_universal.py, runtime/zero/stage3.py; mended in 0.18 by pull request 7585.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LOADER = "load_hp_checkpoint_state_from_checkpoint_dir_stage3"
STATES = ("exp_avg", "exp_avg_sq")


def are_needed() -> bool:
    """True for a DeepSpeed whose universal form of ZeRO-3 drops all groups of parameters but the first."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    return "param_shapes" in inspect.signature(getattr(DeepSpeedZeroOptimizer_Stage3, LOADER)).parameters


def work_around() -> None:
    """Load universal checkpoints of ZeRO-3 with all their groups in this process."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    setattr(DeepSpeedZeroOptimizer_Stage3, LOADER, load)


def extract(files: Sequence[str], shapes: Mapping[str, Any], count: int, folder: str, rank: int) -> None:
    """Cut the shard of one of `count` processes into a file per weight and state. Called as DeepSpeed calls its own."""
    import torch
    from deepspeed.checkpoint import ds_to_universal

    shard = torch.load(files[rank], map_location="cpu", weights_only=False)["optimizer_state_dict"]
    states = shard["optimizer_state_dict"]["state"]
    flat = {key: torch.cat([states[group][key] for group in sorted(states)]) for key in STATES}
    flat["fp32"] = torch.cat(shard["fp32_flat_groups"])
    offset = 0
    for name, shape in shapes.items():
        part = math.ceil(shape.numel() / count)
        own = max(0, min(part, shape.numel() - rank * part))  # without the padding
        for key, values in flat.items():
            ds_to_universal.dump_param_fragment(folder, 0, rank, key, values, name, offset, own)
        offset += part


def load(self: Any, checkpoint_dir: str, param_shapes: Sequence[Mapping[str, Any]]) -> None:
    """Load this rank's part. In the place of the method of ZeRO-3's optimizer; `param_shapes` is one per sub-group."""
    import torch
    import torch.distributed as distributed

    folder = Path(checkpoint_dir) / "zero"
    rank, count = (ask(group=self.dp_process_group) for ask in (distributed.get_rank, distributed.get_world_size))

    def own_part(name: str, key: str) -> Any:
        whole = torch.load(folder / name / f"{key}.pt", map_location="cpu", weights_only=False).view(-1)
        part = math.ceil(whole.numel() / count)
        own = whole[rank * part : (rank + 1) * part]
        return torch.nn.functional.pad(own, (0, part - own.numel()))

    def flat(key: str) -> list[Any]:
        return [torch.cat([own_part(name, key) for name in group]) for group in param_shapes]

    shard = torch.load(folder / "optimizer_state.pt", map_location="cpu", weights_only=False)
    optimizer = shard["optimizer_state_dict"]
    step = optimizer["state"][0].get("step")
    moments = zip(*(flat(key) for key in STATES), strict=True)
    optimizer["state"] = {
        number: {**dict(zip(STATES, values, strict=True)), "step": step.clone() if torch.is_tensor(step) else step}
        for number, values in enumerate(moments)
    }
    for number, group in enumerate(optimizer["param_groups"]):
        group["params"] = [sub for sub, home in self.sub_group_to_group_id.items() if home == number]
    shard["fp32_flat_groups"] = flat("fp32")
    self._rigid_load_state_dict(shard)


if __name__ == "__main__":
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.extract_zero_shards_stage3 = extract
    ds_to_universal.main(ds_to_universal.parse_arguments())
