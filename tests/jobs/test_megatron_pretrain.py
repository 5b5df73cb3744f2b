"""jobs/megatron_pretrain.py runs a program of Megatron's as it is: it resumes, saves in time, asks for another attempt.

The program is a stand-in that does what Megatron-LM does at core_v0.19.0: the arguments and messages of
megatron/training/training.py (`training_log`, `checkpoint_and_decide_exit`), the handler of dist_signal_handler.py, and
the tracker file of checkpointing.py. Megatron itself needs a GPU.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_pretrain
from tests.end_to_end.conftest import Runner, clean_environ, write
from tests.jobs.conftest import JOBS, Launcher
from tests.waiting import until

PROGRAM = """
import argparse, os, signal, sys, time
from datetime import datetime
from pathlib import Path
import model_provider  # beside the program, as Megatron's own

parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("--save", "--load", "--exit-signal", "--data-cache-path", "--data-path"):
    parser.add_argument(name)
for name in ("--train-iters", "--seq-length", "--fail-at"):
    parser.add_argument(name, type=int, default=0)
parser.add_argument("--exit-signal-handler", action="store_true")
parser.add_argument("--slow", action="store_true")
args, _ = parser.parse_known_args()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
received = []
if args.exit_signal_handler:
    signal.signal(signal.Signals[args.exit_signal], lambda *_: received.append(1))
run, attempt = Path(os.environ["RUNNER_RUN"]), Path(os.environ["RUNNER_ATTEMPT"])
tracker = Path(args.load or "none") / "latest_checkpointed_iteration.txt"
iteration = int(tracker.read_text()) if tracker.is_file() else 0
if rank == 0:
    print(f"  successfully loaded checkpoint from {args.load} at iteration {iteration}" if iteration else
          f"WARNING: could not find the metadata file {tracker}", flush=True)


def together(what):
    # wait for all ranks, as Megatron's collectives do
    (attempt / f"{what}-{rank}").touch()
    while len(list(attempt.glob(f"{what}-*"))) < world:
        time.sleep(0.02)


together("loaded")
(run / f"up-{os.getpid()}").touch()


