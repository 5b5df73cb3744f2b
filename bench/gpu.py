"""`python -m bench.gpu`: the jobs on one GPU beside the stock scripts, in one command.

First the ceilings that this GPU really has: a plain bf16 matrix product and a copy of its memory. Then each case:
stock, stock well tuned, ours; the same model, data, order and seed; losses of every step compared. A floor is
predicted from the ceilings; what is measured stands beside it, and a profile says where the gap is. `--tiny` runs all
of it on a CPU with tiny models, which says that it works and nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.training.table import table
from bench.training.ways import ROOT, write_model

WARM = 3
TOLERANCE = 2e-2  # of losses, in bf16


@dataclass(frozen=True)
class Case:
    """A model, its work, and what must be reached."""

    name: str
    script: str  # clm or sft
    config: Mapping[str, Any]  # of transformers' AutoConfig.for_model
    length: int
    micro: int
    goal: str
    lora: bool = False
    recompute: bool = False  # activations computed twice: without it the case does not fit
    half_weights: bool = False  # weights and optimizer in bf16: of 8 billion, float32 and its sums do not fit


LLAMA = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0}
LLAMA_1B = {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "tie_word_embeddings": True}  # fmt: skip
LLAMA_8B = {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
CASES = (
    Case("gpt2-124m", "clm", GPT2, 1024, 32, "500,000 tokens/s"),
    Case("llama-1b", "sft", LLAMA_1B, 4096, 4, "50% MFU"),
    Case("llama-8b-lora", "sft", LLAMA_8B, 4096, 2, "50% MFU", lora=True, recompute=True, half_weights=True),
    Case("llama-8b", "sft", LLAMA_8B, 4096, 1, "50% MFU", recompute=True, half_weights=True),
)


def tiny(case: Case) -> Case:
    """The same case for a CPU, in seconds."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "n_embd": 32, "n_layer": 2, "n_head": 4}  # fmt: skip
    config = {name: small.get(name, value) for name, value in case.config.items()}
    return replace(case, config={**config, "vocab_size": 512}, length=64, micro=2)


def ceilings(small: bool) -> dict[str, float]:
    """Return TFLOP/s of a plain product and GB/s of a copy (read and written), the best of several tries."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size, kind = (512, torch.float32) if small else (8192, torch.bfloat16)
    one, other = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    source = torch.empty(2**22 if small else 2**30, dtype=torch.float32, device=device)
    target = torch.empty_like(source)

    def best(work: Any, times: int = 10) -> float:
        seconds = []
        for _ in range(times):
            _wait(device)
            start = time.perf_counter()
            work()
            _wait(device)
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    product = best(lambda: torch.mm(one, other))
    copy = best(lambda: target.copy_(source))
    return {"tflops": 2 * size**3 / product / 1e12, "copy_gbs": 2 * source.nbytes / copy / 1e9}


def _wait(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def flops_per_token(case: Case, parameters: int, embedding: int) -> float:
    """Return the products' operations per token of one step: 2 forward, 4 backward (2 for frozen weights), causal.

    An embedding that is only looked up costs none. What recomputation repeats is not counted: MFU is of useful work.
    """
    config = case.config
    layers = config.get("n_layer") or config["num_hidden_layers"]
    width = config.get("n_embd") or config["hidden_size"]
    tied = config.get("tie_word_embeddings", config["model_type"] == "gpt2")
    products = parameters if tied else parameters - embedding
    attention = 4 * layers * width * case.length / 2  # forward: scores and values, half of them masked
    return (4 if case.lora else 6) * products + 3 * attention


def ways(case: Case, gpu: bool) -> dict[str, tuple[str, list[str]]]:
    """Return, by name, the script and the arguments in which the ways differ."""
    flash = ["--attn_implementation=flash_attention_2"] if gpu and _installed("flash_attn") else []
    keep = _switch(case.recompute)
    half = ["--bf16=true"] if gpu else []
    if case.script == "clm":
        fused = ["--optim=adamw_torch_fused"]
        compiled = ["--torch_compile=true"] if gpu else []
        return {
            "run_clm": ("run_clm", []),
            "run_clm, tuned": ("run_clm", [*half, *fused, *compiled]),
            "clm": ("clm", [*half, *fused, "--deepspeed=none"]),
        }
    off = '--liger_kernel_config={"fused_linear_cross_entropy": false}'
    liger = ["--use_liger_kernel=true", off] if gpu and _installed("liger_kernel") else []
    weights = ["--dtype=bfloat16"] if case.half_weights and gpu else []
    # TRL's own defaults: activations are computed twice, and bf16
    return {
        "trl": ("trl", [*weights, *([] if gpu else ["--bf16=false"])]),
        "trl, tuned": ("trl", [*weights, *half, *flash, *liger, *keep, "--optim=adamw_torch_fused"]),
        "sft": ("sft", [*weights, *half, *liger, *keep, "--optim=adamw_torch_fused"]),
    }


def _installed(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is not None


def _switch(on: bool) -> list[str]:
    """Both names that versions of transformers have for it."""
    import dataclasses

    from trl import SFTConfig

    known = {field.name for field in dataclasses.fields(SFTConfig)}
    names = [name for name in ("gradient_checkpointing", "activation_checkpointing") if name in known]
    return [f"--{name}={str(on).lower()}" for name in names]


def shared(case: Case, model: Path, text: Path, steps: int, gpu: bool) -> list[str]:
    """Return the arguments that all ways of a case have."""
    words = [
        f"--model_name_or_path={model}",
        f"--per_device_train_batch_size={case.micro}",
        f"--max_steps={steps}",
        *("--learning_rate=1e-4", "--lr_scheduler_type=constant", "--seed=7", "--save_strategy=no"),
        *("--report_to=none", "--disable_tqdm=true", "--logging_steps=1000"),
        *([] if gpu else ["--use_cpu=true"]),
    ]
    if case.script == "clm":
        return [*words, f"--train_file={text / 'train.jsonl'}", f"--block_size={case.length}"]
    lora = ["--use_peft", "--lora_r=16", "--lora_alpha=32", "--lora_target_modules=all-linear"] if case.lora else []
    rows = [f"--dataset_name={text}", f"--max_length={case.length}", "--packing", "--packing_strategy=wrapped"]
    return [*words, *rows, *lora]


def once(script: str, work: Path, arguments: list[str], profile: bool) -> dict[str, Any]:
    """Return what one way measured, or `error`: a way that does not fit must not end the others."""
    run = work / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    case = run / "case.json"
    told = {"arguments": arguments, "run": str(run), "cache": str(work / "cache"), "warm": WARM, "profile": profile}
    case.write_text(json.dumps(told))
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("RUNNER_", "SLURM_"))}
    command = (sys.executable, "-m", "bench.training.on_device", script, str(case))
    environment = {**keep, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(run / "datasets")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        return {"error": (done.stderr.strip() or done.stdout.strip())[-1500:]}
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found


def measure(case: Case, work: Path, steps: int, gpu: bool) -> dict[str, Any]:
    """Return each way's figures of one case, and the count of its parameters."""
    model, text, parameters, embedding = write_model(work, case.name, case.config, half=case.half_weights and gpu)
    found: dict[str, Any] = {"parameters": parameters, "embedding": embedding, "ways": {}}
    for name, (script, words) in ways(case, gpu).items():
        arguments = [*shared(case, model, text, steps, gpu), *words]
        result = once(script, work, arguments, profile=False)
        if "error" not in result:
            result["profile"] = once(script, work, arguments, profile=True).get("profile", {})
        found["ways"][name] = result
        print(case.name, name, result.get("error", f"{_seconds(result):.3f} s a step"), flush=True)
    shutil.rmtree(model, ignore_errors=True)  # of 8 billion weights: 16 GB each
    return found


