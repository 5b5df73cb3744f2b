"""One start of a training script, as the batch script starts it, and what came of it."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.jobs import small
from tests.lab.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
AFTER_A_FAILURE_SECONDS = 30.0
# A model of the demo's kind, 4 sequences of 32 tokens per step whatever the number of processes, losses of every step.
SMALL = (
    *(f"--model_name_or_path={small.MODEL}", f"--dataset_name={small.CONVERSATIONS}", "--max_length=32"),
    *("--packing", "--packing_strategy=wrapped", "--global_batch_size=4", "--per_device_train_batch_size=1"),
    *("--logging_steps=1", "--activation_checkpointing=false", "--gradient_checkpointing=false"),
    *("--learning_rate=1e-3", "--seed=42"),
)


# Ranks begin as forks of one process that has imported torch, transformers, TRL and DeepSpeed: 3 s of CPU, not 13.
FORKS = multiprocessing.get_context("forkserver")


class Ranks:
    """The processes of one start."""

    def __init__(self, processes: Sequence[ForkServerProcess]) -> None:
        self.processes = processes

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes if process.pid]

    def ended(self) -> bool:
        return all(process.exitcode is not None for process in self.processes)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def wait(self, seconds: float) -> list[int]:
        """Return the exit codes; as a launcher does, end the others soon after one has failed."""
        deadline = time.monotonic() + seconds
        while not self.ended():
            if any(process.exitcode for process in self.processes):
                deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE_SECONDS)
            if time.monotonic() > deadline:
                self.kill()
            time.sleep(0.02)
        return [process.exitcode or 0 for process in self.processes]


@dataclass(frozen=True)
class Start:
    """Where and how a training is started."""

    run: Path
    arguments: tuple[str, ...]
    processes: int
    cache: Path
    attempt: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)
    script: str = "sft"
    """or `clm`"""

    @property
    def folder(self) -> Path:
        return self.run / "attempts" / str(self.attempt)

    @property
    def output(self) -> str:
        return (self.folder / "output.log").read_text(errors="replace")

    def begin(self) -> Ranks:
        """Start all ranks; stdout and stderr go to attempts/N/output.log."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "output.log").write_bytes(b"")
        # read at import, in the process from which the ranks are forked
        fixed = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(self.cache / "huggingface"), "OMP_NUM_THREADS": "1"}
        FORKS.set_forkserver_preload(["tests.jobs.imported"])
        port = free_ports(1)[0]
        start = replace(self, arguments=small.filled(self.arguments, self.cache))
        processes = [FORKS.Process(target=rank, args=(start, number, port)) for number in range(self.processes)]
        before = dict(os.environ)
        os.environ.update(fixed, DS_ACCELERATOR="cpu")
        try:
            for process in processes:
                process.start()
        finally:  # the other tests of this process have their own
            os.environ.clear()
            os.environ.update(before)
        return Ranks(processes)

    def finish(self, seconds: float = 900) -> None:
        """Run to the end. Raises RuntimeError with the output where that is no good one."""
        codes = self.begin().wait(seconds)
        if any(codes):
            raise RuntimeError(f"{' '.join(self.arguments)}: exit codes {codes}\n{self.output}")

    def environment(self, number: int, port: int) -> dict[str, str]:
        """Return what the batch script and srun tell one rank."""
        size = str(self.processes)
        ranks = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        run = {"RUNNER_RUN": str(self.run), "RUNNER_ATTEMPT": str(self.folder), "RUNNER_CACHE": str(self.cache)}
        return {**ranks, **meeting, **run, **self.variables, "RUNNER_SAVE_AND_EXIT": str(self.folder / "save-and-exit")}


def rank(start: Start, number: int, port: int) -> None:
    """Be one rank: what `python jobs/SCRIPT.py ARGUMENTS` does, with its output in the attempt's file."""
    with (start.folder / "output.log").open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    for name in [name for name in os.environ if name.startswith(("SLURM", "TORCHELASTIC", "RUNNER_"))]:
        del os.environ[name]
    os.environ.update(start.environment(number, port))
    sys.path.insert(0, str(ROOT / "jobs"))
    from training.job import start as started

    with started(start.script) as job:
        code: int = importlib.import_module(start.script).main(start.arguments, job)
    sys.exit(code)


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
