"""`python -m bench.gpu`: the jobs on one GPU beside the stock scripts. bench/gpu.md lists the commands in order.

It measures what this GPU can do (a bf16 matrix product, a copy of its memory), then each case in several ways: the
stock script, the stock script well tuned, ours; with the same model, data, order and seed. Losses of every step are
compared. Each way is a process with a time limit. After each one results.json in `--out` is written, together with what
earlier commands have left there. `--tiny` runs all of it on a CPU with tiny models: it shows that it works, not speed.
"""

from __future__ import annotations

import argparse
import importlib.util
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

from bench.training.material import ROOT, write_model, write_text
from tests.figures import table

WARM = 4  # steps that are not counted: the first ones compile and fill caches
PROFILED = 2  # further steps under the profiler
TOLERANCE = 2e-2  # between losses, in bf16


@dataclass(frozen=True)
class Case:
    """A model, its work, and what must be reached. MFU is of the data sheet's dense bf16 peak, as in metrics.jsonl."""

    name: str
    script: str  # clm or sft
    config: Mapping[str, Any]  # of transformers' AutoConfig.for_model
    length: int
    micro: int
    goal: str
    packing: str = "wrapped"  # sft: wrapped, bfd, or none (rows of different length, padded)
    lora: bool = False
    recompute: bool = False  # activations are computed twice: the case does not fit otherwise
    half_weights: bool = False  # weights and optimizer in bf16: 8 billion in fp32 do not fit
    step: int = 0  # sequences of a step, where the ways differ in how many of them a forward pass takes


