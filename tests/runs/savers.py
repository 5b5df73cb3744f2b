"""Programs that save and exit on a signal as foreign trainers do, and the runs that start them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.project import Project
from runner.runs import trainer
from runner.runs.job import Job, Resources, Restart
from tests.runs.scripts import BARE, NOTHING, write_run
from tests.waiting import until

NO_PROJECT = Project(None, Path("/none"), Path("/none"))

# As Megatron-LM with --exit-signal-handler: the handler sets a flag, which is read after each iteration; it saves and
# exits with 0. It waits in the phase that PHASE names until the test creates the file `go`.
MEGATRON = r"""
import json, os, signal, sys, time
from pathlib import Path

run, rank = Path(os.environ["RUNNER_RUN"]), int(os.environ.get("RANK", "0"))
here = int(os.environ["RUNNER_ATTEMPT"].rsplit("/", 1)[1])
phase, received = os.environ.get("PHASE", "step"), []

def hold(name):
    if name == phase and here == 1:
        print(f"rank {rank} holds in {name}", flush=True)
        while not (run / "go").exists():
            time.sleep(0.02)

def save(step):
    if rank == 0:
        folder = run / f"checkpoints/iter_{step:07}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.json").write_text(json.dumps({"step": step}))
        (run / "checkpoints/latest_checkpointed_iteration.txt").write_text(str(step))
        print(f"  successfully saved checkpoint from iteration {step:7} to {run}/checkpoints", flush=True)

hold("start")
if "WITHOUT_HANDLER" not in os.environ:
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
worker = os.fork() if "WORKER" in os.environ else 1
if worker == 0:  # as a data loader of torch: it handles TERM, and ends
    signal.signal(signal.SIGTERM, lambda number, frame: (run / "worker-got-term").touch())
    while os.getppid() != 1 and not (run / "end").exists():
        time.sleep(0.05)
    os._exit(0)
tracker = run / "checkpoints/latest_checkpointed_iteration.txt"
step = int(tracker.read_text()) if tracker.exists() else 0
total = 400 if here == 1 else step + 4
print(f"rank {rank} from step {step}", flush=True)
while step < total:
    hold("step")
    time.sleep(float(os.environ.get("PAUSE", "0.05")))
    step += 1
    if rank == 0:
        print(f" iteration {step:8}/{total:8} | consumed samples: {step} | elapsed time per iteration (ms): 50.0"
              f" | lm loss: {9 / step:.6E} |", flush=True)
    if step % 4 == 0:
        hold("evaluation")
    if step % 4 == 0:
        hold("save")
        save(step)
    if received:
        save(step)
        print("exiting program after receiving SIGTERM.", flush=True)
        (run / "end").touch()
        sys.exit(0)
(run / "end").touch()
"""
PYTHON = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def saver_run(folder: Path, text: str, *, launcher: str = "none", processes: int = 1, **fields: Any) -> Path:
    """The run folder of a Python program that may restart once after a time limit."""
    env, attachment = fields.pop("env", {}), fields.pop("attachment", NOTHING)
    job = Job("train", BARE, script="train.py", launcher=launcher, env=env, restart=Restart(time_limit=1),
              resources=fields.pop("resources", Resources(tasks_per_node=processes)), **fields)  # fmt: skip
    run = write_run(folder, job, attachment, code={"train.py": text})
    (run / trainer.FILE).write_text(trainer.render(None, NO_PROJECT))
    return run


@contextmanager
def started(run: Path, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """The batch script, on this machine without a scheduler; it appends to job.log."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RUNNER_"))}
    with (run / "job.log").open("ab") as log:
        argv = ("bash", "job.sbatch")
        script = subprocess.Popen(argv, cwd=run, env={**kept, **PYTHON, **environ}, stdout=log, stderr=log,
                                  start_new_session=True)  # fmt: skip
        try:
            yield script
        finally:
            if script.poll() is None:
                os.killpg(script.pid, signal.SIGKILL)
                script.wait()


def log_of(run: Path) -> str:
    return (run / "job.log").read_text(errors="replace") if (run / "job.log").exists() else ""


def time_is_over(script: subprocess.Popen[bytes]) -> None:
    """What Slurm sends the batch script `save_seconds` before the time limit."""
    os.kill(script.pid, signal.SIGUSR2)


def wait_for_text(run: Path, text: str) -> None:
    until(lambda: text in log_of(run), f"{text!r} in {run}/job.log")


def asked(run: Path, attempt: int = 1) -> bool:
    """Whether a process of the attempt has got a signal to save."""
    return any(run.glob(f"attempts/{attempt}/save-signal-*"))
