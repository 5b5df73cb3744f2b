"""The job `network` measures collectives between real processes (gloo), and finds the slowest pair of nodes."""

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.lab.ports import free_ports

pytest.importorskip("torch")
pytestmark = pytest.mark.training

from training import collectives  # noqa: E402

JOBS = Path(__file__).resolve().parents[2] / "jobs"


@pytest.mark.parametrize("count", [*range(2, 20), 64, 101])
def test_each_pair_of_nodes_is_in_a_group_and_the_groups_of_a_round_are_disjoint(count: int) -> None:
    found: set[tuple[int, ...]] = set()
    for groups in collectives.rounds(range(count)):
        members = [node for group in groups for node in group]
        assert len(members) == len(set(members))
        assert max(map(len, groups)) < max(count, 3)
        found.update(pair for group in groups for pair in itertools.combinations(group, 2))
    assert found == set(itertools.combinations(range(count), 2))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 8, 16, 33])
def test_the_slow_pair_is_found_wherever_it_is_in_a_logarithmic_number_of_rounds(count: int) -> None:
    """A table of bandwidths: a group is as fast as its slowest connection."""
    for slow in itertools.combinations(range(count), 2):
        rounds = 0

        def measure(groups: Sequence[tuple[int, ...]], slow: tuple[int, int] = slow) -> dict[tuple[int, ...], float]:
            nonlocal rounds
            rounds += 1
            return {group: 1.0 if set(slow) <= set(group) else 10.0 for group in groups}

        pair, measured = collectives.slowest_pair(range(count), measure)
        assert pair == slow
        assert measured[pair] == 1.0
        assert rounds <= 3 * math.ceil(math.log2(count))


def judged(count: int, speed: dict[tuple[int, int], float]) -> tuple[tuple[int, ...], bool, str]:
    """The slowest pair and the verdict, for connections of 10 GB/s except those in `speed`."""

    def of(group: tuple[int, ...]) -> float:
        return min(speed.get(pair, 10.0) for pair in itertools.combinations(group, 2))

    pair, measured = collectives.slowest_pair(range(count), lambda groups: {group: of(group) for group in groups})
    other = collectives.witness(pair, measured)
    if other is not None:
        measured |= {two: of(two) for node in pair for two in [(min(node, other), max(node, other))]}
    return pair, *collectives.judge(pair, other, measured, "abcdefgh")


def test_a_slow_node_is_told_from_a_slow_connection() -> None:
    assert judged(8, {(2, 6): 1.0}) == ((2, 6), True, "both are fast with a: only their connection is slow")
    pair, slow, why = judged(8, {(min(5, node), max(5, node)): 1.0 for node in range(8) if node != 5})
    assert 5 in pair and slow and why.startswith("slow with ") and why.endswith(" too: f")
    assert judged(4, {})[1:] == (False, "no pair is much slower than the others")
    assert judged(2, {(0, 1): 1.0})[1:] == (False, "there is no other pair to compare with")


def test_the_formulas_are_those_of_nccl_tests() -> None:
    """doc/PERFORMANCE.md: 2(n-1)/n for all-reduce, (n-1)/n for all-gather and all-to-all."""
    assert [collectives.bus_factor(operation, 8) for operation in collectives.OPERATIONS] == [1.75, 0.875, 0.875]
    # two nodes with four ranks each: half of the data crosses; of an all-to-all, that of each rank
    assert [collectives.node_factor(operation, 2, 4) for operation in collectives.OPERATIONS] == [1, 0.5, 2]


