"""`runner memory` beside real training steps: on a GPU max_memory_allocated, on a CPU the summed bytes of all tensors.

    python -m bench.training.memory [--quick] [--processes N] [--full]

On a GPU `--full` takes models of 100 million to 8 billion parameters; elsewhere they are small, one of each family.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LLAMA = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 2048, "max_position_embeddings": 512,
}  # fmt: skip
WIDE = {**LLAMA, "hidden_size": 256, "intermediate_size": 768, "vocab_size": 4096, "num_hidden_layers": 6}
GPT2 = {
    "model_type": "gpt2", "n_embd": 128, "n_layer": 3, "n_head": 4, "vocab_size": 1024, "n_positions": 256,
    "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
FAMILIES = ("mistral", "qwen2", "qwen3", "gemma", "phi3", "gpt_neox", "phi")
BIG = {
    "124M": {**GPT2, "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024},
    "1B": {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 4096,
           "tie_word_embeddings": True},
    "8B": {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 4096},
}  # fmt: skip


def deepspeed(stage: int, bucket: int = 100_000) -> dict[str, Any]:
    """A preset of the stage, its buckets as small as the model."""
    config: dict[str, Any] = json.loads((ROOT / "jobs" / "deepspeed" / f"zero{stage}.json").read_text(encoding="utf-8"))
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        if isinstance(config["zero_optimization"].get(key), int):
            config["zero_optimization"][key] = bucket
    return config


def case(config: Mapping[str, Any], stage: int, micro_batch: int, length: int, **more: Any) -> dict[str, Any]:
    bucket = more.pop("bucket", 100_000)
    return {
        "config": dict(config), "deepspeed": deepspeed(stage, bucket), "micro_batch": micro_batch, "length": length,
        "bf16": True, **more,
    }  # fmt: skip


def few() -> list[dict[str, Any]]:
    """What a test takes: each stage, states and activations as the larger part, checkpointing."""
    return [
        case(LLAMA, 0, 4, 128, bf16=False),
        case(WIDE, 1, 1, 64, bucket=1_000_000),
        case(LLAMA, 2, 2, 128, accumulation=2),
        case(LLAMA, 3, 4, 128),
        case({**LLAMA, "num_hidden_layers": 8}, 3, 4, 128, checkpointing=True),
    ]


def many() -> list[dict[str, Any]]:
    found = few()
    for bf16 in (False, True):
        found += [case(LLAMA, stage, 4, 128, bf16=bf16) for stage in range(4)]
        found += [case(WIDE, stage, 1, 64, bf16=bf16, bucket=1_000_000) for stage in range(4)]
        found += [case({**LLAMA, "model_type": kind, "pad_token_id": 0}, 0, 4, 128, bf16=bf16) for kind in FAMILIES]
        found.append(case(GPT2, 0, 4, 128, bf16=bf16))
        found.append(case({**LLAMA, "num_key_value_heads": 2}, 0, 2, 128, bf16=bf16, attention="eager"))
        found.append(case(LLAMA, 0, 4, 128, bf16=bf16, checkpointing=True))
    found += [case(LLAMA, stage, 2, 128, accumulation=2) for stage in range(4)]
    found += [case(LLAMA, stage, 2, 128, lora_r=8) for stage in (2, 3)]
    return found


def full() -> list[dict[str, Any]]:
    """For a GPU of 80 GiB or more."""
    bucket = 500_000_000
    return [
        *(case(BIG["124M"], stage, micro, 1024, bucket=bucket) for stage in (0, 2) for micro in (4, 16)),
        *(case(BIG["1B"], stage, 2, 4096, bucket=bucket) for stage in (0, 1, 2, 3)),
        case(BIG["1B"], 2, 8, 4096, bucket=bucket, checkpointing=True),
        case(BIG["8B"], 2, 1, 4096, bucket=bucket, checkpointing=True, lora_r=16),
    ]


def compared(cases: Sequence[Mapping[str, Any]], work: Path, processes: int) -> list[dict[str, Any]]:
    """Measure all cases in one launch and put what `runner memory` says beside each."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    script = ROOT / "bench" / "training" / "measured_memory.py"
    launch = (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", str(script)),
        *(str(work / "cases.json"), str(work / "found.json")),
    )
    done = subprocess.run(launch, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:] + done.stderr[-6000:])
    found = json.loads((work / "found.json").read_text(encoding="utf-8"))
    return [compare(one, result, work, processes) for one, result in zip(cases, found, strict=True)]


def compare(one: Mapping[str, Any], result: Mapping[str, Any], work: Path, processes: int) -> dict[str, Any]:
    said = on_paper(one, work, processes)
    phases = result["phases"]
    measured = max(phases[name] for name in ("forward", "backward", "step"))
    estimate = said["estimates"][0]
    return {
        "what": describe(one),
        "measured_bytes": measured,
        "estimated_bytes": estimate["total"],
        "ratio": estimate["total"] / measured,
        "worst_at": estimate["moment"],
        "parameters_off": said["parameters"] + (said["trained"] if one.get("lora_r") else 0) - result["parameters"],
    }


def on_paper(one: Mapping[str, Any], work: Path, processes: int) -> dict[str, Any]:
    """What the command says of a case."""
    config, file = work / "config.json", work / "deepspeed.json"
    config.write_text(json.dumps(one["config"]), encoding="utf-8")
    file.write_text(json.dumps(one["deepspeed"]), encoding="utf-8")
    words = [
        *(sys.executable, "-m", "runner", "memory", str(config), "--json", "--deepspeed", str(file)),
        *("--gpus", str(processes), "--micro_batch", str(one["micro_batch"]), "--length", str(one["length"])),
        *("--dtype", "bf16" if one["bf16"] else "fp32", "--attention", one.get("attention", "sdpa")),
        *("--accumulation", str(one.get("accumulation", 1)), "--lora_r", str(one.get("lora_r", 0))),
        *(("--activation_checkpointing",) if one.get("checkpointing") else ()),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def describe(one: Mapping[str, Any]) -> str:
    extras = [name for name in ("checkpointing",) if one.get(name)]
    extras += [f"{name} {one[name]}" for name in ("accumulation", "lora_r", "attention") if one.get(name)]
    kind, stage = one["config"]["model_type"], one["deepspeed"]["zero_optimization"]["stage"]
    size = one["config"].get("hidden_size") or one["config"].get("n_embd")
    precision = "bf16" if one["bf16"] else "fp32"
    return ", ".join([f"{kind} {size}", f"ZeRO-{stage}", precision, f"{one['micro_batch']} x {one['length']}", *extras])


def measure(work: Path, quick: bool) -> dict[str, Any]:
    """Figures for `nox -s bench -- train`: two processes, tensors summed."""
    return {"rows": compared(few() if quick else many(), work, 2)}


def render(found: Mapping[str, Any]) -> list[str]:
    rows = [
        f"| {row['what']} | {row['measured_bytes'] / 2**20:.1f} | {row['estimated_bytes'] / 2**20:.1f} |"
        f" {row['ratio']:.3f} | {row['worst_at']} |"
        for row in found["rows"]
    ]
    return ["| case | measured, MiB | on paper, MiB | ratio | worst at |", "|---|---|---|---|---|", *rows]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.training.memory", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="five cases")
    parser.add_argument("--full", action="store_true", help="models for a GPU")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args(argv)
    cases = full() if arguments.full else few() if arguments.quick else many()
    with tempfile.TemporaryDirectory() as work:
        found = compared(cases, Path(work), arguments.processes)
    print("\n".join(render({"rows": found})))
    return 0 if all(abs(row["ratio"] - 1) <= 0.1 and not row["parameters_off"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
