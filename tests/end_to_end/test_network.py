"""`runner launch network` on three virtual nodes, and what `runner doctor` says of it afterwards."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import Runner, write
from tests.waiting import SECONDS

pytestmark = pytest.mark.training


@pytest.fixture
def runner(cluster: Runner, tmp_path: Path) -> Runner:
    """The cluster, with this Python, which has torch, first on the PATH, and a promise of the site."""
    pytest.importorskip("torch")
    site = 'base = "generic-slurm"\n[values]\ngpus_per_node = 0\nnetwork_gbps = 8\n'
    write(tmp_path / "home", {".config/runner/sites/ours.toml": site})
    path = f"{Path(sys.executable).parent}{os.pathsep}{cluster.environ['PATH']}"
    return Runner(cluster.project, {**cluster.environ, "PATH": path, "OMP_NUM_THREADS": "1"}, "ours")


def diagnosis(runner: Runner, **options: Any) -> dict[str, str]:
    found = json.loads(runner("doctor", "--json", code=None, **options).stdout)
    return dict(next(each for each in found if each["name"] == "network"))


def test_three_nodes(runner: Runner) -> None:
    """Table, files and doctor; a foreign and a damaged result do not count."""
    assert diagnosis(runner)["verdict"] == "missing"
    words = ("--engine", "host", "--nodes", "3", "--cpus-per-task", "1")
    folder, log = runner.finished("network", *words, "--", "--largest", "64K")
    assert "nodes: 3 (nid001, nid002, nid003); processes per node: 1; gloo on CPU" in log
    assert "network_gbps of the site: 8 Gbit/s per node, which is 1 GB/s" in log
    assert "\noperation    message         time           bus      per node of site\n" in log
    assert log.count(" of site\n") == 1 and log.count("%\n") == 3 * 4
    assert "lowest pair: nid00" in log or "SLOW PAIR: nid00" in log
    assert "job.sbatch: nid003  rank 2\n" in log
    result = json.loads((folder / "network.json").read_text())
    assert set(result["pair"]["nodes"]) < {"nid001", "nid002", "nid003"}
    assert len(result["pair"]["groups"]) == 3  # each pair

    best = max(row["node"] for row in result["results"] if row["operation"] == "all-reduce")
    run = json.loads((folder / "run.json").read_text())
    for name, site, text in (("network-0008", "elsewhere", json.dumps(result)), ("network-0009", "ours", "{damaged")):
        write(runner.runs / name, {"run.json": json.dumps({**run, "site": site}), "network.json": text})
    found = diagnosis(runner)
    assert found["text"].startswith(f"{folder.name}, {result['time'][:16]} UTC, 3 nodes: {best:.3g} GB/s per node (")
    assert (
        f"({best:.0%} of what the site promises); slowest pair {' - '.join(result['pair']['nodes'])}: " in found["text"]
    )
    assert found["verdict"] == ("wrong" if best < 0.7 or result["pair"]["slow"] else "ok")

    result["pair"]["slow"] = True
    write(folder, {"network.json": json.dumps(result)})
    assert diagnosis(runner)["verdict"] == "wrong"
    result["pair"] = None  # of a single node
    write(folder, {"network.json": json.dumps(result)})
    assert diagnosis(runner)["verdict"] == "missing"
    assert diagnosis(runner, extra_environ={"RUNNER_RUNS": "/none"})["text"] == "not measured on ours yet"


def processes_of(run: Path, rank: int) -> list[int]:
    """The Python processes of a rank of the run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes()
            if {b"RANK=%d" % rank, b"RUNNER_RUN=" + bytes(run)} <= set(
                variables
            ) and b"/code/jobs/network.py" in command:
                found.append(int(folder.name))
    return found


def test_a_rank_that_is_killed_ends_the_job(runner: Runner) -> None:
    """The log names where the test stopped, or srun the rank; no result is left."""
    words = ("--engine", "host", "--nodes", "2", "--cpus-per-task", "1")
    folder = runner.launch("network", *words, "--", "--timeout", "20")
    deadline = time.monotonic() + SECONDS
    while " 16 KiB" not in (log := (folder / "job.log").read_text() if (folder / "job.log").exists() else ""):
        assert time.monotonic() < deadline, log
        time.sleep(0.2)
    (killed,) = processes_of(folder, 1)
    os.kill(killed, signal.SIGKILL)
    status = runner.wait(folder.name, lambda status: status["state"] not in ("PENDING", "RUNNING", "COMPLETING"))
    assert status["state"] == "FAILED" and status["exit_code"] in (1, 137)
    log = (folder / "job.log").read_text()
    named = (
        "network: the network test stopped during all-reduce of ",
        "task 1: Killed",
        "task 1: Exited with exit code 137",
    )
    assert any(words in log for words in named), log
    assert not (folder / "network.json").exists() and not processes_of(folder, 0)