def environ(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RUNNER_"))}
    own = {"RUNNER_RUN": str(folder), "RUNNER_ATTEMPT": str(folder), "OMP_NUM_THREADS": "1"}
    return {**kept, **own, **more}


def started(folder: Path, ranks: int, *words: str, per_node: int = 1, **more: str) -> list[subprocess.Popen[bytes]]:
    """The job's ranks on this machine; each writes to its own file out-R."""
    port = str(free_ports(1)[0])
    found = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % per_node), "WORLD_SIZE": str(ranks),
               "LOCAL_WORLD_SIZE": str(per_node), "SLURMD_NODENAME": f"nid{rank // per_node}",
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
        with (folder / f"out-{rank}").open("wb") as out:
            argv = (sys.executable, str(JOBS / "network.py"), *words)
            found.append(subprocess.Popen(argv, stdout=out, stderr=out, env=environ(folder, **own, **more)))
    return found


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that end with the test, even those that are stopped."""
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for child in found:
        child.kill()
        child.wait()


def test_two_processes_on_two_nodes(tmp_path: Path, children: list[subprocess.Popen[bytes]]) -> None:
    """Table, JSON and picture agree; the table shows what the site promises."""
    children += started(tmp_path, 2, "--largest", "64K", RUNNER_NETWORK_GBPS="8")
    assert [child.wait(300) for child in children] == [0, 0], (tmp_path / "out-0").read_text()
    result = json.loads((tmp_path / "network.json").read_text())
    assert result["nodes"] == ["nid0", "nid1"] and result["backend"] == "gloo" and result["promised_gbps"] == 8
    rows = {(row["operation"], row["bytes"]): row for row in result["results"]}
    assert set(rows) == {(name, 1024 * 4**step) for name in collectives.OPERATIONS for step in range(4)}
    for (operation, size_bytes), row in rows.items():
        speed = size_bytes / row["seconds"] / 1e9
        assert row["bus"] == pytest.approx(speed * (1 if operation == "all-reduce" else 0.5))
        assert row["node"] == pytest.approx(row["bus"])  # one rank per node
    assert result["pair"]["nodes"] == ["nid0", "nid1"] and not result["pair"]["slow"]
    said = (tmp_path / "out-0").read_text()
    assert "network_gbps of the site: 8 Gbit/s per node, which is 1 GB/s" in said
    assert f"{rows['all-reduce', 65536]['node']:.0%}" in said
    assert "there is no other pair to compare with" in said
    assert (tmp_path / "network.png").read_bytes().startswith(b"\x89PNG")
    assert "all-reduce" not in (tmp_path / "out-1").read_text()  # only rank 0 prints


def test_one_node_and_no_matplotlib(tmp_path: Path, children: list[subprocess.Popen[bytes]]) -> None:
    """The connection within a node is measured; the log explains what is missing."""
    (tmp_path / "none").mkdir()
    (tmp_path / "none/matplotlib.py").write_text("raise ImportError\n")
    children += started(tmp_path, 2, "--largest", "1K", per_node=2, PYTHONPATH=str(tmp_path / "none"))
    assert [child.wait(300) for child in children] == [0, 0], (tmp_path / "out-0").read_text()
    result = json.loads((tmp_path / "network.json").read_text())
    assert result["pair"] is None and {row["node"] for row in result["results"]} == {None}
    said = (tmp_path / "out-0").read_text()
    assert "the site has no network_gbps with which to compare the speeds" in said
    assert "one node: no pair of nodes to compare\n" in said
    assert "no picture: this Python has no matplotlib\n" in said and not (tmp_path / "network.png").exists()


def on_shaped_nodes(folder: Path, nodes: int, slow: tuple[int, int]) -> str:
    """What rank 0 prints, on nodes whose networks the kernel limits (network_nodes.sh)."""
    words = (
        "unshare",
        "--net",
        "--mount",
        "--map-root-user",
        "bash",
        str(Path(__file__).with_name("network_nodes.sh")),
    )
    if shutil.which("tc") is None or subprocess.run((*words, "0", "0", "0"), check=False).returncode != 0:
        pytest.skip("this user or kernel cannot make network namespaces, or tc is not installed")
    argv = (*words, str(nodes), *map(str, slow), sys.executable, str(JOBS / "network.py"), "--largest", "512K")
    done = subprocess.run(argv, env=environ(folder, RUNNER_NETWORK_GBPS="0.2"), capture_output=True, text=True,
                          timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_pair_with_a_slow_connection_is_found_among_four_nodes(tmp_path: Path) -> None:
    """Real traffic: 200 Mbit/s per node, and 20 Mbit/s between nid1 and nid2. The figures are those of the kernel."""
    said = on_shaped_nodes(tmp_path, 4, (1, 2))
    pair = json.loads((tmp_path / "network.json").read_text())["pair"]
    assert pair["nodes"] == ["nid1", "nid2"] and pair["slow"], said
    assert "only their connection is slow" in said and "SLOW PAIR: nid1 - nid2" in said
    assert 0.001 < pair["node"] < 0.0032  # GB/s; the link has 0.0025
    assert 0.008 < pair["fastest"] < 0.032  # a node has 0.025
    assert "network_gbps of the site: 0.2 Gbit/s per node, which is 0.025 GB/s" in said


def until(path: Path, text: str, children: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + 200
    while text not in path.read_text():
        assert time.monotonic() < deadline and all(child.poll() is None for child in children), path.read_text()
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGSTOP, "rank 2 did not answer"),
        (signal.SIGKILL, "(rank 2|a rank has ended, or) did not answer"),
    ],
    ids=["hangs", "dies"],
)
def test_a_rank_that_hangs_or_dies_ends_the_job(
    tmp_path: Path, children: list[subprocess.Popen[bytes]], number: signal.Signals, said: str
) -> None:
    """In the middle of the measurements; the others end by themselves, with one error that says where they were.

    Which rank has died is known only if the barrier of rank 0 waits for it, and is not ended by a closed connection.
    """
    children += started(tmp_path, 3, "--timeout", "10")
    until(tmp_path / "out-0", " 16 KiB", children)
    children[2].send_signal(number)
    assert [child.wait(60) for child in children[:2]] == [1, 1]
    text = (tmp_path / "out-0").read_text() + (tmp_path / "out-1").read_text()
    assert text.count("network: the network test stopped during all-") == 1
    assert re.search(f": {said}$", text, re.MULTILINE) and "Traceback" not in text
    assert not (tmp_path / "network.json").exists()
    assert (tmp_path / "error.txt").read_text().startswith("network: the network test stopped during all-")


def test_a_rank_does_not_call_itself_silent() -> None:
    """The messages of torch 2.13: of rank 0, which waits for all, and of another one."""
    waited = "[Rank 0]: Ranks 1, 12 failed to pass monitoredBarrier in 5000 ms"
    assert collectives.silent_ranks(waited, 0) == "rank 1, 12"
    other = "[Rank 1]: Rank 1 failed to pass monitoredBarrier in 5000 ms, but received errors from rank 0."
    assert collectives.silent_ranks(other, 1) == ""
    assert collectives.silent_ranks("Connection closed by peer", 2) == ""


def test_a_rank_that_never_comes(tmp_path: Path, children: list[subprocess.Popen[bytes]]) -> None:
    children += started(tmp_path, 2, "--timeout", "1")
    children[1].kill()
    assert children[0].wait(120) == 1
    assert "the network test stopped during the start: a rank has ended" in (tmp_path / "out-0").read_text()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 1, "network: there is nothing to measure\n  because: the job has one process"),
        (("--largest", "2G"), 2, "'2G' is not a size from 1K to 1G"),
        (("--largest", "64"), 2, "'64' is not a size"),
    ],
)
def test_what_cannot_be_measured(tmp_path: Path, words: tuple[str, ...], code: int, said: str) -> None:
    argv = (sys.executable, str(JOBS / "network.py"), *words)
    done = subprocess.run(argv, env=environ(tmp_path), capture_output=True, text=True, check=False)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
