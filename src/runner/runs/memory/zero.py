"""The numbers of a DeepSpeed configuration that memory hangs on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from runner.errors import RunnerError

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


@dataclass(frozen=True)
class Zero:
    """Sizes are in elements. Defaults: DeepSpeed 0.19.8, runtime/zero/config.py."""

    name: str
    stage: int = 0
    reduce_bucket: int = 500_000_000
    buckets: int = 1  # two where gradients travel beside the computation
    prefetch: int = 50_000_000
    persistence: int = 100_000
    reuse_distance: int = 1_000_000_000
    sub_group: int = 1_000_000_000
    offload_optimizer: bool = False
    offload_param: bool = False
    checkpointing: bool = False  # the file has a section activation_checkpointing


def read(path: Path, hidden: int) -> Zero:
    """The numbers of a file; `auto` is what transformers makes of it. Raises RunnerError where it cannot be read."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        section = dict(config.get("zero_optimization") or {})
        return make(path.stem, config, section, hidden)
    except (OSError, UnicodeDecodeError) as error:
        raise RunnerError(f"cannot read {path}", str(error), "name a preset or a JSON file") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise RunnerError(f"{path} is no DeepSpeed configuration", str(error), "see docs/deepspeed.md") from error


def make(name: str, config: Mapping[str, Any], section: Mapping[str, Any], hidden: int) -> Zero:
    """Source of what `auto` becomes: transformers 5.23, integrations/deepspeed.py."""
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
        prefetch=number("stage3_prefetch_bucket_size", 50_000_000, int(0.9 * hidden * hidden)),
        persistence=number("stage3_param_persistence_threshold", 100_000, 10 * hidden),
        reuse_distance=number("stage3_max_reuse_distance", 1_000_000_000, 1_000_000_000),
        sub_group=number("sub_group_size", 1_000_000_000, 1_000_000_000),
        offload_optimizer=_on(section.get("offload_optimizer")),
        offload_param=_on(section.get("offload_param")),
        checkpointing="activation_checkpointing" in config,
    )


def _on(value: Any) -> bool:
    return isinstance(value, dict) and value.get("device") in ("cpu", "nvme")
