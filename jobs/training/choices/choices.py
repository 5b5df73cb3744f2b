"""Each choice of a training as data: what, why, and the one option that is faster where there is one.

The functions are pure: the machine and the settings go in, a choice comes out. `settle` writes into the settings what
the user has left open; `report` says what became of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from training.choices.machine import Machine

MANY_CORES = 4  # from here on a process can spare some for reading ahead
ACTIVATION_SHARE = 0.3  # of the free memory that activations may take before they are computed twice


@dataclass(frozen=True)
class Choice:
    """`faster` is the option that would be quicker; empty where nothing is left on the table."""

    name: str
    value: str
    why: str
    faster: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.value} ({self.why})"


def attention(machine: Machine, settings: Mapping[str, Any], given: bool) -> Choice:
    """Which attention the model is asked for."""
    wanted = settings.get("attn_implementation")
    flash = "flash_attn" in machine.packages
    half = bool(settings.get("bf16") or settings.get("fp16"))
    ragged = _ragged(settings)
    if given:
        slow = machine.gpu and wanted in ("eager",)
        return Choice("attention", str(wanted), "as asked", "--attn_implementation sdpa" if slow else "")
    if not machine.gpu:
        return Choice("attention", "sdpa", "no GPU; documents and padded rows attend to themselves only")
    if flash and half and ragged and machine.capability >= (8, 0):
        return Choice("attention", "flash_attention_2", "flash_attn is installed and rows hold several documents")
    if not ragged:
        return Choice("attention", "sdpa", "all rows are full, where torch's own kernels are flash kernels too")
    why = "flash_attn is not installed" if not flash else "flash kernels want bf16 or fp16 and an Ampere GPU or newer"
    mend = "an image with flash_attn (those of NGC have it)" if not flash else "--bf16"
    return Choice("attention", "sdpa", f"{why}: rows of several documents pay for tokens x tokens", mend)


def _ragged(settings: Mapping[str, Any]) -> bool:
    """Whether rows differ in length or hold several documents."""
    if "packing" not in settings:
        return False  # clm cuts blocks of one length
    return not (settings.get("packing") and settings.get("packing_strategy") == "wrapped")


def precision(machine: Machine, settings: Mapping[str, Any]) -> Choice:
    """What the products are computed in."""
    if settings.get("bf16"):
        return Choice("precision", "bf16", "weights and sums in float32, products in bf16")
    if settings.get("fp16"):
        faster = "--bf16 (no loss scaling)" if machine.bf16 else ""
        return Choice("precision", "fp16", "with loss scaling", faster)
    if not machine.gpu:
        return Choice("precision", "fp32", "no GPU; bf16 gained nothing on the CPUs that were measured")
    if machine.bf16:
        return Choice("precision", "fp32", "as asked, or the library's default", "--bf16")
    return Choice("precision", "fp32", "this GPU has no bf16", "--fp16")


def optimizer(settings: Mapping[str, Any], deepspeed: Mapping[str, Any] | None) -> Choice:
    """Which optimizer steps."""
    wanted = str(getattr(settings.get("optim"), "value", settings.get("optim")))
    if deepspeed and "optimizer" in deepspeed:
        kind = deepspeed["optimizer"].get("type", "?")
        return Choice("optimizer", f"DeepSpeed's {kind}", "its configuration names one")
    if wanted == "adamw_torch_fused":
        return Choice("optimizer", wanted, "one kernel for all of a weight's update")
    if wanted == "adamw_torch":
        return Choice("optimizer", wanted, "several passes over each weight", "--optim adamw_torch_fused")
    return Choice("optimizer", wanted, "as asked")


def liger(machine: Machine, settings: Mapping[str, Any]) -> Choice:
    """Liger's Triton kernels for norms, rotary positions and gated layers."""
    if settings.get("use_liger_kernel"):
        return Choice("Liger kernels", "on", "as asked")
    if not machine.gpu:
        return Choice("Liger kernels", "off", "they run on GPUs only")
    if "liger_kernel" not in machine.packages:
        return Choice("Liger kernels", "off", "liger-kernel is not installed")
    off = "--use_liger_kernel --liger_kernel_config '{\"fused_linear_cross_entropy\": false}'"
    return Choice("Liger kernels", "off", "installed, not asked for", off)


