"""What the tests of jobs/ share: jobs/ on the import path as a script has it, and real launches of two processes."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.jobs import small
from tests.jobs.attempts import Start
from tests.lab.ports import free_ports

JOBS = Path(__file__).resolve().parents[2] / "jobs"
sys.path.insert(0, str(JOBS))

# Small and quick: a model of the demo's kind, 4 sequences of 32 tokens per step, losses of every step.
SMALL = (
    f"--model_name_or_path={small.MODEL}",
    f"--dataset_name={small.CONVERSATIONS}",
    "--max_length=32",
    "--packing",
    "--packing_strategy=wrapped",
    "--per_device_train_batch_size=2",
    "--logging_steps=1",
    "--activation_checkpointing=false",
    "--gradient_checkpointing=false",
    "--learning_rate=1e-3",
)
STEPS = 12
TRAIN = (*SMALL, f"--max_steps={STEPS}", "--save_steps=3", "--deepspeed=zero2")


@dataclass(frozen=True)
class Attempt:
    """How one start of a job ended."""

    code: int
    output: str
    run: Path

    @property
    def losses(self) -> dict[int, float]:
        """loss by step, as metrics.jsonl has them; of a step taken twice, the later"""
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        return {entry["step"]: entry["loss"] for entry in map(json.loads, lines) if "loss" in entry}

    @property
    def steps(self) -> list[int]:
        """the steps of all attempts, in the order in which they were taken"""
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        return [entry["step"] for entry in map(json.loads, lines) if "loss" in entry]


@dataclass(frozen=True)
class Launcher:
    cache: Path
    script: str = "sft.py"

    def environment(self, run: Path, attempt: int = 1) -> dict[str, str]:
        """What the batch script sets, and nothing of an outer launch."""
        folder = run / "attempts" / str(attempt)
        folder.mkdir(parents=True, exist_ok=True)
        outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        kept = {name: value for name, value in os.environ.items() if name not in outer and not name.startswith("SLURM")}
        return {
            **kept,
            "RUNNER_RUN": str(run),
            "RUNNER_ATTEMPT": str(folder),
            "RUNNER_SAVE_AND_EXIT": str(folder / "save-and-exit"),
            "RUNNER_CACHE": str(self.cache),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def start(
        self,
        run: Path,
        *arguments: str,
        attempt: int = 1,
        processes: int = 2,
        prefix: Sequence[str] = (),
        **variables: str,
    ) -> subprocess.Popen[str]:
        """Start the script under torchrun, itself under `prefix`; stdout and stderr in one pipe."""
        command = (
            *prefix,
            *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"),
            *(f"--master-port={free_port()}", str(JOBS / self.script), *small.filled(arguments, self.cache)),
        )
        environment = {**self.environment(run, attempt), **variables}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def finish(self, run: Path, *arguments: str, seconds: float = 900, **options: Any) -> Attempt:
        """Run the script to its end; `options` are those of `start`."""
        with self.start(run, *arguments, **options) as process:
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return Attempt(process.returncode, output, run)

    sft = finish  # a launcher is one of sft unless it says otherwise

    def forked(self, run: Path, *arguments: str, attempt: int = 1, processes: int = 2, **variables: str) -> Attempt:
        """As `finish`, but the ranks are forks of a process that has imported everything: for tests whose subject is
        not torchrun. They take a quarter of the processor time."""
        script = self.script.removesuffix(".py")
        start = Start(run, arguments, processes, self.cache, attempt, variables, script)
        codes = start.begin().wait(900)
        return Attempt(next(filter(None, codes), 0), start.output, run)


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """Scripts that are run in this process settle threads and caches for it: not for the tests of other modules."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _failed_job_fails_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that is run in this process and fails raises SystemExit: `os._exit` would end pytest unreported."""
    from training import errors

    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(errors, "leave", leave)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all workers of this session."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def launcher(shared: Path) -> Launcher:
    """Launches of sft that share one cache, as the restarts of a run do."""
    return Launcher(shared / "cache")


@pytest.fixture(scope="session")
def whole(launcher: Launcher, shared: Path) -> Attempt:
    """A run that nothing interrupts; with prebuilt operators of DeepSpeed, it has no compiler and no home folder.

    The first worker that needs it trains, because a training takes a minute, and several files only read the result.
    """
    run, record = shared / "whole", shared / "whole.json"
    with (shared / "whole.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not record.is_file():
            shutil.rmtree(run, ignore_errors=True)
            bare = {"PATH": str(run), "HOME": "/nonexistent", "TORCH_EXTENSIONS_DIR": str(run / "extensions")}
            attempt = launcher.forked(run, *TRAIN, **(bare if prebuilt() else {}))
            assert attempt.code == 0, attempt.output
            record.write_text(json.dumps({"code": attempt.code, "output": attempt.output}))
    return Attempt(**json.loads(record.read_text()), run=run)


def prebuilt(*operators: str) -> bool:
    """Whether DeepSpeed carries these operators; those that a start on the CPU uses, where none is named."""
    from deepspeed.git_version_info import installed_ops

    return all(installed_ops.get(name) for name in operators or ("deepspeed_shm_comm", "fused_adam"))


def older_step(run: Path) -> int:
    """The step of the newest checkpoint but one."""
    return sorted(int(path.name.split("-")[1]) for path in (run / "checkpoints").glob("checkpoint-*"))[-2]


def free_port() -> int:
    return free_ports(1)[0]