def _seconds(result: Mapping[str, Any]) -> float:
    return statistics.median(result["seconds"][WARM:])


def render(case: Case, found: Mapping[str, Any], top: Mapping[str, float]) -> list[str]:
    """Return a case's tables: figures beside the floor, and where the time goes."""
    work = flops_per_token(case, found["parameters"], found["embedding"])
    floor = top["tflops"] * 1e12 / work
    tokens = case.micro * case.length
    good = {name: way for name, way in found["ways"].items() if "error" not in way}
    reference = next(iter(good.values()), None)
    rows = []
    for name, way in good.items():
        rate = tokens / _seconds(way)
        far = max(abs(a - b) for a, b in zip(way["losses"], reference["losses"], strict=True)) if reference else 0.0
        mfu = 100 * rate * work / (top["tflops"] * 1e12)
        memory = f"{way['memory_gib']:.0f}" if "memory_gib" in way else ""
        equal = f"{far:.1e}" + ("" if far <= TOLERANCE else " TOO FAR")
        rows.append((name, f"{rate:,.0f}", f"{mfu:.0f}%", f"{floor / rate:.2f}", memory, equal))
    head = ("way", "tokens/s", "of the matrix product's rate", "times the floor", "GiB", "difference of losses")
    title = f"### {case.name}, {case.length} tokens x {case.micro}: goal {case.goal}; floor {floor:,.0f} tokens/s"
    lines = [title, "", *table(head, rows)]
    lines += [f"{name}: failed: {way['error'][-300:]}" for name, way in found["ways"].items() if "error" in way]
    groups = sorted({group for way in good.values() for group in way["profile"]})
    if groups:
        cells = [(group, *(f"{way['profile'].get(group, 0):.1f}" for way in good.values())) for group in groups]
        step = ("step, without the profiler", *(f"{_seconds(way) * 1000:.1f}" for way in good.values()))
        lines += ["", *table(("ms a step in", *good), [*cells, step])]
    return [*lines, ""]


def main(argv: list[str]) -> None:
    """Measure what was asked for; write results.json after each case and print its tables."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "runner-bench" / "gpu"
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--work", type=Path, default=cache, help=f"needs 40 GB for the 8B cases (default: {cache})")
    parser.add_argument("--cases", default=",".join(case.name for case in CASES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="tiny models, also on a CPU: to see that all of it works")
    options = parser.parse_args(argv)
    import torch

    gpu = torch.cuda.is_available()
    if not gpu and not options.tiny:
        raise SystemExit("no GPU is seen here; `--tiny` tries all of it on the CPU")
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if gpu else "CPU"
    top = ceilings(options.tiny)
    results: dict[str, Any] = {"device": device, "torch": torch.__version__, "tiny": options.tiny, "ceilings": top}
    print(
        f"{device}, torch {torch.__version__}: product {top['tflops']:.1f} TFLOP/s, copy {top['copy_gbs']:.0f} GB/s\n"
    )
    chosen = options.cases.split(",")
    for case in (tiny(case) if options.tiny else case for case in CASES if case.name in chosen):
        results[case.name] = measure(case, work, options.steps, gpu)
        (work / "results.json").write_text(json.dumps(results, indent=1))
        print("\n".join(render(case, results[case.name], top)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
