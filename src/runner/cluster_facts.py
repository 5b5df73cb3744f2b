"""What Slurm on this machine reports about its nodes and this user. `runner init --site` uses it."""

import getpass
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from runner.errors import RunnerError
from runner.machine import probe, process

_SECONDS = 5.0
_SINFO = ("sinfo", "--noheader", "--format=%P|%D|%c|%m|%G|%l")
_GRES_GPU = re.compile(r"gpu(?::([^:,(]+))?:(\d+)|gpu(?=[,(]|$)")


@dataclass(frozen=True)
class Partition:
    """A partition; the values of a node are those of its largest group of identical nodes."""

    name: str
    default: bool
    """whether jobs that name no partition run here"""
    nodes: int
    """of all groups"""
    cpus_per_node: int
    memory: str
    """of a node, as sbatch writes it"""
    gpus_per_node: int
    gpu: str
    """the type of GPU, as the site names it; empty if it has no name"""
    time_limit: str
    """as sinfo writes it: 12:00:00, 1-00:00:00, infinite"""


def partitions() -> tuple[Partition, ...]:
    """The partitions of the cluster; empty if Slurm does not answer."""
    return parse_partitions(output(_SINFO))


def parse_partitions(stdout: str) -> tuple[Partition, ...]:
    """Parse the output of `sinfo --format=%P|%D|%c|%m|%G|%l`, which has one line per partition and group of nodes.

    `*` after a name marks the default partition; `+` after a number means that some nodes have more. Source: sinfo(1),
    Slurm 22.05.
    """
    largest: dict[str, Partition] = {}
    nodes = Counter[str]()
    for line in stdout.splitlines():
        words = line.split("|")
        if len(words) != 6 or not words[1].strip().isdigit():
            continue
        name, gres = words[0].strip(), words[4].strip()
        cpus, memory = (int(re.sub(r"\D", "", word) or 0) for word in words[2:4])
        gpus = _GRES_GPU.search(gres)
        partition = Partition(
            name=name.removesuffix("*"),
            default=name.endswith("*"),
            nodes=int(words[1]),
            cpus_per_node=cpus,
            memory=f"{memory}M",
            gpus_per_node=int(gpus[2] or 1) if gpus else 0,
            gpu=(gpus[1] or "") if gpus else "",
            time_limit=words[5].strip(),
        )
        nodes[partition.name] += partition.nodes
        known = largest.get(partition.name)
        if known is None or partition.nodes > known.nodes:
            largest[partition.name] = partition
    return tuple(replace(each, nodes=nodes[name]) for name, each in largest.items())


def likely(partitions: Sequence[Partition]) -> Partition | None:
    """The partition for training jobs: the default one, unless only other partitions have GPUs."""
    with_gpus = [partition for partition in partitions if partition.gpus_per_node]
    candidates = with_gpus or list(partitions)
    return max(candidates, key=lambda partition: (partition.default, partition.nodes), default=None)


def node_architecture(partition: str) -> str | None:
    """The architecture of a partition's nodes, as OCI names it; None if Slurm does not report it."""
    names = output(
        ("sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N")
    ).split()
    if not names:
        return None
    found = re.search(r"\bArch=(\S+)", output(("scontrol", "--oneliner", "show", "node", names[0])))
    return probe.oci_architecture(found[1]) if found else None


def accounts() -> tuple[str, ...]:
    """The accounts that this user may charge; empty if Slurm has no accounting."""
    words = (
        "sacctmgr",
        "--noheader",
        "--parsable2",
        "show",
        "associations",
        f"user={getpass.getuser()}",
    )
    return tuple(dict.fromkeys(output((*words, "format=Account")).split()))


def versions() -> dict[str, str]:
    """Versions of Slurm and of the container programs on this machine."""
    asked = {
        "slurm": ("sbatch", "--version"),
        "enroot": ("enroot", "version"),
        "apptainer": ("apptainer", "--version"),
    }
    found = {name: re.search(r"\d+\.\d+[\w.-]*", output(words)) for name, words in asked.items()}
    return {name: version[0] for name, version in found.items() if version}


def output(words: tuple[str, ...]) -> str:
    """What a program prints; empty if it is missing, fails or does not answer."""
    if process.which(words[0]) is None:
        return ""
    with suppress(RunnerError):
        done = process.run(words, check=False, timeout_seconds=_SECONDS)
        return done.stdout if done.exit_code == 0 else ""
    return ""
