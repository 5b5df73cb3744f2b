"""The shape of a language model, from its config.json or from flags. The weights are not read."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from runner.errors import RunnerError

GIB = 1024**3
# GiB that torch.cuda reports (total_memory), rounded down. For other GPUs, use `--gpu-memory`.
USABLE_GIB = {
    "H200": 139,
    "GH200": 94,
    "H100": 79,
    "A100 80GB": 79,
    "A100": 39,
    "L40S": 44,
    "L4": 22,
    "A10": 22,
    "A10G": 22,
    "V100 32GB": 31,
    "V100": 15,
    "T4": 14,
}
# Memory besides tensors: CUDA's context and kernels, NCCL's buffers, and fragmentation. An assumption.
RESERVED_BYTES = int(1.5 * GIB)
HOLES = 0.05


def memory_bytes(gpu: str) -> int | None:
    """The memory of a GPU by its name (`H100`, `NVIDIA A100 80GB`), or None."""
    wanted = gpu.upper().replace("NVIDIA", " ").replace("-", " ").replace("_", " ").split()
    best = max(
        (name for name in USABLE_GIB if {*name.upper().split()} <= {*wanted}), key=len, default=None
    )
    return None if best is None else USABLE_GIB[best] * GIB


def parse_size(text: str) -> int:
    """Parse `80`, `80GiB`, `80G`, `80GB` (decimal) or `81559MiB` to bytes. Raises RunnerError for other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|G|GB|MiB|M|MB)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise RunnerError(
            f"--gpu-memory {text!r} is not a size",
            "a size is a number of GiB, or a number with GiB, GB or MiB",
            "--gpu-memory 80GiB",
        )
    unit = (match[2] or "GiB").upper()
    factor = {"GIB": GIB, "G": GIB, "GB": 10**9, "MIB": 1024**2, "M": 1024**2, "MB": 10**6}[unit]
    return int(float(match[1]) * factor)


def fits_on(needed_bytes: int, gpu_bytes: int) -> bool:
    return needed_bytes * (1 + HOLES) + RESERVED_BYTES <= gpu_bytes


@dataclass(frozen=True)
class Family:
    """The properties of a model_type of transformers; families.toml has their values."""

    norm: str = "rms"  # rms (separate Python operations, in fp32) or layer (one kernel)
    gated: bool = True  # gate and up, then down; otherwise up and down
    activation: str = (
        "fused"  # fused: one kernel, stores its input; written: gelu_new, in five operations
    )
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    head_norm: bool = False  # queries and keys are normalised head by head
    learned_positions: bool = False
    norms: int = 2  # before attention and MLP; 1 if both read the same norm
    tied: bool = False  # if the config does not set it
    float_norm: bool = False  # the product with the norm's weight is computed in fp32 too
    fused_qkv: bool = False  # one matrix for queries, keys and values
    # queries and keys are concatenated after the rotation, which costs a copy of the output
    joined_rotary: bool = False
    parallel: bool = False  # attention and MLP read the same input
    head_dim: int = 0  # if the config does not set it; 0: hidden / heads
    fused_gate: bool = False  # one matrix for gate and up


@cache
def families() -> dict[str, Family]:
    """The known families, by model_type."""
    tables = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
    return {name: Family(**table) for name, table in tables.items()}


# gpt2's config uses its own names; gpt_neox's intermediate size and phi's heads have the same names as llama's.
OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "max_position_embeddings": ("n_positions", "n_ctx"),
}


