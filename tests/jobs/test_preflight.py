"""The preflight tries a node before the program starts: with real processes and gloo, and the words of nvidia-smi."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from runner.site_files import load_site

pytest.importorskip("torch")
pytestmark = pytest.mark.training

FOLDER = Path(__file__).resolve().parents[2] / "jobs/training"


def loaded(name: str) -> Any:
    """A file of the preflight as a module."""
    specification = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


preflight, worker = loaded("preflight"), loaded("preflight_worker")


def on_nodes(attempt: Path, nodes: int, port: int, **environ: str) -> list[tuple[int, str]]:
    """Exit code and words of the preflight on that many nodes with one process each, all on this machine."""
    settings = {"RUNNER_NODES": str(nodes), "RUNNER_PROCESSES": "1", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "RUNNER_PREFLIGHT_SECONDS": "240"}  # fmt: skip
    children = [
        subprocess.Popen(
            (sys.executable, str(FOLDER / "preflight.py"), str(attempt), str(node)),
            env={**os.environ, **settings, **environ}, stderr=subprocess.PIPE, text=True,
        )
        for node in range(nodes)
    ]  # fmt: skip
    said = [child.communicate(timeout=600)[1] for child in children]
    return [(child.returncode, words) for child, words in zip(children, said, strict=True)]


def test_two_nodes_are_measured_together_and_too_slow_for_a_site_that_promises_more(tmp_path: Path) -> None:
    """One start for both: what was measured is told, and judged against the promise. Two nodes: nobody is to blame."""
    found = on_nodes(tmp_path, 2, 24100 + os.getpid() % 3000, RUNNER_EXPECT_ACROSS="100000")
    for code, said in found:
        assert code == preflight.UNFIT
        assert "all-reduce across 2 nodes: " in said and "the site promises 100000" in said
    assert not list(tmp_path.glob("bad-node-*"))
    result = json.loads((tmp_path / "preflight/1-0.json").read_text())
    assert result["gemm"] > 0 and result["across"] > 0
    results = {0: preflight.read(tmp_path / "preflight/0-0.json")}
    assert "GB/s across 2 nodes" in preflight.judge_across(tmp_path / "preflight", 0, 2, results)


def test_processes_within_a_node(tmp_path: Path) -> None:
    ((code, said),) = on_nodes(tmp_path, 1, 28100 + os.getpid() % 1000, RUNNER_PROCESSES="2")
    assert code == 0
    assert "TFLOP/s" in said and "GB/s within the node" in said


def judged(folder: Path, node: int, found: dict[str, Any], **promised: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in promised.items():
            patch.setenv(f"RUNNER_EXPECT_{name}", value)
        try:
            return str(preflight.judge_across(folder, node, 3, {0: found}))
        except (preflight.Unfit, preflight.Busy, preflight.Unsure, preflight.Wrong) as fault:
            return f"{type(fault).__name__}: {fault}"


def test_a_fall_back_to_sockets_is_a_failure(tmp_path: Path) -> None:
    """On one node: that node's. On all of them: the image's, and no other node would help."""
    for node in range(3):
        (tmp_path / f"network-{node}").write_text("Socket")
    found = {"across": 3.0, "network": "Socket"}
    said = "NCCL uses 'Socket', and the site promises 'AWS Libfabric'"
    assert judged(tmp_path, 0, found, NETWORK="AWS Libfabric") == f"Wrong: {said}"
    (tmp_path / "network-1").write_text("AWS Libfabric")
    assert judged(tmp_path, 0, found, NETWORK="AWS Libfabric") == f"Unfit: {said}"
    assert judged(tmp_path, 1, {**found, "network": "AWS Libfabric"}, NETWORK="AWS Libfabric").startswith("3.0 GB/s")
    assert judged(tmp_path, 0, found).startswith("3.0 GB/s")  # a site that promises nothing


# as NCCL and aws-ofi-nccl print it on EFA: awsome-distributed-ai, test-nccl-efa
EFA = """[1,0]<stdout>:worker-0:21:21 [0] NCCL INFO NET/OFI Selected Provider is efa (found 1 nics)
[1,0]<stdout>:worker-0:21:21 [0] NCCL INFO Using network AWS Libfabric
"""


def test_the_name_of_the_plugin_is_not_enough() -> None:
    """libfabric may have found nothing but TCP behind it."""
    assert worker.network_in(EFA) == "AWS Libfabric over efa"
    assert worker.network_in("NCCL INFO Using network Socket\n") == "Socket"
    assert worker.network_in("NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>\n") == ""
    assert preflight.is_promised("Libfabric", "AWS Libfabric over efa")
    assert not preflight.is_promised("Libfabric", "AWS Libfabric over tcp")
    assert not preflight.is_promised("IB", "Socket")


# as aws-ofi-nccl prints it from 1.14 on: the name of the plugin is shorter
NEW_EFA = """node-0:194:724 [3] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.21.1
node-0:194:724 [3] NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)
node-0:194:724 [3] NCCL INFO Using network Libfabric
"""


@pytest.mark.parametrize("log", [EFA, NEW_EFA])
def test_the_site_of_aws_accepts_efa_by_every_plugin_and_no_sockets(log: str) -> None:
    promised = load_site("aws-parallelcluster").nccl_network
    assert promised is not None
    assert preflight.is_promised(promised, worker.network_in(log))
    assert not preflight.is_promised(promised, worker.network_in(log.replace("is efa", "is tcp")))
    assert not preflight.is_promised(promised, worker.network_in("NCCL INFO Using network Socket\n"))


def test_a_node_that_is_slow_with_both_neighbours_is_to_blame(tmp_path: Path) -> None:
    slow = {"across": 10.0, "pairs": {"0-1": 9.0, "2-0": 11.0}}
    assert judged(tmp_path, 0, slow, ACROSS="50").startswith("Busy: all-reduce across 3 nodes: 10.0 GB/s")
    fast_with_one = {"across": 10.0, "pairs": {"0-1": 9.0, "1-2": 90.0}}
    assert judged(tmp_path, 1, fast_with_one, ACROSS="50").startswith("Unsure: ")


@pytest.mark.parametrize("nodes", range(3, 10))
def test_each_node_is_measured_with_both_of_its_neighbours(nodes: int) -> None:
    pairs = [pair for each in worker.rounds(nodes) for pair in each]
    ring = {frozenset((node, (node + 1) % nodes)) for node in range(nodes)}
    assert {frozenset(pair) for pair in pairs} == ring
    for each in worker.rounds(nodes):
        busy = [node for pair in each for node in pair]
        assert len(busy) == len({*busy}), "a node cannot be in two pairs at the same time"


def test_a_node_that_did_not_get_as_far_is_named(tmp_path: Path) -> None:
    for node in (0, 1):
        (tmp_path / f"within-{node}").write_text("")
    assert judged(tmp_path, 0, {}) == "Unsure: nodes [2] did not finish the all-reduce within each node"
    (tmp_path / "within-2").write_text("")
    assert judged(tmp_path, 0, {"fault": "RuntimeError: x"}).endswith("across 3 nodes failed: RuntimeError: x")


HEALTHY = {"name": "NVIDIA GH200 120GB", "memory.total": "97871", "memory.used": "1", "index": "0", "uuid": "GPU-0",
           "ecc.errors.uncorrected.volatile.total": "0", "remapped_rows.failure": "No", "retired_pages.pending": "N/A",
           "clocks_throttle_reasons.hw_thermal_slowdown": "Not Active",
           "clocks_throttle_reasons.hw_power_brake_slowdown": "Not Active"}  # fmt: skip


@pytest.mark.parametrize(
    ("sick", "said"),
    [
        ({}, ""),
        ({"memory.used": "71234"}, "GPU 1 has 71234 of 97871 MiB in use"),
        ({"ecc.errors.uncorrected.volatile.total": "4"}, "GPU 1 has uncorrected memory errors (4)"),
        ({"remapped_rows.failure": "Yes"}, "could not be remapped"),
        ({"clocks_throttle_reasons.hw_thermal_slowdown": "Active"}, "lowered because of heat"),
    ],
)
def test_what_nvidia_smi_says_of_four_gpus(sick: dict[str, str], said: str) -> None:
    def query(*fields: str) -> list[list[str]]:
        healthy = [[HEALTHY[field] for field in fields] for _ in range(4)]
        healthy[1] = [{**HEALTHY, **sick}[field] for field in fields]
        return healthy

    if not said:
        assert preflight.check_gpus(query, 4) == ["4 x NVIDIA GH200 120GB"]
        with pytest.raises(preflight.Busy, match="4 GPUs are visible, but the job requests 8"):
            preflight.check_gpus(query, 8)
        return
    with pytest.raises(preflight.Busy if "in use" in said else preflight.Unfit) as caught:
        preflight.check_gpus(query, 4)
    assert said in str(caught.value)


def shared(environ: dict[str, str], **sick: str) -> str:
    """What is reported of a node with four visible GPUs, of which GPU 1 is in use and this job has one."""

    def query(*fields: str) -> list[list[str]]:
        rows = [{**HEALTHY, "index": str(n), "uuid": f"GPU-{n}a"} for n in range(4)]
        rows[1] |= {"memory.used": "70000", **sick}
        return [[row[field] for field in fields] for row in rows]

    try:
        return "; ".join(preflight.check_gpus(query, 1, environ))
    except (preflight.Unfit, preflight.Busy) as fault:
        return f"{type(fault).__name__}: {fault}"


def test_another_jobs_gpu_on_a_shared_node_is_not_judged() -> None:
    """Without ConstrainDevices all GPUs of the node are visible; Slurm's variables name this job's."""
    for mine in ({"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "GPU-3"}, {"SLURM_JOB_GPUS": "3"}):
        assert shared(mine, **{"remapped_rows.failure": "Yes"}) == "1 x NVIDIA GH200 120GB"
    assert "Busy: GPU 1 has 70000 of 97871 MiB in use" in shared({"CUDA_VISIBLE_DEVICES": "1"})
    sick = shared({"SLURM_JOB_GPUS": "1"}, **{"memory.used": "1", "remapped_rows.failure": "Yes"})
    assert sick.startswith("Unfit: GPU 1 has a row of memory")
    assert shared({}).startswith("GPUs not checked: cannot tell which 1 of the ")


def test_only_a_broken_node_goes_to_the_list_that_all_runs_share(tmp_path: Path) -> None:
    """A node that is busy leaves another mark: the next attempt avoids it, other runs do not."""
    for number, (fault, mark) in enumerate(((preflight.Unfit, "bad-node-0"), (preflight.Busy, "busy-node-0"))):
        attempt = tmp_path / str(number)
        attempt.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(preflight, "check_node", lambda *_, fault=fault: (_ for _ in ()).throw(fault("a reason")))
            assert preflight.main([str(attempt), "0"]) == preflight.UNFIT
        assert [path.name for path in attempt.glob("*-node-*")] == [mark]


def test_a_field_that_the_driver_does_not_know_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi ends with an error then; any other error is a broken node."""
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program.write_text('#!/bin/sh\necho "Field \\"remapped_rows.failure\\" is not a valid field to query."; exit 2\n')
    program.chmod(0o755)
    assert preflight.nvidia_smi("remapped_rows.failure") is None
    program.write_text('#!/bin/sh\necho "No devices were found"; exit 6\n')
    with pytest.raises(preflight.Unfit, match="No devices were found"):
        preflight.nvidia_smi("name")
    program.write_text('#!/bin/sh\necho "NVIDIA GH200 120GB, 97871, 1"\n')
    assert preflight.nvidia_smi("name", "memory.total", "memory.used") == [["NVIDIA GH200 120GB", "97871", "1"]]


