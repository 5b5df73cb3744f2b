"""One start of the training script, as the batch script starts it, and what came of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUTER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# A model of the demo's kind, 4 sequences of 32 tokens per step whatever the number of processes, losses of every step.
SMALL = (
    *("--model_name_or_path=tiny-llama", "--dataset_name=python-docs", "--vocabulary_size=512", "--max_length=32"),
    *("--packing", "--packing_strategy=wrapped", "--global_batch_size=4", "--per_device_train_batch_size=1"),
    *("--logging_steps=1", "--activation_checkpointing=false", "--gradient_checkpointing=false"),
    *("--learning_rate=1e-3", "--seed=42"),
)


@dataclass(frozen=True)
class Start:
    """Where and how a training is started."""

    run: Path
    arguments: tuple[str, ...]
    processes: int
    cache: Path
    attempt: int = 1

    @property
    def folder(self) -> Path:
        return self.run / "attempts" / str(self.attempt)

    @property
    def output(self) -> str:
        return (self.folder / "output.log").read_text(errors="replace")

    def popen(self) -> subprocess.Popen[bytes]:
        """Start it under torchrun; stdout and stderr go to attempts/N/output.log."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = (
            *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={self.processes}"),
            *(f"--master-port={free_port()}", str(ROOT / "jobs" / "sft.py"), *self.arguments),
        )
        with (self.folder / "output.log").open("wb") as log:
            return subprocess.Popen(command, env=self._environment(), stdout=log, stderr=subprocess.STDOUT)

    def finish(self, seconds: float = 600) -> None:
        """Run to the end. Raises RuntimeError with the output where that is no good one."""
        with self.popen() as process:
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        if code != 0:
            raise RuntimeError(f"{' '.join(self.arguments)}: exit code {code}\n{self.output}")

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in OUTER and not name.startswith("SLURM")}
        flag = {"RUNNER_SAVE_AND_EXIT": str(self.folder / "save-and-exit"), "RUNNER_CACHE": str(self.cache)}
        mine = {"RUNNER_RUN": str(self.run), "RUNNER_ATTEMPT": str(self.folder), **flag}
        return {**kept, **mine, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def entries(run: Path) -> list[dict[str, Any]]:
    """Return the entries with a loss, in the order in which they were written; a line cut by a kill is passed over."""
    found = []
    path = run / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if "loss" in entry:
            found.append(entry)
    return found


def losses(run: Path) -> dict[int, float]:
    """Return the loss by step; of a step taken twice, the later."""
    return {entry["step"]: entry["loss"] for entry in entries(run)}


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
             for row in (heads, ["-" * width for width in widths], *rows)]  # fmt: skip
    return "\n".join(lines)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
