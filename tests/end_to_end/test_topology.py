"""--switches and --segment are refused where Slurm has no topology for them, and the log says where the ranks run."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.runs.schedulers.slurm_commands import topologies
from tests.end_to_end.conftest import Runner, clean_environ, write
from tests.lab.slurm import SlurmLab

TREE = "SwitchName=s1 Nodes=nid[001-002]\nSwitchName=s2 Nodes=nid003\nSwitchName=top Switches=s[1-2]\n"
BLOCKS = "BlockName=b1 Nodes=nid[001-002]\nBlockName=b2 Nodes=nid[003-004]\nBlockSizes=2\n"
HOST = ("--engine", "host")
ADDRESS = 'echo "$SLURM_PROCID is at $SLURM_TOPOLOGY_ADDR with $CUDA_VISIBLE_DEVICES"'


@pytest.fixture(scope="module")
def tree() -> Iterator[SlurmLab]:
    with SlurmLab(plugins=(), extra_config=("TopologyPlugin=topology/tree",), topology=TREE, newer=False) as lab:
        yield lab


@pytest.fixture(scope="module")
def blocks() -> Iterator[SlurmLab]:
    config = ("TopologyPlugin=topology/block",)
    with SlurmLab(4, plugins=(), extra_config=config, topology=BLOCKS, newer=True) as lab:
        yield lab


def on(lab: SlurmLab, project: Path, tmp_path: Path) -> Runner:
    return Runner(project, clean_environ(tmp_path / "home", lab.environ), "generic-slurm")


def mapped(log: str) -> list[str]:
    return re.findall(r"^job\.sbatch: (\S+  rank.*)$", log, re.MULTILINE)


def at(log: str) -> dict[int, tuple[str, str]]:
    """Task -> the address that Slurm gives it, and its GPUs."""
    return {int(rank): (place, gpus) for rank, place, gpus in re.findall(r"^(\d+) is at (\S+) with (\S*)$", log, re.M)}


@pytest.mark.uses("slurmctld, slurmd", "srun, sbatch", "munge")
def test_the_map_says_what_slurm_tells_each_task(tree: SlurmLab, project: Path, tmp_path: Path) -> None:
    """Nodes, ranks, GPUs and switches, on a tree of two levels."""
    runner = on(tree, project, tmp_path)
    words = (
        *HOST,
        "--nodes",
        "3",
        "--tasks-per-node",
        "2",
        "--gpus-per-node",
        "2",
        "--cpus-per-task",
        "1",
        "--no-preflight",
    )
    folder, log = runner.finished(*words, "--", "sh", "-c", ADDRESS)
    assert mapped(log) == [
        "nid001  ranks 0-1  GPUs 0-1  switch top.s1",
        "nid002  ranks 2-3  GPUs 0-1  switch top.s1",
        "nid003  ranks 4-5  GPUs 0-1  switch top.s2",
    ]
    assert (folder / "attempts/1/ranks").read_text().splitlines() == mapped(log)
    told = at(log)
    assert sorted(told) == list(range(6))
    for rank, (place, gpus) in told.items():
        node, _, _, switch = mapped(log)[rank // 2].split("  ")
        assert f"{switch.removeprefix('switch ')}.{node}" == place and gpus == "0,1"


@pytest.mark.uses("slurmctld, slurmd", "srun, sbatch", "munge")
def test_switches_reach_slurm_on_a_tree_and_segment_is_refused_there(
    tree: SlurmLab, project: Path, tmp_path: Path
) -> None:
    runner = on(tree, project, tmp_path)
    write(project, {"jobs/near.toml": 'command = ["true"]\n[resources]\nnodes = 2\nswitches = "1@00:10:00"\n'})
    folder, log = runner.finished(*HOST, "near")
    assert "#SBATCH --switches=1@00:10:00\n" in (folder / "job.sbatch").read_text()
    (job_id,) = (folder / "job_ids").read_text().split()
    shown = tree.job(job_id)
    assert shown["Switches"].startswith("1@") and shown["NodeList"] == "nid[001-002]"
    assert mapped(log) == ["nid001  rank 0  switch top.s1", "nid002  rank 1  switch top.s1"]
    before = runner.made()
    said = runner("launch", *HOST, "--nodes", "2", "--segment", "2", "--", "true", code=1).stderr
    assert "this cluster's Slurm does not have --segment\n" in said
    assert "because: --segment came with Slurm 24.05, and the cluster has 22.05" in said
    assert runner.made() == before


@pytest.mark.parametrize("way", ["flag", "job file", "--sbatch", "own script"])
def test_switches_are_refused_without_a_topology(cluster: Runner, way: str) -> None:
    """However they are given: this Slurm accepts the option, and ignores it."""
    files = {
        "jobs/near.toml": 'command = ["true"]\n[resources]\nswitches = "1"\n',
        "own.sbatch": "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --switches=1\ntrue\n",
    }
    write(cluster.project, files)
    words = {
        "flag": (*HOST, "--switches", "1", "--", "true"),
        "job file": (*HOST, "near"),
        "--sbatch": (*HOST, "--sbatch=--switches=1", "--", "true"),
        "own script": ("own.sbatch",),
    }[way]
    said = cluster("launch", *words, code=1).stderr
    assert "--switches has no effect on this cluster\n" in said
    assert re.search(r"because: it needs topology/tree, and the cluster has topology/(none|default): Slurm would", said)
    assert cluster.made() == []
    assert "--switches=1" in cluster("launch", "--dry-run", *words).stdout


def test_a_dry_run_needs_no_slurm(cluster: Runner) -> None:
    nowhere = {"PATH": str(cluster.project), "SLURM_CONF": "/nonexistent"}
    words = (*HOST, "--dry-run", "--switches", "2@5", "--segment", "4", "--nodes", "4", "--", "true")
    done = cluster("launch", *words, extra_environ=nowhere)
    assert "#SBATCH --switches=2@5\n#SBATCH --segment=4\n" in done.stdout and "rank_map 1 " in done.stdout


def test_a_segment_has_at_least_one_node(cluster: Runner) -> None:
    assert "segment cannot be 0" in cluster("launch", *HOST, "--segment", "0", "--dry-run", "--", "true", code=1).stderr


def test_without_a_topology_the_map_has_no_switch(cluster: Runner) -> None:
    _, log = cluster.finished(*HOST, "--nodes", "2", "--", "true")
    assert [line.partition("  ")[2] for line in mapped(log)] == ["rank 0", "rank 1"]
    _, log = cluster.finished(*HOST, "--", "true")
    assert mapped(log) == []  # a single node


@pytest.mark.uses("mmdebstrap", "bubblewrap", "slurmctld, slurmd")
def test_segment_on_blocks(blocks: SlurmLab, project: Path, tmp_path: Path) -> None:
    """Slurm 24.11: the segment reaches Slurm, and the map names the blocks; --switches is refused."""
    runner = on(blocks, project, tmp_path)
    folder, log = runner.finished(*HOST, "--nodes", "4", "--segment", "2", "--", "sh", "-c", ADDRESS)
    assert "#SBATCH --segment=2\n" in (folder / "job.sbatch").read_text()
    assert mapped(log) == [f"nid00{n + 1}  rank {n}  block b{n // 2 + 1}" for n in range(4)]
    assert [place for _, (place, _) in sorted(at(log).items())] == [f"b{n // 2 + 1}.nid00{n + 1}" for n in range(4)]
    said = runner("launch", *HOST, "--nodes", "2", "--switches", "1", "--", "true", code=1).stderr
    assert "it needs topology/tree, and the cluster has topology/block: Slurm would ignore it" in said


PAYLOAD = Path(__file__).parents[2] / "src/runner/runs/payload"


def listed(lab: SlurmLab, folder: Path, nodes: str, processes: int) -> subprocess.CompletedProcess[str]:
    """`rank_map` for nodes that a job would have; the job id is unknown, so Slurm tells no GPUs."""
    text = f'. {PAYLOAD}/restart.sh; . {PAYLOAD}/ranks.sh; say() {{ echo "job.sbatch: $*" >&2; }}; rank_map {processes}'
    own = {"SLURM_JOB_NODELIST": nodes, "RUNNER_ATTEMPT": str(folder), "RUNNER_JOB": "1"}
    return subprocess.run(("bash", "-uc", text), env={**lab.environ, **own}, capture_output=True, text=True, check=True)


def test_more_than_64_nodes_end_in_a_summary(slurm: SlurmLab, tmp_path: Path) -> None:
    folder = tmp_path / "attempts/3"
    folder.mkdir(parents=True)
    said = listed(slurm, folder, "nid[001-064]", 4).stderr
    assert len(mapped(said)) == len(said.splitlines()) == 64
    said = listed(slurm, folder, "nid[0998-1100]", 4).stderr
    lines = mapped(said)
    assert len(lines) == 64 and lines[0] == "nid0998  ranks 0-3" and lines[2] == "nid1000  ranks 8-11"
    assert said.splitlines()[64:] == ["job.sbatch: and 39 more nodes: attempts/3/ranks"]
    assert (folder / "ranks").read_text().splitlines()[-1] == "nid1100  ranks 408-411"


def test_a_map_that_cannot_be_written_does_not_stop_the_job(slurm: SlurmLab, tmp_path: Path) -> None:
    done = listed(slurm, tmp_path / "none", "nid[001-002]", 1)
    assert len(mapped(done.stderr)) == len(done.stderr.splitlines()) == 2


# `scontrol show topoconf` of Slurm 25.05: the example of topology.yaml(5)
TOPOCONF = """---
- topology: topo1
  cluster_default: true
  tree:
    switches:
      - switch: sw_root
        children: s[1-2]
- topology: topo2
  cluster_default: false
  block:
    block_sizes:
      - 4
- topology: topo3
  cluster_default: false
  flat: true
"""


@pytest.mark.parametrize(
    ("shown", "kinds"),
    [
        ("TopologyParam           = (null)\nTopologyPlugin          = topology/tree\n", {"tree"}),
        ("TopologyPlugin          = topology/3d_torus\n", set()),
        ("TopologyPlugin          = topology/flat\n" + TOPOCONF, {"tree", "block"}),
        ("TopologyPlugin          = topology/flat\nRingName=r1 Nodes=n[1-8]\n", {"ring"}),
        ("TopologyPlugin          = topology/default\n", set()),
    ],
)
def test_the_kinds_of_topology(shown: str, kinds: set[str]) -> None:
    assert topologies(shown) == kinds
