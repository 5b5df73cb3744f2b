"""How much a model computes for a token, and how much a GPU could: model FLOPs utilisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from training.errors import JobError

FORMULA = (
    "MFU = model FLOPs / seconds / (peak x processes); model FLOPs = (6 x trained + 4 x frozen weights) x tokens"
    " + 6 x layers x attention width x sum of squared sequence lengths (causal: half of 12);"
    " weights: all but embedding tables, the output head among them, of experts those that a token passes;"
    " recomputed activations, padding, saving and evaluating are not counted"
)


@dataclass(frozen=True)
class Peak:
    """Dense bf16 (fp16 where a GPU has no bf16) of one GPU, accumulating in fp32."""

    name: str  # words that stand in torch.cuda.get_device_name()
    flops: float
    source: str


# The first that fits counts, so the particular stands before the general. All without sparsity.
# fmt: off
PEAKS = (
    Peak("GB200", 2500e12, "NVIDIA GB200 NVL72 data sheet, 2024: 360 PFLOPS of 72 GPUs with sparsity, halved"),
    Peak("B200", 2250e12, "NVIDIA Blackwell data sheet, 2024: HGX B200, 36 PFLOPS of 8 GPUs with sparsity, halved"),
    Peak("GH200", 989.4e12, "NVIDIA GH200 data sheet, 2023: 1,979 TFLOPS with sparsity, halved"),
    Peak("H200", 989.4e12, "NVIDIA H200 data sheet, 2024: 1,979 TFLOPS with sparsity, halved"),
    Peak("H100 NVL", 835.5e12, "NVIDIA H100 data sheet, 2024: 1,671 TFLOPS with sparsity, halved"),
    Peak("H100 PCIe", 756e12, "NVIDIA H100 data sheet, 2023: 1,513 TFLOPS with sparsity, halved"),
    Peak("H100", 989.4e12, "NVIDIA H100 data sheet, 2023: SXM, 1,979 TFLOPS with sparsity, halved"),
    Peak("H800", 989.4e12, "as H100 SXM"),
    Peak("H20", 148e12, "NVIDIA H20 data sheet, 2023"),
    Peak("A100", 312e12, "NVIDIA A100 data sheet, 2021"),
    Peak("A800", 312e12, "as A100"),
    Peak("L40S", 362e12, "NVIDIA L40S data sheet, 2023"),
    Peak("L40", 181e12, "NVIDIA L40 data sheet, 2023"),
    Peak("L4", 121e12, "NVIDIA L4 data sheet, 2023: 242 TFLOPS with sparsity, halved"),
    Peak("A40", 149.7e12, "NVIDIA A40 data sheet, 2021"),
    Peak("A30", 165e12, "NVIDIA A30 data sheet, 2021"),
    Peak("A10G", 70e12, "NVIDIA A10G data sheet, 2021"),
    Peak("A10", 125e12, "NVIDIA A10 data sheet, 2021"),
    Peak("V100", 125e12, "NVIDIA V100 data sheet, 2020: fp16, SXM2"),
    Peak("T4", 65e12, "NVIDIA T4 data sheet, 2019: fp16"),
    Peak("RTX 4090", 165.2e12, "NVIDIA Ada GPU architecture, 2022: fp16 accumulating in fp32"),
    Peak("RTX 3090", 71e12, "NVIDIA GA102 GPU architecture, 2020: fp16 accumulating in fp32"),
    Peak("MI300X", 1307.4e12, "AMD Instinct MI300X data sheet, 2023"),
    Peak("MI250X", 191.5e12, "AMD Instinct MI250X data sheet, 2021: 383 TFLOPS of two dies, each a device"),
)
# fmt: on


def find_peak(name: str) -> Peak | None:
    """Return the peak of a GPU by the name that torch gives it; None where it is not known."""
    words = name.replace("-", " ").lower().split()
    if "mig" in words:  # a slice of a GPU
        return None
    return next((peak for peak in PEAKS if set(peak.name.lower().split()) <= set(words)), None)


def choose_peak(wanted: float | None) -> Peak | None:
    """Return `--peak_flops`, else that of this process' GPU by its name; None on a CPU or an unknown GPU."""
    if wanted is not None:
        if wanted <= 0:
            raise JobError(f"--peak_flops {wanted} cannot be", "it is the FLOP/s of one process", "--peak_flops 989e12")
        return Peak("given", float(wanted), "--peak_flops")
    import torch

    return find_peak(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


@dataclass(frozen=True)
class Cost:
    """What training a model computes."""

    trained: int  # weights that a token passes through a matrix product, and that learn
    frozen: int
    attention: int  # layers x width of attention

    def flops(self, tokens: float, squared_lengths: float) -> float:
        return (6 * self.trained + 4 * self.frozen) * tokens + 6 * self.attention * squared_lengths


def of_model(model: Any) -> Cost:
    """Return the cost of a model of transformers, with an adapter or without, whole or split by ZeRO-3."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    tables = _tables(model)
    share = _active_share(config)
    trained = frozen = 0
    for name, weight in model.named_parameters():
        count = getattr(weight, "ds_numel", None) or weight.numel()
        if id(weight) in tables:
            continue
        count = round(count * share) if ".experts." in name else count
        if weight.requires_grad:
            trained += count
        else:
            frozen += count
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return Cost(trained, frozen, layers * width)


def _tables(model: Any) -> set[int]:
    """Return the weights that are looked up, not multiplied; a table that is the output head too is multiplied."""
    import torch

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kept = id(getattr(head, "weight", None))
    found = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    return found - {kept}


def _active_share(config: Any) -> float:
    """Return which share of its experts a token passes."""
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return chosen / experts if experts and chosen else 1.0
