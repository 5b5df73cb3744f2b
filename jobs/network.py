"""Measure the network between the nodes of a job, and find the slowest pair of nodes.

    runner launch network --nodes 4
    runner launch network --nodes 4 -- --largest 64M --timeout 120

It times all-reduce, all-gather and all-to-all with torch.distributed: NCCL on GPUs, gloo on CPUs. Rank 0 prints a
table, and writes network.json and, with matplotlib, network.png to the run folder. The bus bandwidth is that of
nccl-tests. The bandwidth per node is what each node's network has carried at least. The site's promise is its
`network_gbps`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training import errors, files, pictures, processes
from training.collectives import OPERATIONS, Network, bandwidth, bus_factor, judge, node_factor, slowest_pair, words
from training.collectives import witness as find_witness
from training.errors import JobError

SMALLEST = 1 << 10
MOST = 1 << 30  # of a message
PAIR_BYTES = 256 << 20  # of the messages between groups and pairs, at most
LARGEST_ON_CPUS = 16 << 20


def main(argv: Sequence[str]) -> int:
    """Measure, print and write the results, and return 0."""
    with errors.reported("network"):
        arguments = parser().parse_args(argv)
        peers = processes.from_environment(os.environ)
        processes.set_threads(os.environ, peers)
        if peers.world_size == 1:
            raise JobError(
                "there is nothing to measure",
                "the job has one process, and a network connects several",
                "--nodes 2, or --tasks-per-node 2 for the connection within a node",
            )
        network = Network(peers, per_node(peers.world_size, peers.local_world_size), arguments.timeout)
        largest = arguments.largest or (MOST if network.backend == "nccl" else LARGEST_ON_CPUS)
        with network.explained():
            result = about(network)
            say(peers, *head(result))
            result["results"] = collectives(network, largest, result["promised_gbps"])
            result["pair"] = pair(network, result["nodes"], min(largest, PAIR_BYTES))
            if peers.first:
                write(result)
            network.begin("the end")
    sys.stdout.flush()
    errors.leave(0)  # gloo's threads can abort Python at its end


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="network.py", allow_abbrev=False, description=(__doc__ or "").split("\n")[0])
    found.add_argument(
        "--largest", type=size, metavar="SIZE", help="the largest message: 64M; default: 1G on GPUs, 16M on CPUs"
    )
    found.add_argument(
        "--timeout", type=float, default=60, metavar="SECONDS", help="end the job if a rank takes longer for one step"
    )
    return found


def size(word: str) -> int:
    """Return the bytes of a size such as 64M."""
    found = re.fullmatch(r"(\d+)([KMG])", word)
    value = int(found[1]) << {"K": 10, "M": 20, "G": 30}[found[2]] if found else 0
    if not SMALLEST <= value <= MOST:
        raise argparse.ArgumentTypeError(f"{word!r} is not a size from 1K to 1G")
    return value


def per_node(world_size: int, local: int) -> int:
    """Return the processes per node. Raises JobError if the nodes have different numbers of processes."""
    if world_size % local:
        raise JobError(
            "cannot compare nodes with different numbers of processes",
            f"the job has {world_size} processes, and this node has {local}",
            "launch with --nodes and --tasks-per-node",
        )
    return local


def about(network: Network) -> dict[str, Any]:
    """Return when and where the test runs, and what the site promises."""
    import torch

    mine = (os.environ.get("SLURMD_NODENAME") or "", socket.gethostname())
    found = processes.gather(mine, network.processes)[:: network.per_node]
    # in a container of pyxis, SLURMD_NODENAME can be that of the first node; in a test cluster, all hosts have one name
    distinct = (names for names in zip(*found, strict=True) if all(names) and len(set(names)) == network.nodes)
    names = next(distinct, tuple(f"node {number}" for number in range(network.nodes)))
    promise = os.environ.get("RUNNER_NETWORK_GBPS")
    gpu = torch.cuda.get_device_name(network.device) if network.backend == "nccl" else ""
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "nodes": list(names),
        "processes_per_node": network.per_node,
        "backend": network.backend,
        "device": gpu or f"CPU ({platform.machine()})",
        "torch": torch.__version__,
        "promised_gbps": float(promise) if promise else None,
    }


def collectives(network: Network, largest: int, promise: float | None) -> list[dict[str, Any]]:
    """Measure each operation with messages from 1 KiB to the largest, in steps of 4; print and return the results."""
    found = []
    ranks = network.processes.world_size
    for operation in OPERATIONS:
        size_bytes = SMALLEST
        while size_bytes <= largest:
            seconds = network.all_ranks(operation, size_bytes)
            speed = bandwidth(size_bytes, ranks, seconds)
            node = speed * node_factor(operation, network.nodes, network.per_node) if network.nodes > 1 else None
            bus = speed * bus_factor(operation, ranks)
            row = {"operation": operation, "bytes": size_bytes, "seconds": seconds, "bus": bus, "node": node}
            found.append(row)
            say(network.processes, line(row, promise))
            size_bytes *= 4
    return found


def pair(network: Network, names: Sequence[str], size_bytes: int) -> dict[str, Any] | None:
    """Return the slowest pair of nodes, with a test of each of its nodes with another one; None for a single node."""
    if network.nodes == 1:
        return None
    slowest, measured = slowest_pair(range(network.nodes), lambda groups: network.groups(groups, size_bytes))
    other = find_witness(slowest, measured)
    alone = network.groups([slowest], size_bytes)[slowest]  # nothing else uses the network now
    measured[slowest] = max(measured[slowest], alone)
    for two in [] if other is None else [(min(node, other), max(node, other)) for node in slowest]:
        measured.update(network.groups([two], size_bytes))
    slow, why = judge(slowest, other, measured, names)
    return {
        "nodes": [names[node] for node in slowest],
        "node": measured[slowest],
        "fastest": max(measured.values()),
        "slow": slow,
        "why": why,
        "groups": [{"nodes": [names[node] for node in group], "node": speed} for group, speed in measured.items()],
    }


def say(peers: processes.Processes, *lines: str) -> None:
    """Print the lines on rank 0."""
    if peers.first:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()


def head(result: dict[str, Any]) -> list[str]:
    """Return the lines above the table: what is measured, and what the site promises."""
    names, promise = result["nodes"], result["promised_gbps"]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return [
        f"nodes: {len(names)} ({shown}); processes per node: {result['processes_per_node']}; "
        f"{result['backend']} on {result['device']}, torch {result['torch']}",
        f"network_gbps of the site: {promise:g} Gbit/s per node, which is {promise / 8:g} GB/s"
        if promise
        else "the site has no network_gbps with which to compare the speeds",
        f"{'operation':<11} {'message':>8} {'time':>12} {'bus':>13} {'per node':>13}" + " of site" * bool(promise),
    ]


def line(row: dict[str, Any], promise: float | None) -> str:
    """Return a line of the table."""
    node = row["node"]
    shown = f"{row['operation']:<11} {words(row['bytes']):>8} {row['seconds'] * 1e3:>9.3f} ms {row['bus']:>8.3g} GB/s"
    shown += f"{'-':>14}" if node is None else f" {node:>8.3g} GB/s"
    return shown + (f" {node * 8 / promise:>7.0%}" if promise and node is not None else "")


def write(result: dict[str, Any]) -> None:
    """Print the slowest pair, and write network.json and, with matplotlib, network.png."""
    folder, found = Path(os.environ.get("RUNNER_RUN") or "."), result["pair"]
    lines = ["one node: no pair of nodes to compare"]
    if found:
        title = "SLOW PAIR" if found["slow"] else "slowest pair"
        lines = [f"{title}: {' - '.join(found['nodes'])}, {found['node']:.3g} GB/s per node; {found['why']}; "
                 f"fastest group of nodes: {found['fastest']:.3g} GB/s"]  # fmt: skip
    files.write_json(folder / "network.json", result)
    lines.append(f"results: {folder / 'network.json'}")
    if not pictures.available():
        lines.append("no picture: this Python has no matplotlib")
    else:
        curves = [
            {"name": operation, "starts": [], "points": [
                (row["bytes"], row["bus"]) for row in result["results"] if row["operation"] == operation]}
            for operation in OPERATIONS
        ]  # fmt: skip
        title = f"{len(result['nodes'])} nodes, {result['processes_per_node']} processes each, {result['backend']}"
        picture = {"title": title, "axis": "bytes", "panels": [{"metric": "bus", "curves": curves}]}
        pictures.draw(picture, folder / "network.png")
        lines.append(f"picture: {folder / 'network.png'}")
    say(processes.ALONE, *lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
