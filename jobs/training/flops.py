"""Model FLOPs utilisation: what a model computes per token, and what a GPU could."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from training.errors import JobError

FORMULA = (
    "mfu = model FLOPs / seconds / (peak x processes); model FLOPs = (6 x trained + 4 x frozen weights) x tokens"
    " + 6 x layers x attention width x sum of squared sequence lengths (causal; a sliding window counts what it sees);"
    " weights: all but embedding tables, including the output head, of experts those that a token passes;"
    " recomputed activations, padding, saving and evaluating are not counted;"
    " mfu_palm counts attention in full, as the PaLM paper and nanoGPT do: 12 instead of 6, and no window"
)


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one GPU: dense bf16 (fp16 on a GPU without bf16), accumulating in fp32."""

    name: str  # words of torch.cuda.get_device_name()
    flops: float
    source: str


# The first match counts, so special names come before general ones. All without sparsity.
# fmt: off
PEAKS = (
    Peak("GB300", 2500e12, "NVIDIA GB300 NVL72 data sheet, 2025: 360 PFLOPS of 72 GPUs with sparsity, halved"),
    Peak("B300", 2250e12, "NVIDIA HGX B300 data sheet, 2025: 36 PFLOPS of 8 GPUs with sparsity, halved"),
    Peak("GB200", 2500e12, "NVIDIA GB200 NVL72 data sheet, 2024: 360 PFLOPS of 72 GPUs with sparsity, halved"),
    Peak("B200", 2250e12, "NVIDIA Blackwell data sheet, 2024: HGX B200, 36 PFLOPS of 8 GPUs with sparsity, halved"),
    Peak("GH200", 989.4e12, "NVIDIA GH200 data sheet, 2023: 1,979 TFLOPS with sparsity, halved"),
    Peak("H200 NVL", 835.5e12, "NVIDIA H200 data sheet, 2024: NVL, 1,671 TFLOPS with sparsity, halved"),
    Peak("H200", 989.4e12, "NVIDIA H200 data sheet, 2024: 1,979 TFLOPS with sparsity, halved"),
    Peak("H100 NVL", 835.5e12, "NVIDIA H100 data sheet, 2024: 1,671 TFLOPS with sparsity, halved"),
    Peak("H100 PCIe", 756e12, "NVIDIA H100 data sheet, 2023: 1,513 TFLOPS with sparsity, halved"),
    Peak("H100", 989.4e12, "NVIDIA H100 data sheet, 2023: SXM, 1,979 TFLOPS with sparsity, halved"),
    Peak("H800 PCIe", 756e12, "as H100 PCIe"),
    Peak("H800", 989.4e12, "as H100 SXM"),
    Peak("H20", 148e12, "NVIDIA H20 data sheet, 2023"),
    Peak("A100", 312e12, "NVIDIA A100 data sheet, 2021"),
    Peak("A800", 312e12, "as A100"),
    Peak("L40S", 362e12, "NVIDIA L40S data sheet, 2023"),
    Peak("L40", 181e12, "NVIDIA L40 data sheet, 2023"),
    Peak("L4", 121e12, "NVIDIA L4 data sheet, 2023: 242 TFLOPS with sparsity, halved"),
    Peak("A40", 149.7e12, "NVIDIA A40 data sheet, 2021"),
    Peak("RTX A6000", 154.8e12, "NVIDIA RTX A6000 data sheet, 2021: 309.7 TFLOPS with sparsity, halved"),
    Peak("A30", 165e12, "NVIDIA A30 data sheet, 2021"),
    Peak("A10G", 70e12, "NVIDIA A10G data sheet, 2021"),
    Peak("A10", 125e12, "NVIDIA A10 data sheet, 2021"),
    Peak("V100 PCIE", 112e12, "NVIDIA V100 data sheet, 2020: fp16, PCIe"),
    Peak("V100", 125e12, "NVIDIA V100 data sheet, 2020: fp16, SXM2"),
    Peak("T4", 65e12, "NVIDIA T4 data sheet, 2019: fp16"),
    Peak("RTX 4090", 165.2e12, "NVIDIA Ada GPU architecture, 2022: fp16 accumulating in fp32"),
    Peak("RTX 3090", 71e12, "NVIDIA GA102 GPU architecture, 2020: fp16 accumulating in fp32"),
    Peak("MI300X", 1307.4e12, "AMD Instinct MI300X data sheet, 2023"),
    Peak("MI300A", 980.6e12, "AMD Instinct MI300A data sheet, 2023"),
    Peak("MI250X", 191.5e12, "AMD Instinct MI250X data sheet, 2021: 383 TFLOPS of two dies, each a device"),
)
# fmt: on


# Kinds of layers in `layer_types` that multiply no pairs of tokens. Source: transformers 5.23, configuration_utils.py.
NO_ATTENTION = ("linear_attention", "mamba", "conv", "moe")


# Such a word after the name of a GPU makes it another, slower or faster one: a slice, a GeForce RTX 4090 Laptop GPU.
_OTHERS = {"mig", "laptop", "mobile", "max", "ti", "super", "d"}


def find_peak(name: str) -> Peak | None:
    """Return the peak of a GPU by the name that torch gives it; None if it is not known."""
    words = name.replace("-", " ").lower().split()
    if _OTHERS & set(words):
        return None
    return next((peak for peak in PEAKS if set(peak.name.lower().split()) <= set(words)), None)


