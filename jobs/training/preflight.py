"""Test a node before the job's program starts. payload/task.sh runs this once per node, inside the container.

    preflight.py ATTEMPT NODE        NODE is the number of the node in the job, from 0

Needs only Python 3.10. If torch is installed, it also measures a matrix product on each GPU, and all-reduces with NCCL
(without GPUs: gloo) within the node and across all nodes. RUNNER_EXPECT_* variables contain the site's minimum values.

Results are in ATTEMPT/preflight/. For a broken node (hardware, clock), it writes the reason to ATTEMPT/bad-node-NODE:
all later attempts and launches avoid the node. For a node that cannot run this job now, it writes
ATTEMPT/busy-node-NODE: only the next attempt avoids the node.

Exit codes: 0 if the node passed, 76 if nodes or the network are at fault (the batch script may try other nodes), 1 if
the job would fail on any node.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

UNFIT = 76
_SECONDS = 60  # the limit for all measurements with torch; on eight nodes they take about 30 s
_CLOCK_SECONDS = 30  # the largest allowed difference between the node's clock and that of the file system
_FREE = 0.9  # the fraction of a GPU's memory that must be free
_SLOW = 0.7  # the lowest allowed speed of a GPU, relative to the median of the node's GPUs


class Unfit(Exception):
    """This node is broken."""


class Busy(Exception):
    """This node cannot run the job now, but its hardware may be intact."""


class Unsure(Exception):
    """A node or the network is at fault, but the test cannot tell which node."""


class Wrong(Exception):
    """The job would fail on any node."""


def main(argv: list[str]) -> int:
    attempt, node = Path(argv[0]), int(argv[1])
    folder = attempt / "preflight"
    folder.mkdir(exist_ok=True)
    started = time.monotonic()
    try:
        say(node, "; ".join(check_node(folder, node)) + f"; {time.monotonic() - started:.0f} s")
    except (Unfit, Busy) as fault:
        kind = "bad" if isinstance(fault, Unfit) else "busy"
        (attempt / f"{kind}-node-{node}").write_text(f"{fault}\n")
        say(node, f"this node failed the check: {fault}")
        return UNFIT
    except Unsure as fault:
        say(node, str(fault))
        return UNFIT
    except Wrong as fault:
        say(node, f"the job cannot run on any of its nodes: {fault}")
        return 1
    return 0


def say(node: int, text: str) -> None:
    sys.stderr.write(f"preflight: node {node}: {text}\n")
    sys.stderr.flush()


def check_node(folder: Path, node: int) -> list[str]:
    """Return the results, one phrase per test. Raises Unfit, Busy, Unsure or Wrong."""
    gpus = int(os.environ.get("RUNNER_GPUS_PER_NODE") or 0)
    check_clock(folder / f"clock-{node}", time.time())
    found = [check_memory(Path("/proc/meminfo").read_text(), memory_limit(os.environ))]
    if gpus:
        found += check_gpus(nvidia_smi, gpus)
    if has_torch():
        found += measure(folder, node, gpus or int(os.environ.get("RUNNER_PROCESSES") or 1), "cuda" if gpus else "cpu")
    return found


def check_clock(mark: Path, now: float) -> None:
    """Raise Unfit if the node's clock differs from the clock of the file system.

    A wrong clock breaks tokens, certificates and time limits.
    """
    mark.write_text("")
    difference = now - mark.stat().st_mtime
    if abs(difference) > _CLOCK_SECONDS:
        raise Unfit(f"its clock differs by {difference:+.0f} s from the clock of the run folder's file system")


def check_memory(meminfo: str, limit: int | None = None) -> str:
    """Return how much memory is free. `limit`: bytes that this job may use if it shares the node.

    Raises Busy if less than a tenth of the memory that the job may use is free.
    """
    kibibytes = {line.split(":")[0]: int(line.split()[1]) for line in meminfo.splitlines() if line.endswith(" kB")}
    total, free = kibibytes["MemTotal"], kibibytes["MemAvailable"]
    ours = min(total, total if limit is None else limit >> 10)
    if free < 0.1 * ours:
        raise Busy(f"only {free >> 20} of {total >> 20} GiB of memory is free; another job may use the rest")
    return f"{free >> 20} of {total >> 20} GiB of memory free"


def memory_limit(environ: Mapping[str, str], root: Path = Path("/")) -> int | None:
    """Return how many bytes of memory this job may use: the smallest limit of its cgroups and its request to Slurm.

    None if there is no limit.
    """
    limits = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        top, name = ("sys/fs/cgroup", "memory.max") if not controllers else (
            "sys/fs/cgroup/memory", "memory.limit_in_bytes")  # fmt: skip
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = root / top / place.lstrip("/")
        for above in (folder, *folder.parents):
            if not above.is_relative_to(root / top):
                break
            try:
                text = (above / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit():
                limits.append(int(text))
    requested = environ.get("SLURM_MEM_PER_NODE", "")
    if requested.isdigit() and int(requested):  # MiB; 0 means all memory of the node
        limits.append(int(requested) << 20)
    return min(limits, default=None)


def nvidia_smi(*fields: str) -> list[list[str]] | None:
    """Return the values of these fields from nvidia-smi, one row per GPU.

    None if nvidia-smi is not installed, or does not know a field (older drivers).
    """
    if shutil.which("nvidia-smi") is None:
        return None
    argv = ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        raise Unfit("nvidia-smi does not answer: a GPU has fallen off the bus, or the driver hangs") from None
    if done.returncode != 0:
        if "not a valid field" in done.stdout + done.stderr:
            return None
        last = (done.stdout + done.stderr).strip().rpartition("\n")[2]
        raise Unfit(f"nvidia-smi: {last or f'exit code {done.returncode}'}")
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def check_gpus(query: Any, wanted: int, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a phrase about this job's GPUs, as the driver reports them.

    Raises Busy if a GPU is missing or in use, and Unfit if the driver reports that one is broken.
    """
    shown = query("name", "memory.total", "memory.used", "index", "uuid")
    if shown is None:
        return ["GPUs not checked, because this image has no nvidia-smi"]
    if len(shown) < wanted:
        raise Busy(f"{len(shown)} GPUs are visible, but the job requests {wanted}")
    ours = own_gpus([(row[3], row[4]) for row in shown], wanted, environ)
    if ours is None:
        return [f"GPUs not checked: cannot tell which {wanted} of the {len(shown)} ({shown[0][0]}) belong to this job"]
    for index in ours:
        _, total, used, *_ = shown[index]
        if total.isdigit() and used.isdigit() and int(used) > (1 - _FREE) * int(total):
            raise Busy(f"GPU {index} has {used} of {total} MiB in use, perhaps by another job")
    for field, what in (
        ("ecc.errors.uncorrected.volatile.total", "uncorrected memory errors"),
        ("remapped_rows.failure", "a row of memory that could not be remapped"),
        ("retired_pages.pending", "memory pages waiting to be retired"),
        ("clocks_throttle_reasons.hw_thermal_slowdown", "a clock lowered because of heat"),
        ("clocks_throttle_reasons.hw_power_brake_slowdown", "a clock lowered by the power brake"),
    ):
        for index, row in enumerate(query(field) or []):
            if index in ours and row[0] not in ("0", "No", "Not Active", "[N/A]", "N/A", "[Not Supported]", ""):
                raise Unfit(f"GPU {index} has {what} ({row[0]})")
    return [f"{len(ours)} x {shown[ours[0]][0]}"]