def save():
    if args.save and rank == 0:
        (Path(args.save) / f"iter_{iteration:07d}").mkdir(parents=True, exist_ok=True)
        (Path(args.save) / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    together("saved")


while iteration < args.train_iters:
    iteration += 1
    if iteration == args.fail_at:
        raise AssertionError("not enough micro-batches")
    milliseconds = 255940.5 if iteration == 1 else 87.0
    if rank == world - 1:
        print(
            f" [{datetime.now().strftime('%Y-%m-%d %H:%M:%S.%f')}] iteration {iteration:8d}/{args.train_iters:8d} |"
            f" consumed samples: {iteration * 288:12d} | elapsed time per iteration (ms): {milliseconds:.1f} |"
            f" throughput per GPU (TFLOP/s/GPU): {412.34:.1f} | learning rate: {1.638e-8:.6E} |"
            f" global batch size: {288:5d} | lm loss: {10.86954:.6E} | loss scale: {1.0:.1f} | grad norm: {0.5:.3f} |"
            f" number of skipped iterations: {0:3d} | number of nan iterations: {0:3d} |", flush=True)
    if args.slow and os.environ["RUNNER_ATTEMPT"].endswith("/1"):
        while not received:
            time.sleep(0.05)
    if received:
        save()
        print(f"(min, max) exiting program after receiving SIGTERM. [{iteration}]", flush=True)
        sys.exit(0)
save()
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A MEGATRON_HOME."""
    write(tmp_path / "megatron", {"pretrain_gpt.py": PROGRAM, "model_provider.py": "", "examples/t5/x.py": PROGRAM})
    return tmp_path / "megatron"


def alone(home: Path, run: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """One process, without torch."""
    environment = {**Launcher(run / "cache").environment(run), "MEGATRON_HOME": str(home)}
    return subprocess.run(
        (sys.executable, "-S", str(JOBS / "megatron_pretrain.py"), *words), capture_output=True, text=True, check=False,
        env={**environment, "RANK": "0", "WORLD_SIZE": "1", **variables},
    )  # fmt: skip


def test_the_benchmark_leaves_out_the_warm_up(home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = alone(home, run, "--benchmark", "pretrain_gpt.py", "--train-iters", "20", "--seq-length", "2048")
    assert done.returncode == 0, done.stderr
    assert "iteration       20/      20 | consumed samples:" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last == (
        "benchmark: 87.0 ms per iteration, 6,779,586 tokens/s, 412.3 TFLOP/s per GPU (median of 10 iterations after 10)"
    )
    figures = json.loads((run / "attempts/1/benchmark.json").read_text())
    assert figures["tokens_per_second"] == pytest.approx(288 * 2048 / 0.087)


def test_it_resumes_from_its_own_checkpoints(home: Path, tmp_path: Path) -> None:
    """The first attempt loads the checkpoint that the user named, and later ones the newest of the run."""
    run, old = tmp_path / "run", tmp_path / "old"
    old.mkdir()
    (old / "latest_checkpointed_iteration.txt").write_text("3")
    words = ("examples/t5/x.py", "--save", str(run / "checkpoints"), "--load", str(old), "--train-iters")
    first = alone(home, run, *words, "6")
    assert f"loaded checkpoint from {old} at iteration 3" in first.stdout, first.stderr
    second = alone(home, run, *words, "9")
    assert f"loaded checkpoint from {run}/checkpoints at iteration 6" in second.stdout, second.stderr


def test_a_restart_does_not_start_from_weights_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--finetune and its like set the iteration back to 0, or leave out what was saved with it."""
    monkeypatch.delenv("RUNNER_CACHE", raising=False)
    (tmp_path / megatron_pretrain.TRACKER).write_text("6")
    start = ("--finetune", "--no-load-optim", "--no-load-rng", "--ckpt-step", "3")
    words = ("--save", str(tmp_path), "--load", "/base", *start, "--bf16")
    own = ["--save", str(tmp_path), "--load", "/base", "--bf16", "--load", str(tmp_path)]
    monkeypatch.setattr(megatron_pretrain, "ATTEMPT", tmp_path / "attempts" / "2")
    assert megatron_pretrain.arguments(words) == own
    unsaved = ["--no-save-optim", "--no-load-optim"]
    assert megatron_pretrain.arguments([*unsaved, *words[:4], "--ckpt-step=3", "--bf16"]) == [*unsaved, *own]
    monkeypatch.setattr(megatron_pretrain, "ATTEMPT", tmp_path / "attempts" / "1")
    assert megatron_pretrain.arguments(words) == [*words, "--load", str(tmp_path)]


def test_the_last_value_of_an_argument_counts_however_it_is_written() -> None:
    """`--save=FOLDER` after the `--save FOLDER` of the job file: a restart loads from where Megatron saves."""
    words = ["--save", "a", "--save=b", "--seq-length=8", "--bf16"]
    assert megatron_pretrain.value(words, "--save") == "b"
    assert megatron_pretrain.value([*words, "--save", "c"], "--save") == "c"
    assert megatron_pretrain.number(words, "--seq-length") == 8
    assert megatron_pretrain.value(["--save"], "--save") is None


def test_an_error_of_the_program_is_an_error(home: Path, tmp_path: Path) -> None:
    done = alone(home, tmp_path / "run", "pretrain_gpt.py", "--train-iters", "2", "--fail-at", "1")
    assert done.returncode == 1
    assert "AssertionError: not enough micro-batches" in done.stderr
    missing = alone(tmp_path, tmp_path / "run", "pretrain_gpt.py")
    assert missing.returncode == 1 and f"there is no {tmp_path}/pretrain_gpt.py" in missing.stderr


def test_a_signal_before_megatron_listens_is_not_lost(home: Path, tmp_path: Path) -> None:
    """While Megatron is imported, it has no handler yet."""
    run = tmp_path / "run"
    (home / "model_provider.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGUSR2)\n")
    done = alone(
        home, run, "pretrain_gpt.py", "--exit-signal-handler", "--exit-signal", "SIGUSR2", "--train-iters", "2"
    )
    assert done.returncode == 75, done.stderr
    assert json.loads((run / "attempts/1/continue").read_text()) == {"step": 0}


@pytest.mark.training
def test_a_launch_saves_at_the_signal_and_restarts(home: Path, tmp_path: Path) -> None:
    """Two ranks under torchrun: the batch script's signal reaches Megatron's handler, and the next attempt resumes."""
    pytest.importorskip("torch")
    project = tmp_path / "project"
    job = (
        f'script = "{JOBS}/megatron_pretrain.py"\nlauncher = "torchrun"\ntrainer = "megatron-lm"\n'
        'arguments = ["pretrain_gpt.py", "--save", "{run}/checkpoints", "--load", "{run}/checkpoints",\n'
        '  "--exit-signal-handler", "--exit-signal", "SIGUSR2", "--train-iters", "5", "--slow"]\n'
        f'[env]\nMEGATRON_HOME = "{home}"\n[resources]\ntasks_per_node = 2\n[restart]\ntime_limit = 1\n'
    )
    write(project, {"runner.toml": 'environment = "plain"\n', "edf/plain.toml": "", "jobs/own.toml": job})
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    runner = Runner(project, {**clean_environ(tmp_path, os.environ), "PATH": path}, "local")
    run = runner.launch("own", "--engine", "host")
    until(lambda: len(list(run.glob("up-*"))) == 2)
    os.kill(int(runner.status(run.name)["job_id"].removeprefix("local-")), signal.SIGUSR2)
    runner.wait(run.name, lambda found: found["state"] not in ("RUNNING", "PENDING"))
    log = (run / "job.log").read_text()
    assert (run / "attempts/1/exit_code").read_text() == "75\n", log
    assert json.loads((run / "attempts/1/continue").read_text()) == {"step": 1}
    assert f"successfully loaded checkpoint from {run}/checkpoints at iteration 1" in log
    assert (run / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "5"
    status = runner.status(run.name)
    assert (status["state"], status["step"], status["total_steps"]) == ("COMPLETED", 5, 5), (
        "read from the last rank's log"
    )