def choose_peak(wanted: float | None) -> Peak | None:
    """Return `--peak_flops`, else that of this process's GPU by its name; None on a CPU or an unknown GPU."""
    if wanted is not None:
        if wanted <= 0:
            raise JobError(
                f"--peak_flops {wanted} is not valid",
                "it must be a positive number: the peak FLOP/s of one process",
                "--peak_flops 989e12",
            )
        return Peak("given", float(wanted), "--peak_flops")
    import torch

    return find_peak(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


@dataclass(frozen=True)
class Cost:
    """What a training step of a model computes."""

    trained: int  # weights in matrix products that learn
    frozen: int
    attention: int  # layers x attention width, of layers that see the whole sequence
    windowed: int = 0  # the same, of layers with a sliding window
    window: int | None = None  # tokens

    def flops(self, tokens: float, squared_lengths: float, windowed_lengths: float = 0.0) -> float:
        weights = (6 * self.trained + 4 * self.frozen) * tokens
        return weights + 6 * (self.attention * squared_lengths + self.windowed * windowed_lengths)

    def flops_palm(self, tokens: float, squared_lengths: float) -> float:
        weights = (6 * self.trained + 4 * self.frozen) * tokens
        return weights + 12 * (self.attention + self.windowed) * squared_lengths

    def lengths(self, batch: Any) -> tuple[Any, Any]:
        """Return the sum of the squared lengths of a batch's sequences, and of what layers with a window see of it."""
        return squared_lengths(batch), squared_lengths(batch, self.window) if self.windowed else 0

    def header(self, peak: Peak) -> dict[str, Any]:
        """Return how MFU is computed, for the header of an attempt in metrics.jsonl."""
        return {
            "formula": FORMULA, "peak_flops": peak.flops, "peak_source": peak.source,
            "trained_weights": self.trained, "frozen_weights": self.frozen,
            "layers_times_width": self.attention, "windowed_layers_times_width": self.windowed, "window": self.window,
        }  # fmt: skip


def of_model(model: Any) -> Cost:
    """Return the cost of a model of transformers, with or without an adapter, whole or split by ZeRO-3."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    tables = _tables(model)
    share = active_share(config)
    trained = frozen = 0
    for name, weight in model.named_parameters():
        if id(weight) in tables:
            continue
        count = getattr(weight, "ds_numel", None) or weight.numel()
        if type(weight).__name__ == "Params4bit":  # of bitsandbytes: two weights in each byte
            count *= 2 * weight.element_size()
        count = round(count * share) if ".experts." in name else count
        if weight.requires_grad:
            trained += count
        else:
            frozen += count
    layers, width = _attention_layers(config), _attention_width(config)
    sliding, window = _sliding_layers(config)
    return Cost(trained, frozen, (layers - sliding) * width, sliding * width, window)


def squared_lengths(batch: Any, window: int | None = None) -> Any:
    """Return the sum of the squared lengths of a batch's sequences, on the batch's device; with a window, what it sees.

    A packed row counts by its documents if positions start again in them: the sum of 2 i + 1 over the positions i is
    the square of a length.
    """
    ids = batch.get("input_ids")
    if ids is None or ids.dim() != 2:
        return 0
    positions, mask = batch.get("position_ids"), batch.get("attention_mask")
    if positions is not None:
        return (2 * (positions if window is None else positions.clamp(max=window - 1)) + 1).sum()
    if mask is not None and mask.dim() == 2:
        lengths = mask.sum(dim=1)
        seen = lengths if window is None else lengths.clamp(max=window)
        return (seen**2 + (lengths - seen) * (2 * seen - 1)).sum()
    length, seen = ids.shape[1], min(ids.shape[1], window or ids.shape[1])
    return ids.shape[0] * (seen**2 + (length - seen) * (2 * seen - 1))


def active_share(config: Any) -> float:
    """Return the share of its experts that a token passes."""

    def first(*names: str) -> int | None:
        return next((value for name in names if (value := getattr(config, name, None))), None)

    experts = first("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    chosen = first("num_experts_per_tok", "num_experts_per_token", "moe_k")
    return chosen / experts if experts and chosen else 1.0


def _attention_layers(config: Any) -> int:
    """Return how many layers have attention; linear attention costs a token nothing that grows with the length."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return sum(kind not in NO_ATTENTION for kind in kinds)


def _attention_width(config: Any) -> int:
    """Return the heads times the mean of the dimensions of queries and of values, which differ in DeepSeek's models.

    There, transformers' `head_dim` is that of the rotary part alone.
    """
    heads = config.num_attention_heads
    query, values = getattr(config, "qk_nope_head_dim", None), getattr(config, "v_head_dim", None)
    if query and values:
        return int(heads * (query + config.qk_rope_head_dim + values) // 2)
    return int(heads * (getattr(config, "head_dim", None) or config.hidden_size // heads))


def _sliding_layers(config: Any) -> tuple[int, int | None]:
    """Return how many layers have a sliding window, and its tokens."""
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return 0, None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return sum(kind == "sliding_attention" for kind in kinds), int(window)


def _tables(model: Any) -> set[int]:
    """Return the ids of weights that are looked up, not multiplied. A table that is also the output head is not one."""
    import torch

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kept = id(getattr(head, "weight", None))
    found = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    return found - {kept}
