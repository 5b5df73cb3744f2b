"""What `runner memory` says is within a tenth of the bytes of all tensors in a real step, at every stage of ZeRO."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LLAMA = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 2048, "max_position_embeddings": 512,
}  # fmt: skip
WIDE = {**LLAMA, "hidden_size": 256, "intermediate_size": 768, "vocab_size": 4096, "num_hidden_layers": 6}


@pytest.mark.training
def test_paper_and_real_steps_of_two_processes_agree(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tomllib", reason="`runner memory` needs Python 3.11 or newer")
    found = compared(few(), tmp_path, 2)
    assert len(found) == 5
    assert {row["what"]: row["parameters_off"] for row in found if row["parameters_off"]} == {}
    assert {row["what"]: row["ratio"] for row in found if not 0.9 <= row["ratio"] <= 1.1} == {}


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


def compared(cases: Sequence[Mapping[str, Any]], work: Path, processes: int) -> list[dict[str, Any]]:
    """Measure all cases in one launch and put what `runner memory` says beside each."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    script = ROOT / "tests" / "jobs" / "measured_memory.py"
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