def own_gpus(shown: list[tuple[str, str]], wanted: int, environ: Mapping[str, str]) -> list[int] | None:
    """Return the positions of this job's GPUs in `shown` (index, uuid), or None if they cannot be identified.

    Slurm hides the GPUs of other jobs only with ConstrainDevices. The numbers in CUDA_VISIBLE_DEVICES count the visible
    GPUs, and those in SLURM_JOB_GPUS all GPUs of the node. Inside a container, they may match none of the visible GPUs.
    """
    if len(shown) == wanted:
        return list(range(wanted))
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        words = [word.strip() for word in environ.get(name, "").split(",") if word.strip()]
        found = [
            place
            for place, (index, uuid) in enumerate(shown)
            if any(word == index or (word.startswith("GPU-") and uuid.startswith(word)) for word in words)
        ]
        if len(found) == wanted:
            return found
    return None


def has_torch() -> bool:
    from importlib.util import find_spec

    return find_spec("torch") is not None


def measure(folder: Path, node: int, processes: int, device: str) -> list[str]:
    """Measure with torch, in one process per GPU, and return one phrase per result.

    Raises Unfit, Busy, Unsure or Wrong.
    """
    deadline = time.monotonic() + float(os.environ.get("RUNNER_PREFLIGHT_SECONDS") or _SECONDS)
    results = run_workers(folder, node, processes, device, deadline)
    missing = [rank for rank, result in results.items() if "within" not in result]
    if "skipped" in results[0]:
        return [results[0]["skipped"]]
    for rank, result in results.items():
        if "unfit" in result:
            raise Unfit(f"process {rank}: {result['unfit']}")
        if "busy" in result:
            raise Busy(f"process {rank}: {result['busy']}")
    if missing:
        fault = results[missing[0]].get("fault", "it did not end in time")
        raise Busy(f"processes {missing} did not finish the all-reduce within the node ({fault})")
    judge_speed([result["gemm"] for result in results.values()], device)
    first = results[0]
    found = [f"{first['gemm']:.2f} TFLOP/s"]
    if first["within"] is not None:
        found.append(f"{first['within']:.1f} GB/s within the node")
        expect(first["within"], "WITHIN", "all-reduce within the node")
    nodes = int(os.environ.get("RUNNER_NODES") or 1)
    if nodes > 1:
        found.append(judge_across(folder, node, nodes, results))
    return found