def test_memory_and_clock(tmp_path: Path) -> None:
    text = "MemTotal:       900000000 kB\nMemAvailable:   {} kB\nHugePages_Total:       0\n"
    assert preflight.check_memory(text.format(800000000)) == "762 of 858 GiB of memory free"
    with pytest.raises(preflight.Busy, match="another job may use the rest"):
        preflight.check_memory(text.format(80000000))
    # this job has 64 GiB of a shared node
    assert preflight.check_memory(text.format(80000000), 64 << 30) == "76 of 858 GiB of memory free"
    with pytest.raises(preflight.Busy):
        preflight.check_memory(text.format(6000000), 64 << 30)
    preflight.check_clock(tmp_path / "now", time.time())
    with pytest.raises(preflight.Unfit, match=r"\+3600 s"):
        preflight.check_clock(tmp_path / "ahead", time.time() + 3600)


@pytest.mark.parametrize(
    ("cgroup", "file", "environ", "limit"),
    [
        (
            "0::/system.slice/slurmstepd.scope/job_5/step_0/user/task_0",
            "system.slice/slurmstepd.scope/job_5",
            {},
            3 << 30,
        ),
        ("4:memory:/slurm/uid_0/job_5/step_0\n0::/", "memory/slurm/uid_0/job_5", {}, 3 << 30),
        ("0::/job_5", "job_5", {"SLURM_MEM_PER_NODE": "2048"}, 2048 << 20),
        ("0::/job_5", "job_5", {"SLURM_MEM_PER_NODE": "4096"}, 3 << 30),
        ("0::/", "", {"SLURM_MEM_PER_NODE": "2048"}, 2048 << 20),
        ("0::/", "", {"SLURM_MEM_PER_NODE": "0"}, None),
    ],
)
def test_the_memory_that_is_this_jobs(
    tmp_path: Path, cgroup: str, file: str, environ: dict[str, str], limit: int | None
) -> None:
    """Both versions of cgroups, and what was requested: the less."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup + "\n")
    if file:
        folder = tmp_path / "sys/fs/cgroup" / file
        folder.mkdir(parents=True)
        (folder / ("memory.limit_in_bytes" if file.startswith("memory") else "memory.max")).write_text(f"{3 << 30}\n")
    assert preflight.memory_limit(environ, tmp_path) == limit