def compilation(machine: Machine, settings: Mapping[str, Any]) -> Choice:
    """torch.compile."""
    if settings.get("torch_compile"):
        return Choice("compile", "on", "as asked: the first steps take minutes, restarts find the cache")
    if not machine.gpu:
        return Choice("compile", "off", "on a CPU it costs 20 to 50 s at the start and gained nothing that was sure")
    if _ragged(settings):
        return Choice("compile", "off", "rows change their length from step to step, and each length compiles anew")
    return Choice("compile", "off", "not asked for; every step has the same shapes", "--torch_compile")


def packing(machine: Machine, settings: Mapping[str, Any]) -> Choice | None:
    """How sequences share a row; None for a training that has no such option."""
    if "packing" not in settings:
        return None
    if settings.get("packing"):
        strategy = str(settings.get("packing_strategy"))
        told = {"wrapped": "rows are full; documents are cut", "bfd": "documents stay whole; those too long are cut"}
        return Choice("packing", strategy, told.get(strategy, "as asked"))
    why = "one document per row, as asked or by TRL's default; what padding there is costs no attention and no head"
    full = "--packing (fewer steps per epoch: it changes what a step sees)"
    return Choice("packing", "off", why, full if machine.gpu else "")


def checkpointing(machine: Machine, settings: Mapping[str, Any], activation_bytes: int | None) -> Choice:
    """Whether activations are kept or computed twice."""
    on = bool(settings.get("gradient_checkpointing") or settings.get("activation_checkpointing"))
    option = "--activation_checkpointing" if "activation_checkpointing" in settings else "--gradient_checkpointing"
    size = "" if activation_bytes is None else f"; a micro batch's take about {activation_bytes / 2**30:.1f} GiB"
    if not on:
        return Choice("activations", "kept", f"nothing is computed twice{size}")
    fits = activation_bytes is not None and activation_bytes < ACTIVATION_SHARE * machine.memory_bytes
    why = f"a third more work for less memory{size}, {machine.memory_bytes / 2**30:.0f} GiB are free"
    return Choice("activations", "computed twice", why, f"{option} false" if fits else "")


def workers(machine: Machine, settings: Mapping[str, Any]) -> Choice:
    """Processes that read ahead."""
    count = int(settings.get("dataloader_num_workers") or 0)
    if count:
        return Choice("dataloader workers", str(count), "they read ahead while the device computes")
    if not machine.gpu:
        return Choice("dataloader workers", "0", "the CPU that would read ahead is the one that trains")
    faster = "--dataloader_num_workers 2" if machine.cores_per_process >= MANY_CORES else ""
    return Choice("dataloader workers", "0", f"{machine.cores_per_process} cores for this process", faster)


def transport(machine: Machine) -> Choice:
    """What gradients travel over."""
    if machine.processes == 1:
        return Choice("transport", "none", "one process")
    if not machine.gpu:
        return Choice("transport", "gloo", "no GPU")
    environment = machine.environment or {}
    if machine.nodes == 1:
        off = environment.get("NCCL_P2P_DISABLE") == "1"
        why = "NCCL_P2P_DISABLE=1 sends it through host memory" if off else "one node: NVLink or PCIe"
        return Choice("transport", "NCCL, peer to peer" if not off else "NCCL, shared memory", why,
                      "unset NCCL_P2P_DISABLE" if off else "")  # fmt: skip
    if environment.get("NCCL_NET", "").lower() == "socket":
        return Choice("transport", "NCCL over TCP", "NCCL_NET=Socket", "unset NCCL_NET" if machine.fabric else "")
    if machine.network_plugin:
        return Choice("transport", f"NCCL by {machine.network_plugin}", "a network plugin is on the loader's path")
    if machine.fabric == "/dev/infiniband":
        if environment.get("NCCL_IB_DISABLE") == "1":
            return Choice("transport", "NCCL over TCP", "NCCL_IB_DISABLE=1", "unset NCCL_IB_DISABLE")
        return Choice("transport", "NCCL over InfiniBand", "its devices are seen here")
    if machine.fabric:
        why = f"{machine.fabric} is here, but no libnccl-net on LD_LIBRARY_PATH"
        mend = 'the annotation com.hooks.aws_ofi_nccl.enabled = "true" in the environment'
        return Choice("transport", "NCCL over TCP", why, mend)
    return Choice("transport", "NCCL over TCP", "no device of a faster network is seen in the container")


def compiled(environment: Mapping[str, str], prebuilt: tuple[str, ...]) -> Choice:
    """Where code that is compiled while the job runs would be kept, and what needs no compiling."""
    place = environment.get("TORCH_EXTENSIONS_DIR", "the home folder")
    built = f"in the image: {', '.join(prebuilt)}" if prebuilt else "the image has no operators of DeepSpeed prebuilt"
    return Choice("compiled code", place, built)