def judge_speed(speeds: list[float], device: str) -> None:
    """Raise Unfit if a GPU is much slower than the other GPUs of the node. `speeds`: TFLOP/s of each GPU."""
    median = sorted(speeds)[len(speeds) // 2]
    for index, speed in enumerate(speeds):
        if device == "cuda" and speed < _SLOW * median:
            raise Unfit(f"GPU {index} computes at {speed:.0f} TFLOP/s, but the other GPUs of the node at {median:.0f}")


def expect(value: float, name: str, what: str) -> None:
    """Raise Busy if `value`, in GB/s, is below the site's value RUNNER_EXPECT_NAME."""
    wanted = float(os.environ.get(f"RUNNER_EXPECT_{name}") or 0)
    if value < wanted:
        raise Busy(f"{what}: {value:.1f} GB/s, the site promises {wanted:.0f}")


def judge_across(folder: Path, node: int, nodes: int, results: dict[int, dict[str, Any]]) -> str:
    """Return a phrase about the all-reduce across all nodes.

    Raises Unfit or Busy if this node is at fault, Wrong if all nodes have the same fault, and Unsure otherwise.
    """
    first = results[0]
    network, promised = first.get("network", ""), os.environ.get("RUNNER_EXPECT_NETWORK") or ""
    if promised and network and not is_promised(promised, network):
        # if all nodes use another network, the image lacks the plugin; if only some do, these nodes are at fault
        others = networks(folder, nodes)
        fault = f"NCCL uses {network!r}, and the site promises {promised!r}"
        raise (Unfit if any(is_promised(promised, each) for each in others) else Wrong)(fault)
    if "across" not in first:
        behind = [other for other in range(nodes) if not (folder / f"within-{other}").exists()]
        if behind:
            raise Unsure(f"nodes {behind} did not finish the all-reduce within each node")
        raise Unsure(f"the all-reduce across {nodes} nodes failed: {first.get('fault', 'it did not finish in time')}")
    wanted = float(os.environ.get("RUNNER_EXPECT_ACROSS") or 0)
    if first["across"] < wanted:
        pairs = first.get("pairs") or {}
        mine = max(pairs.values(), default=first["across"])
        fault = f"all-reduce across {nodes} nodes: {first['across']:.1f} GB/s, the site promises {wanted:.0f}"
        raise Busy(f"{fault}; with only one neighbour: {mine:.1f} GB/s") if pairs and mine < wanted else Unsure(fault)
    return f"{first['across']:.1f} GB/s across {nodes} nodes" + (f" by {network}" if network else "")


def is_promised(promised: str, network: str) -> bool:
    """Whether NCCL uses the promised network, and not TCP through the promised plugin."""
    return promised.lower() in network.lower() and network.rpartition(" over ")[2] not in ("tcp", "sockets", "udp")


def networks(folder: Path, nodes: int) -> list[str]:
    """Return the network that NCCL uses on each node. Waits 5 s for the files; nodes without one are left out."""
    deadline = time.monotonic() + 5
    names = [folder / f"network-{node}" for node in range(nodes)]
    while not all(name.exists() for name in names) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [name.read_text().strip() for name in names if name.exists()]


def run_workers(folder: Path, node: int, processes: int, device: str, deadline: float) -> dict[int, dict[str, Any]]:
    """Run one worker per GPU, kill those that are still running at the deadline, and return local rank -> results."""
    worker = Path(__file__).with_name("preflight_worker.py")
    children = []
    for rank in range(processes):
        with (folder / f"{node}-{rank}.log").open("w") as log:
            argv = (sys.executable, str(worker), str(folder), str(node), str(rank), str(processes), device)
            children.append(subprocess.Popen(argv, stdout=log, stderr=log))
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    for child in children:
        child.kill()
        child.wait()
    return {rank: read(folder / f"{node}-{rank}.json") for rank in range(processes)}


def read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