LLAMA = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0}
LLAMA_1B = {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "tie_word_embeddings": True}  # fmt: skip
LLAMA_8B = {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
CASES = (
    Case("gpt2-124m", "clm", GPT2, 1024, 32, "clm-compiled at least as fast as run_clm-tuned"),
    Case("gpt2-124m-micro", "clm", GPT2, 1024, 8, "clm-auto faster than clm-8", step=64),
    Case("llama-1b", "sft", LLAMA_1B, 4096, 4, "50% MFU"),
    Case("llama-1b-bfd", "sft", LLAMA_1B, 4096, 4, "at least as fast as trl-tuned", packing="bfd"),
    Case("llama-1b-rows", "sft", LLAMA_1B, 4096, 4, "at least as fast as trl-tuned", packing="none"),
    Case("llama-8b-lora", "sft", LLAMA_8B, 4096, 2, "50% MFU", lora=True, recompute=True, half_weights=True),
    Case("llama-8b", "sft", LLAMA_8B, 4096, 1, "50% MFU", recompute=True, half_weights=True),
)


def tiny(case: Case) -> Case:
    """Return the same case for a CPU, in seconds."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "n_embd": 32, "n_layer": 2, "n_head": 4}  # fmt: skip
    config = {name: small.get(name, value) for name, value in case.config.items()}
    return replace(case, config={**config, "vocab_size": 512}, length=64, micro=2)


def ways(case: Case, gpu: bool) -> dict[str, tuple[str, list[str]]]:
    """Return, by name, the script and the arguments in which the ways differ. The first is the reference of losses."""
    flash = ["--attn_implementation=flash_attention_2"] if gpu and _installed("flash_attn") else []
    half, fused = ([f"--bf16={str(gpu).lower()}"], ["--optim=adamw_torch_fused"])
    if case.step:
        words = [*half, *fused, "--deepspeed=none", f"--global_batch_size={case.step}"]
        sizes = [str(case.micro), "auto"]
        return {f"clm-{size}": ("clm", [*words, f"--micro_batch={size}"]) for size in sizes}
    if case.script == "clm":
        compiled = ["--torch_compile=true"]
        return {
            "run_clm-bf16": ("run_clm", half),
            "run_clm-tuned": ("run_clm", [*half, *fused, *compiled]),
            "clm": ("clm", [*half, *fused, "--deepspeed=none"]),
            "clm-compiled": ("clm", [*half, *fused, *compiled, "--deepspeed=none"]),
        }
    weights = ["--dtype=bfloat16"] if case.half_weights and gpu else []
    tuned = [*weights, *half, *flash, *fused, *_checkpointing(case.recompute)]
    found = {
        "trl": ("trl", [*weights, *half]),  # TRL's own defaults: activations are computed twice
        "trl-tuned": ("trl", tuned),
        "sft": ("sft", [*tuned, "--deepspeed=none"]),
    }
    if gpu and _installed("liger_kernel"):
        found["trl-liger"] = ("trl", [*tuned, "--use_liger_kernel=true"])
        found["sft-liger"] = ("sft", [*tuned, "--deepspeed=none", "--use_liger_kernel=true"])
    if gpu and _installed("deepspeed"):
        found["sft-zero2"] = ("sft", [*tuned, "--deepspeed=zero2"])
    return found


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _checkpointing(on: bool) -> list[str]:
    """Return it by all names that this version of TRL has for it."""
    import dataclasses

    from trl import SFTConfig

    known = {field.name for field in dataclasses.fields(SFTConfig)}
    names = [name for name in ("gradient_checkpointing", "activation_checkpointing") if name in known]
    return [f"--{name}={str(on).lower()}" for name in names]


def shared(case: Case, model: Path, text: Path, steps: int, gpu: bool) -> list[str]:
    """Return the arguments that all ways of a case have. A last batch that is not full is left out."""
    words = [
        *(f"--model_name_or_path={model}", f"--max_steps={steps}"),
        *([] if case.step else [f"--per_device_train_batch_size={case.micro}"]),
        *("--learning_rate=1e-4", "--lr_scheduler_type=constant", "--seed=7", "--save_strategy=no"),
        *("--report_to=none", "--disable_tqdm=true", "--logging_steps=1000", "--dataloader_drop_last=true"),
        *([] if gpu else ["--use_cpu=true"]),
    ]
    if case.script == "clm":
        return [*words, f"--train_file={text / 'train.jsonl'}", f"--block_size={case.length}"]
    packing = [] if case.packing == "none" else ["--packing", f"--packing_strategy={case.packing}"]
    lora = ["--use_peft", "--lora_r=16", "--lora_alpha=32", "--lora_target_modules=all-linear"] if case.lora else []
    return [*words, f"--dataset_name={text}", f"--max_length={case.length}", *packing, *lora]


def run_way(script: str, options: argparse.Namespace, log: Path, arguments: list[str]) -> dict[str, Any]:
    """Return what one way measured, or `error`. What it prints goes to `log` as it comes."""
    run = options.work / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    order = run / "order.json"
    profiled = 0 if options.no_profile else PROFILED
    order.write_text(json.dumps({"arguments": arguments, "run": str(run), "cache": str(options.work / "cache"),
                                 "plain": options.steps, "profiled": profiled}))  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RUNNER_", "SLURM_"))}
    environment = {**kept, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(run / "datasets")}
    command = (sys.executable, "-u", "-m", "bench.training.on_device", script, str(order))
    with log.open("w") as stream:
        try:
            code: Any = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=stream, stderr=stream, timeout=options.minutes * 60
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"none: ended after {options.minutes:g} minutes"
    result = run / "result.json"
    if code == 0 and result.is_file():
        found: dict[str, Any] = json.loads(result.read_text())
        taken = len(found["seconds"])
        return found if taken > WARM else {"error": f"only {taken} steps were taken, and {WARM} are not counted"}
    return {"error": f"exit code {code}; last lines: {log.read_text(errors='replace').strip()[-600:]}; see {log}"}


def measure(case: Case, options: argparse.Namespace, facts: Mapping[str, Any], gpu: bool) -> None:
    """Measure the ways that were asked for, write results.json after each, and print the case's tables."""
    model, parameters, embedding = write_model(options.work, case.config, half=case.half_weights and gpu)
    steps = options.steps + (0 if options.no_profile else PROFILED)
    text = write_text(
        options.work, (steps + 2) * (case.step or case.micro) * case.length, case.packing != "wrapped", case.length
    )
    for name, (script, words) in ways(case, gpu).items():
        if options.ways and name not in options.ways.split(","):
            continue
        log = options.out / f"{case.name}-{name}.log"
        result = run_way(script, options, log, [*shared(case, model, text, steps, gpu), *words])
        results = read(options.out)
        kept = results.setdefault(case.name, {"ways": {}})
        kept.update(parameters=parameters, embedding=embedding, length=case.length, micro=case.micro)
        if "error" not in result or "seconds" not in kept["ways"].get(name, {}):  # a figure outlives a later failure
            kept["ways"][name] = {**result, **facts, "words": words}
        write(options.out, results)
        said = result.get("error") or (
            f"{_seconds(result) * 1000:.0f} ms a step, {result['start_seconds']:.0f} s before the first"
        )
        print(case.name, name, said, flush=True)
    print("\n" + "\n".join(render(case, read(options.out)[case.name])), flush=True)


def read(out: Path) -> dict[str, Any]:
    file = out / "results.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return found


def write(out: Path, results: Mapping[str, Any]) -> None:
    partial = out / "results.json.partial"
    partial.write_text(json.dumps(results, indent=1))
    partial.rename(out / "results.json")


def _seconds(result: Mapping[str, Any]) -> float:
    return statistics.median(result["seconds"][WARM:])


def tokens_per_second(result: Mapping[str, Any]) -> float:
    """Return those of all counted steps together: with padding or bfd, steps have different numbers of tokens."""
    return float(sum(result["tokens"][WARM:]) / sum(result["seconds"][WARM:]))


def flops_per_token(case: Case, parameters: int, embedding: int) -> float:
    """Return the products' operations per token of one step: 2 forward, 4 backward (2 for frozen weights), causal.

    An embedding that is only looked up costs none. What is computed a second time does not count, nor does padding.
    """
    config = case.config
    layers = config.get("n_layer") or config["num_hidden_layers"]
    width = config.get("n_embd") or config["hidden_size"]
    tied = config.get("tie_word_embeddings", config["model_type"] == "gpt2")
    products = parameters if tied else parameters - embedding
    attention = 4 * layers * width * case.length / 2  # forward: scores and values, half of them masked
    return (4 if case.lora else 6) * products + 3 * attention


def render(case: Case, found: Mapping[str, Any]) -> list[str]:
    """Return a case's tables: what each way reached, and where the time goes."""
    case = replace(case, length=found["length"], micro=found["micro"])
    work = flops_per_token(case, found["parameters"], found["embedding"])
    good = {name: way for name, way in found["ways"].items() if "error" not in way}
    reference = next((good[name] for name in ways(case, False) if name in good), None)
    rows = []
    for name, way in good.items():
        rate = tokens_per_second(way)
        steps = min(len(way["losses"]), len(reference["losses"])) if reference else 0
        far = max(abs(a - b) for a, b in zip(way["losses"][:steps], reference["losses"][:steps], strict=True))
        sheet = f"{100 * rate * work / way['peak_flops']:.0f}%" if way.get("peak_flops") else ""
        product = f"{100 * rate * work / (way['tflops'] * 1e12):.0f}%"
        memory = f"{way['memory_gib']:.0f}" if "memory_gib" in way else ""
        equal = f"{far:.1e}" + ("" if far <= TOLERANCE else " TOO FAR")
        rows.append((name, way["device"], f"{rate:,.0f}", sheet, product, memory, equal))
    head = ("way", "device", "tokens/s", "MFU (of the data sheet's peak)", "of the measured matrix product", "GiB",
            "largest difference of losses")  # fmt: skip
    title = f"### {case.name}: {case.micro} x {case.length} tokens, packing {case.packing}; goal: {case.goal}"
    lines = [title, "", *table(head, rows)]
    lines += [f"{name}: failed: {way['error']}" for name, way in found["ways"].items() if "error" in way]
    profiled = {name: way for name, way in good.items() if way.get("profile")}
    groups = sorted({group for way in profiled.values() for group in way["profile"]})
    if groups:
        cells = [(group, *(f"{way['profile'].get(group, 0):.1f}" for way in profiled.values())) for group in groups]
        step = ("step, without the profiler", *(f"{_seconds(way) * 1000:.1f}" for way in profiled.values()))
        lines += ["", *table(("ms a step in", *profiled), [*cells, step])]
    return [*lines, ""]


def ceilings(small: bool) -> dict[str, float]:
    """Return TFLOP/s of a plain product and GB/s of a copy (read and written), the best of several tries."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size, kind = (512, torch.float32) if small else (8192, torch.bfloat16)
    one, other = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    source = torch.empty(2**22 if small else 2**30, dtype=torch.float32, device=device)
    target = torch.empty_like(source)

    def best(work: Any) -> float:
        seconds = []
        for _ in range(10):
            torch.cuda.synchronize() if device == "cuda" else None
            start = time.perf_counter()
            work()
            torch.cuda.synchronize() if device == "cuda" else None
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    product, copy = best(lambda: torch.mm(one, other)), best(lambda: target.copy_(source))
    return {"tflops": 2 * size**3 / product / 1e12, "copy_gbs": 2 * source.nbytes / copy / 1e9}


def main(argv: list[str]) -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "runner-bench" / "gpu"
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", default=",".join(case.name for case in CASES), help="default: all")
    parser.add_argument("--ways", default="", help="some of a case's ways, such as clm,clm-compiled (default: all)")
    parser.add_argument("--steps", type=int, default=20, help=f"of each way, the first {WARM} not counted")
    parser.add_argument("--minutes", type=float, default=5, help="time limit of each way (default: 5)")
    parser.add_argument(
        "--no-profile", action="store_true", help=f"leave out the last {PROFILED} steps, under a profiler"
    )
    parser.add_argument("--work", type=Path, default=cache, help=f"models and text: 20 GB for 8B (default: {cache})")
    parser.add_argument("--out", type=Path, help="folder of results.json and the logs (default: that of --work)")
    parser.add_argument("--print", action="store_true", help="print the tables of --out and measure nothing")
    parser.add_argument("--tiny", action="store_true", help="tiny models, also on a CPU: to see that all of it works")
    options = parser.parse_args(argv)
    options.work, options.out = options.work.resolve(), (options.out or options.work).resolve()
    for folder in (options.work, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    unknown = set(options.cases.split(",")) - {case.name for case in CASES}
    if unknown:
        parser.error(f"unknown case {sorted(unknown)[0]!r}; cases: {', '.join(case.name for case in CASES)}")
    chosen = [tiny(case) if options.tiny else case for case in CASES if case.name in options.cases.split(",")]
    if options.print:
        print("\n".join(line for case in chosen if case.name in (kept := read(options.out))
                        for line in render(case, kept[case.name])))  # fmt: skip
        return
    import torch

    gpu = torch.cuda.is_available()
    if not gpu and not options.tiny:
        raise SystemExit("no GPU found; `--tiny` tries all of it on the CPU")
    earlier = [way for case in read(options.out).values() for way in case["ways"].values()]
    if any(way["tiny"] != options.tiny for way in earlier):
        parser.error(
            f"{options.out} holds figures {'of full-size' if options.tiny else 'of tiny'} models: another --out"
        )
    sys.path.insert(0, str(ROOT / "jobs"))
    from training import flops

    device = torch.cuda.get_device_name() if gpu else "CPU"
    peak, top = (flops.find_peak(device) if gpu else None), ceilings(options.tiny)
    facts = {"device": device, "torch": torch.__version__, "tiny": options.tiny, **top,
             "peak_flops": peak.flops if peak else None}  # fmt: skip
    sheet = f"{peak.flops / 1e12:.0f} TFLOP/s ({peak.source})" if peak else "unknown"
    print(f"{device}, torch {torch.__version__}: measured product {top['tflops']:.1f} TFLOP/s, copy"
          f" {top['copy_gbs']:.0f} GB/s; data sheet: {sheet}\n", flush=True)  # fmt: skip
    for case in chosen:
        measure(case, options, facts, gpu)


if __name__ == "__main__":
    main(sys.argv[1:])
