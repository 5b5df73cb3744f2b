"""Every DeepSpeed preset takes two real training steps, with one process and with two.

python -m bench.training.presets [PRESET …] [--processes 1,2]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PRESETS = tuple(sorted(path.stem for path in (ROOT / "jobs" / "deepspeed").glob("*.json")))
WORDS = (
    *("--model_name_or_path=tiny-llama", "--dataset_name=python-docs", "--vocabulary_size=512", "--max_length=32"),
    *("--packing", "--packing_strategy=wrapped", "--per_device_train_batch_size=2", "--logging_steps=1"),
    *("--learning_rate=1e-3", "--max_steps=2", "--save_strategy=no"),
)


def train(preset: str, processes: int, work: Path) -> dict[str, Any]:
    """Return the losses of two steps, or the end of what the job said."""
    run = work / f"{preset}-{processes}"
    run.mkdir(parents=True)
    environment = {**os.environ, "RUNNER_RUN": str(run), "RUNNER_CACHE": str(work / "cache"), "OMP_NUM_THREADS": "1"}
    launch = (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"),
        *(str(ROOT / "jobs" / "sft.py"), *WORDS, f"--deepspeed={preset}"),
    )
    done = subprocess.run(launch, env=environment, capture_output=True, text=True)
    entries = []
    if done.returncode == 0:
        entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "preset": preset,
        "processes": processes,
        "losses": [entry["loss"] for entry in entries if "loss" in entry],
        "error": "" if done.returncode == 0 else (done.stdout + done.stderr)[-2000:],
    }


def measure(work: Path, quick: bool) -> dict[str, Any]:
    names = ("zero2", "zero3-offload", "alps-zero3") if quick else PRESETS
    return {"rows": [train(name, processes, work) for name in names for processes in (1, 2)]}


def render(found: Mapping[str, Any]) -> list[str]:
    rows = [
        f"| {row['preset']} | {row['processes']} | {', '.join(f'{loss:.4f}' for loss in row['losses']) or 'failed'} |"
        for row in found["rows"]
    ]
    return ["| preset | processes | loss of steps 1 and 2 |", "|---|---|---|", *rows]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.training.presets", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("presets", nargs="*", metavar="PRESET", help="default: all")
    parser.add_argument("--processes", default="1,2")
    arguments = parser.parse_args(argv)
    counts = [int(word) for word in arguments.processes.split(",")]
    with tempfile.TemporaryDirectory() as work:
        rows = []
        for name in arguments.presets or PRESETS:
            for processes in counts:
                rows.append(train(name, processes, Path(work)))
                print(render({"rows": rows[-1:]})[-1], rows[-1]["error"], flush=True)
    return 0 if all(len(row["losses"]) == 2 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
