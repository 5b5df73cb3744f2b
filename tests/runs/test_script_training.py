"""Each launcher starts real processes that find each other: gloo on two ranks, through the whole batch script."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runner.runs.job import Job, Resources
from tests.runs.scripts import BARE, run_locally, write_run
from tests.waiting import until

pytestmark = pytest.mark.training
pytest.importorskip("torch")

TRAIN = """
import os, sys, torch, torch.distributed as distributed
distributed.init_process_group("gloo")
total = torch.ones(1)
distributed.all_reduce(total)
rank = distributed.get_rank()
line = f"rank {rank} of {distributed.get_world_size()} sum {int(total)} local {os.environ['LOCAL_RANK']} {sys.argv[1:]}"
open(os.environ["RUNNER_RUN"] + f"/seen-{rank}", "w").write(line)
os.write(1, f"{line}\\n".encode())  # in one piece: print writes line and newline apart, and ranks share the log
distributed.destroy_process_group()
"""
# saves when it is told to, and says so as jobs do
SAVE = """
import os, signal, sys, time
got = []
signal.signal(signal.SIGUSR2, lambda *_: got.append("USR2"))
open(os.environ["RUNNER_RUN"] + "/ready-" + os.environ["RANK"], "w").close()
while not got: time.sleep(0.02)
open(os.environ["RUNNER_RUN"] + "/saved-" + os.environ["RANK"], "w").close()
if os.environ["RANK"] == "0":
    open(os.environ["RUNNER_ATTEMPT"] + "/continue", "w").write("{}")
time.sleep(1)
sys.exit(75)
"""
ENVIRON = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "RANK": "7", "WORLD_SIZE": "77"}


def job(launcher: str, *arguments: str) -> Job:
    return Job("train", BARE, script="jobs/train.py", arguments=arguments, launcher=launcher,
               resources=Resources(tasks_per_node=2))  # fmt: skip


@pytest.mark.parametrize("launcher", ["torchrun", "srun", "accelerate"])
def test_two_ranks_meet(tmp_path: Path, launcher: str) -> None:
    """Whatever ranks an outer hook has left behind; the arguments are the script's, options that look like ours too."""
    arguments = ("--nproc-per-node=3", "it's $HOME", "--", "-x")
    run = write_run(tmp_path, job(launcher, *arguments), code={"jobs/train.py": TRAIN})
    done = run_locally(run, extra_environ=ENVIRON, timeout=600)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        expected = f"rank {rank} of 2 sum 2 local {rank} {list(arguments)}"
        assert (run / f"seen-{rank}").read_text() == expected
    assert f"rank 0 of 2 sum 2 local 0 {list(arguments)}\n" in done.stdout
    if launcher == "torchrun":
        logs = [path.read_text() for path in (run / "attempts/1/node-0").rglob("1/stdout.log")]
        assert logs == [f"rank 1 of 2 sum 2 local 1 {list(arguments)}\n"]
        assert "rank 1" not in done.stdout


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_the_signal_reaches_every_rank_and_spares_the_launcher(tmp_path: Path, launcher: str) -> None:
    """torchrun has no handler for USR2 and would die of it; its workers' 75 would become a 1."""
    run = write_run(tmp_path, job(launcher), code={"jobs/train.py": SAVE})
    with (run / "job.log").open("wb") as log:
        child = subprocess.Popen(("bash", "job.sbatch"), cwd=run, env={**os.environ, **ENVIRON}, stdout=log, stderr=log)
        until(lambda: all((run / f"ready-{rank}").exists() for rank in (0, 1)), "both ranks")
        child.send_signal(signal.SIGUSR2)
        code = child.wait(600)
    assert code == 75, (run / "job.log").read_text()
    assert (run / "saved-0").exists()
    assert (run / "saved-1").exists()