@dataclass(frozen=True)
class Shape:
    """A decoder with identical layers."""

    name: str
    family: Family
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    positions: int
    tied: bool
    dropout: float  # of residuals and embeddings; 0: none

    @property
    def query(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Width of all key heads together; that of the values is the same."""
        return self.kv_heads * self.head_dim


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config.json. Raises RunnerError if it is not one."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RunnerError(
            f"cannot read {path}", str(error), "give a config.json or a model's folder"
        ) from error
    except ValueError as error:
        raise RunnerError(
            f"{path} is not JSON", str(error), "give the model's config.json"
        ) from error
    if not isinstance(config, dict):
        raise RunnerError(
            f"{path} is not the config of a model",
            "it must contain a JSON object",
            "give the model's config.json",
        )
    return config


def find_config(model: str, environment: Mapping[str, str], prefetched: Path | None = None) -> Path:
    """The config.json of a file, a folder, or a model in Hugging Face's cache or `prefetched`. Raises RunnerError."""
    path = Path(model).expanduser()
    if path.exists():
        return path / "config.json" if path.is_dir() else path
    hubs = dict.fromkeys(hub for hub in (hub_cache(environment), prefetched) if hub)
    pattern = f"models--{model.replace('/', '--')}/snapshots/*/config.json"
    found = sorted(
        (path for hub in hubs for path in hub.glob(pattern)), key=lambda each: each.stat().st_mtime
    )
    if found:
        return found[-1]
    named = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", model)
    first = f"hf download {model} config.json" if named else "check the path"
    raise RunnerError(
        f"there is no model {model!r} on this machine",
        "there is no file or folder of that name, and no config.json of such a model in "
        + " or ".join(map(str, hubs)),
        f"{first}, or give flags such as --hidden_size instead",
    )


def hub_cache(environment: Mapping[str, str]) -> Path:
    """The folder in which Hugging Face caches models. Source: huggingface_hub, constants.py."""
    if environment.get("HF_HUB_CACHE"):
        return Path(environment["HF_HUB_CACHE"])
    cache = environment.get("XDG_CACHE_HOME") or str(
        Path(environment.get("HOME") or "/") / ".cache"
    )
    return Path(environment.get("HF_HOME") or f"{cache}/huggingface") / "hub"


def make_shape(config: Mapping[str, Any], name: str) -> Shape:
    """The shape that a config describes. Raises RunnerError for an unknown family or missing values."""
    kind = str(config.get("model_type") or "llama")
    if kind not in families():
        raise RunnerError(
            f"cannot estimate the memory of {name}",
            f"its model_type is {kind!r}, but runner supports only {', '.join(families())}",
            "use the most similar of these types, for example --model_type llama, and give the model's sizes as flags",
        )
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if int(config.get(key) or 0) > 1:
            raise RunnerError(
                f"cannot estimate the memory of {name}",
                f"it is a mixture of experts ({key} = {config[key]})",
                "measure it instead: runner launch JOB -- --micro_batch auto",
            )
    hidden = _number(config, "hidden_size", name)
    heads = _number(config, "num_attention_heads", name)
    family = _with_biases(families()[kind], kind, config)
    default_inner = None if family.gated else 4 * hidden
    dropout = max(
        float(config.get(key) or 0) for key in ("resid_pdrop", "hidden_dropout", "embd_pdrop")
    )
    return Shape(
        name=name,
        family=family,
        hidden=hidden,
        layers=_number(config, "num_hidden_layers", name),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or family.head_dim or hidden // heads),
        intermediate=_number(config, "intermediate_size", name, default_inner),
        vocabulary=_number(config, "vocab_size", name),
        positions=_number(config, "max_position_embeddings", name, 0),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        dropout=dropout if "resid_pdrop" in config or kind != "gpt2" else 0.1,
    )


def _with_biases(family: Family, kind: str, config: Mapping[str, Any]) -> Family:
    activation = str(config.get("activation_function") or config.get("hidden_act") or "")
    if activation and not family.gated:
        family = replace(
            family, activation="written" if activation in ("gelu_new", "gelu_fast") else "fused"
        )
    if kind in ("llama", "mistral", "qwen3", "gemma") and config.get("attention_bias"):
        family = replace(family, qkv_bias=True, output_bias=True)
    if kind == "gpt_neox" and config.get("use_parallel_residual") is False:
        family = replace(family, parallel=False)
    if kind == "gpt_neox" and config.get("attention_bias") is False:
        family = replace(family, qkv_bias=False, output_bias=False)
    return replace(family, mlp_bias=True) if config.get("mlp_bias") else family


def _number(config: Mapping[str, Any], key: str, name: str, default: int | None = None) -> int:
    for each in (key, *OTHER_NAMES.get(key, ())):
        value = config.get(each)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RunnerError(
                f"{name}: {each} cannot be {value!r}",
                "it must be a whole number, 1 or greater",
                "fix the config or the flag",
            )
        return value
    if default is None:
        raise RunnerError(
            f"{name} does not set {key}",
            "the model's shape depends on that value",
            f"add --{key} NUMBER, or use a complete config.json",
        )
    return default


@dataclass(frozen=True)
class Weights:
    """Numbers of weights, in elements."""

    layer: int  # of one layer
    embedding: int  # the largest tensor: vocabulary x hidden
    small: int  # in tensors below the threshold, which ZeRO-3 does not partition
    total: int
    lora: int

    @property
    def trained(self) -> int:
        """Those that get gradients: with LoRA, the adapters only."""
        return self.lora or self.total


def count_weights(shape: Shape, *, threshold: int = 0, lora_r: int = 0) -> Weights:
    """The weights. `threshold`: tensors with fewer elements count as small; `lora_r`: LoRA on all linear layers."""
    layer, outside = list(layer_tensors(shape)), outer_tensors(shape)
    small_in_layer, small_outside = (
        sum(each for each in part if each < threshold) for part in (layer, outside)
    )
    return Weights(
        layer=sum(layer),
        embedding=shape.vocabulary * shape.hidden,
        small=shape.layers * small_in_layer + small_outside,
        total=shape.layers * sum(layer) + sum(outside),
        lora=shape.layers
        * sum(lora_r * (rows + columns) for rows, columns, _ in linear_layers(shape)),
    )


def linear_layers(shape: Shape) -> Iterator[tuple[int, int, bool]]:
    """(out, in, whether it has a bias) of each linear layer of one block, as LoRA sees them."""
    family, hidden, inner = shape.family, shape.hidden, shape.intermediate
    separate = (shape.query, shape.key_value, shape.key_value)
    for width in (sum(separate),) if family.fused_qkv else separate:
        yield width, hidden, family.qkv_bias
    yield hidden, shape.query, family.output_bias
    up = (inner, inner) if family.gated else (inner,)
    for width in (sum(up),) if family.fused_gate else up:
        yield width, hidden, family.mlp_bias
    yield hidden, inner, family.mlp_bias


def layer_tensors(shape: Shape) -> Iterator[int]:
    """Elements of each tensor of one layer."""
    family = shape.family
    for rows, columns, bias in linear_layers(shape):
        yield rows * columns
        if bias:
            yield rows
    if family.head_norm:
        yield from (shape.head_dim, shape.head_dim)
    yield from family.norms * _norm_tensors(shape)


def outer_tensors(shape: Shape) -> tuple[int, ...]:
    """Elements of the embeddings, the last norm and the head."""
    family, embedding = shape.family, shape.vocabulary * shape.hidden
    positions = (shape.positions * shape.hidden,) if family.learned_positions else ()
    head = () if shape.tied else (embedding,)
    bias = (shape.vocabulary,) if family.head_bias else ()
    return (embedding, *positions, *_norm_tensors(shape), *head, *bias)


def _norm_tensors(shape: Shape) -> tuple[int, ...]:
    return (shape.hidden, shape.hidden) if shape.family.norm == "layer" else (shape.hidden,)
