"""A lab on which the listed scripts can be submitted: everything that their `#SBATCH` lines name exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.lab.slurm import SlurmLab

from runner.option_grammar import SBATCH, split

SIZE = "Sockets=8 CoresPerSocket=64 ThreadsPerCore=2 RealMemory=16000000 TmpDisk=16000000"
"""of every node: more than any script asks for"""
GPUS = 16
"""of each kind, on every node"""


@dataclass
class Shape:
    """What the scripts ask for by name."""

    partitions: set[str] = field(default_factory=set)
    features: set[str] = field(default_factory=set)
    gres: set[str] = field(default_factory=set)
    """NAME or NAME:TYPE"""
    licenses: set[str] = field(default_factory=set)
    reservations: set[str] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)

    def read(self, text: str) -> None:
        for name, value in options(text):
            match name:
                case "partition":
                    self.partitions.update(value.split(","))
                case "constraint":
                    self.features.update(re.split(r"[,&|\[\]()!]+", re.sub(r"\*\d+", "", value)))
                case "gres":
                    self.gres.update(_kind(each) for each in value.split(","))
                case "gpus" | "gpus-per-node" | "gpus-per-task" | "gpus-per-socket":
                    self.gres.update(_kind(f"gpu:{each}") for each in value.split(","))
                case "licenses":
                    self.licenses.update(re.split(r"[:@]", each)[0] for each in value.split(","))
                case "reservation":
                    self.reservations.update(value.split(","))
                case "nodelist" | "exclude":
                    self.nodes.update(node_names(value))

    def plain_gres(self) -> list[str]:
        """The words of `Gres=`: per name its types, or the name alone."""
        names = {each.partition(":")[0] for each in self.gres} | {"gpu"}
        typed = sorted(each for each in self.gres if ":" in each)
        return [*typed, *sorted(name for name in names if not any(each.startswith(f"{name}:") for each in typed))]


def options(text: str) -> list[tuple[str, str]]:
    """(long name, value) of each option in the `#SBATCH` lines."""
    words: list[str] = []
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            try:
                words += shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError:
                continue
    found: list[tuple[str, str]] = []
    rest: Sequence[str] = words
    while rest:
        read, rest = split(rest, SBATCH)
        found += [(option.name, option.value or "") for option in read]
        rest = rest[1:]  # a word that is not an option, such as hetjob
    return found


def _kind(gres: str) -> str:
    """`gpu:a100:4(S:0)` -> `gpu:a100`; `gpu:4` -> `gpu`."""
    words = re.sub(r"\(.*?\)|=\d+$", "", gres).split(":")
    return ":".join(word for word in words[:2] if word and not re.fullmatch(r"\d+[kKmM]?", word))


def node_names(value: str) -> list[str]:
    """`n[01-03,7],m` -> n01 n02 n03 n7 m."""
    found = []
    for word in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", value):
        head, _, tail = word.partition("[")
        if not tail:
            found.append(head)
            continue
        inner, _, suffix = tail.partition("]")
        for part in inner.split(","):
            first, _, last = part.partition("-")
            if first.isdigit() and (not last or last.isdigit()):
                numbers = range(int(first), int(last or first) + 1)
                found += [f"{head}{number:0{len(first)}}{suffix}" for number in numbers]
    return found


def usable(names: Iterable[str], pattern: str = r"[A-Za-z0-9_.<>/+:-]+") -> list[str]:
    """The names that slurm.conf can hold; a script with another one is refused by sbatch too."""
    return sorted(name for name in names if name and re.fullmatch(pattern, name))


def node_words(shape: Shape) -> str:
    """What every node has, as words of slurm.conf."""
    features = ",".join(usable(shape.features))
    gres = ",".join(f"{each}:{GPUS}" for each in usable(shape.plain_gres()))
    return f"{SIZE} Gres={gres}" + (f" Feature={features}" if features else "")


def node_list(shape: Shape) -> list[str]:
    """The nodes that scripts name."""
    return usable(shape.nodes, r"[A-Za-z0-9_.-]+")


def configuration(shape: Shape, cloud: Sequence[str]) -> list[str]:
    """Lines for slurm.conf: everything that the shape names, and the nodes `cloud`, on which nothing runs."""
    names = sorted({"gpu", *(each.partition(":")[0] for each in usable(shape.plain_gres()))})
    partitions = [name for name in usable(shape.partitions) if name not in ("normal", "debug")]
    licenses = ",".join(f"{name}:100000" for name in usable(shape.licenses))
    return [
        f"GresTypes={','.join(names)}",
        "MaxNodeCount=9999",
        "MaxArraySize=100001",
        "MaxJobCount=200000",
        "SuspendProgram=/bin/true",
        "ResumeProgram=/bin/true",
        "SuspendTime=-1",
        *([f"Licenses={licenses}"] if licenses else []),
        *(f"NodeName={name} {node_words(shape)} State=CLOUD" for name in cloud),
        *(f"PartitionName={name} Nodes=ALL MaxTime=UNLIMITED OverSubscribe=YES State=UP" for name in partitions),
        "PartitionName=everything Nodes=ALL Default=YES MaxTime=UNLIMITED OverSubscribe=YES State=UP",
    ]


def reserve(lab: SlurmLab, shape: Shape, nodes: str) -> None:
    """Make the reservations that the scripts name, all of them on `nodes`."""
    for name in usable(shape.reservations):
        words = ("create", "reservation", f"ReservationName={name}", "StartTime=now", "Duration=365-00:00:00")
        flags = "Flags=OVERLAP,IGNORE_JOBS"
        lab.run(("scontrol", *words, "Users=root", f"Nodes={nodes}", flags), check=False)
