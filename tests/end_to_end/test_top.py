"""`runner top`: what the nodes of a running run use, sampled by the payload."""

import json
import shutil
from pathlib import Path

import pytest

from runner.runs.attempt import Attempt
from tests.end_to_end.conftest import Runner, environment, write
from tests.waiting import until

WAIT = "until [ -e $RUNNER_RUN/go ]; do sleep 0.1; done"


@pytest.mark.uses("busybox")
def test_each_node_is_sampled_until_its_program_ends(cluster: Runner, project: Path, busybox_sqsh: Path) -> None:
    """Two nodes with two tasks each, in a container without Python: one sample per node, and the times of each node."""
    write(project, {"edf/box.toml": environment(busybox_sqsh)})
    launch = ("--env", "box", "--engine", "sandbox", "--nodes", "2", "--tasks-per-node", "2", "--", "sh", "-c", WAIT)
    run = cluster.launch(*launch, extra_environ={"RUNNER_NODE_SECONDS": "36000"})  # one sample only
    attempt = Attempt(run / "attempts/1")
    until(lambda: attempt.folder.is_dir() and len(attempt.usage) == 2, seconds=120)
    found = json.loads(cluster("top", run.name, "--json").stdout)
    assert (found["run"], found["attempt"]) == (run.name, 1)
    assert [node["node"] for node in found["nodes"]] == ["nid001", "nid002"]
    assert all(0 < node["memory_used_mib"] < node["memory_total_mib"] for node in found["nodes"])
    shown = cluster("top", "last").stdout.splitlines()
    assert shown[0].split() == ["NODE", "CPU", "%", "MEMORY", "AGE"]  # without GPUs
    assert [line.split()[0] for line in shown[1:]] == ["nid001", "nid002"]
    damaged = attempt.folder / "usage/1"
    damaged.write_text("\0\0")
    assert "node 1  ?      ?" in cluster("top", run.name).stdout
    damaged.unlink()
    assert "nodes with samples: 1; requested: 2" in cluster("top", run.name).stderr
    damaged.mkdir()  # a file that cannot be read
    failed = cluster("top", run.name, code=1).stderr
    assert f"cannot read {attempt.folder}/usage" in failed and "because: " in failed and "try: " in failed
    damaged.rmdir()
    shutil.rmtree(attempt.folder / "usage")
    failed = cluster("top", run.name, code=1).stderr
    assert f"{run.name} has no usage samples yet" in failed and "no node has sent a sample" in failed
    (run / "go").touch()
    cluster.wait(run.name, lambda status: status["state"] == "COMPLETED")
    failed = cluster("top", run.name, code=1).stderr
    assert failed.splitlines()[:2] == [f"runner: {run.name} is not running", "  because: its state is COMPLETED"]
    nodes = [(attempt.folder / f"times-node-{k}").read_text().split("\n")[:-1] for k in (0, 1)]
    assert [[line.split(" ", 1)[1] for line in lines] for lines in nodes] == [
        [f"task {k}", f"program {k}", f"program_end {k}"] for k in (0, 1)
    ]
    script = [line.split() for line in (attempt.folder / "times").read_text().splitlines()]
    assert [event for _, event in script] == ["submitted", "held", "started", "step", "step_end", "ended"]
    moments = [float(time) for time, _ in script]
    assert moments == sorted(moments)
    # busybox counts whole seconds
    assert all(moments[3] - 1 <= float(line.split()[0]) <= moments[4] for lines in nodes for line in lines)


def test_a_run_that_waits_or_has_a_script_of_its_own_has_no_samples(cluster: Runner, project: Path) -> None:
    waiting = cluster.launch("--engine", "host", "--sbatch=--hold", "--", "true")
    failed = cluster("top", waiting.name, code=1).stderr
    assert f"{waiting.name} has not started" in failed and "its state is PENDING: JobHeldUser" in failed
    cluster("cancel", waiting.name)
    write(project, {"own.sbatch": f"#!/bin/sh\n#SBATCH --ntasks=1\ntouch $RUNNER_RUN/begun\n{WAIT}\n"})
    own = cluster.launch("own.sbatch")
    until((own / "begun").exists, seconds=120)
    failed = cluster("top", own.name, code=1).stderr
    assert "runner samples only the tasks that runner itself starts" in failed and "try:     srun --jobid=" in failed
    (own / "go").touch()
