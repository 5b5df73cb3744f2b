"""The site file that `runner init --site NAME` writes: what was said and seen, the rest as comments to fill in."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from runner import cluster_facts
from runner.detection import cluster_name, find_site
from runner.environments.environment import quoted
from runner.machine import process
from runner.site import Site
from runner.site_files import load_site, signs, site_names

_HINTS = {
    "account": "the project that pays: sbatch --account",
    "partition": "sbatch --partition; see sinfo",
    "gpus_per_node": "a number; see sinfo -o %G",
    "cpus_per_node": "a number; see sinfo -o %c",
    "memory": '"450G", to ask for per node',
    "architecture": '"amd64" or "arm64": the processors of the compute nodes',
    "gpu": "the GPU's kind",
}


@dataclass(frozen=True)
class Seen:
    """What the cluster says of itself; empty where there is none."""

    name: str | None = None
    partitions: tuple[cluster_facts.Partition, ...] = ()
    accounts: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    def partition(self, name: str | None) -> cluster_facts.Partition | None:
        """The partition of that name, else the likely one."""
        named = [partition for partition in self.partitions if partition.name == name]
        return named[0] if named else None if name else cluster_facts.likely(self.partitions)


def look(environ: Mapping[str, str]) -> Seen:
    """Ask this machine's Slurm, where it belongs to one."""
    found, _ = find_site(None, environ)
    if found.scheduler != "slurm" or process.which("sinfo") is None:
        return Seen()
    return Seen(cluster_name(environ), cluster_facts.partitions(), cluster_facts.accounts(), cluster_facts.versions())


def base_of(name: str, seen: Seen, environ: Mapping[str, str]) -> Site:
    """The site to build on: itself where it is known; the one with such partitions; what the machine looks like."""
    if name in site_names(environ):
        return load_site(name, environ)
    there = {partition.name for partition in seen.partitions}
    for known in site_names(environ):
        if any(kind == "partitions" and word in there for kind, word in signs(known, environ)):
            return load_site(known, environ)
    found, _ = find_site(None, environ)
    return found if found.scheduler == "slurm" else find_site("generic-slurm", environ)[0]


def site_file(
    name: str, account: str | None, partition: str | None, environ: Mapping[str, str], seen: Seen
) -> tuple[str, tuple[str, ...]]:
    """(the file's text, what is still to be answered)."""
    base = base_of(name, seen, environ)
    known = name in site_names(environ)
    lines = [f"# My values for the site {name}; they win over those that come with runner (runner site show {name})."]
    if not known:
        lines += [f"name = {quoted(name)}", 'summary = "…"', f"base = {quoted(base.name)}"]
        if seen.name:
            lines += ["", "[detect]", f"clusters = [{quoted(seen.name)}]"]
    if account is None and len(seen.accounts) == 1:
        account = seen.accounts[0]
    said = {"account": account, "partition": partition}
    found = _found(seen, partition, base)
    if found or seen.versions:
        lines += ["", "[sources.cluster]", f'title = "sinfo, scontrol and programs of the cluster {seen.name or name}"']
        lines += [f'date = "{time.strftime("%Y-%m-%d")}"']
    lines += ["", "[values]"]
    for key, hint in _HINTS.items():
        value, of_base = said.get(key), getattr(base, key)
        if value is not None:
            lines.append(f"{key} = {quoted(value)}")
        elif key in found and found[key] != of_base:
            lines += [f"# {base.name} says: {of_base}"] if of_base is not None else []
            lines.append(f'{key} = {{ value = {_toml(found[key])}, source = "cluster" }}')
        elif of_base is None:
            lines.append(f"# {key} = …    # {hint}")
    lines.append(f"# image_folder = {quoted(base.image_folder)}")
    lines += _tables(seen, base)
    return "\n".join(lines) + "\n", _questions(name, account, partition, base, seen)


def _found(seen: Seen, name: str | None, base: Site) -> dict[str, str | int]:
    """What the cluster says of the nodes of the partition that is used."""
    partition = seen.partition(name or base.partition) or seen.partition(name)
    if partition is None:
        return {}
    architecture = cluster_facts.node_architecture(partition.name)
    return {
        "partition": partition.name,
        "cpus_per_node": partition.cpus_per_node,
        # sizes of nodes differ by a little; what a shipped file asks for was chosen with care
        **({"memory": partition.memory} if base.memory is None and base.memory_per_gpu is None else {}),
        **({"gpus_per_node": partition.gpus_per_node} if partition.gpus_per_node else {}),
        **({"gpu": partition.gpu} if partition.gpu and base.gpu is None else {}),
        **({"architecture": architecture} if architecture else {}),
    }


def _tables(seen: Seen, base: Site) -> list[str]:
    lines: list[str] = []
    unknown = [partition for partition in seen.partitions if partition.name not in base.partitions]
    if unknown:
        lines += ["", "[values.partitions]"]
        for partition in unknown:
            text = f"{partition.nodes} nodes; {partition.time_limit}"
            lines.append(f'{quoted(partition.name)} = {{ value = {quoted(text)}, source = "cluster" }}')
    if seen.versions:
        lines += ["", "[values.versions]"]
        lines += [f'{key} = {{ value = {quoted(text)}, source = "cluster" }}' for key, text in seen.versions.items()]
    return lines


def _questions(name: str, account: str | None, partition: str | None, base: Site, seen: Seen) -> tuple[str, ...]:
    questions = []
    if account is None and base.account is None and (base.account_required or seen.accounts):
        yours = f" (yours: {', '.join(seen.accounts)})" if seen.accounts else ""
        questions.append(f"{name} wants an account: --account NAME{yours}, or fill it in")
    if partition is not None and seen.partitions and seen.partition(partition) is None:
        there = ", ".join(known.name for known in seen.partitions)
        questions.append(f"there is no partition {partition!r} here; there are: {there}")
    return tuple(questions)


def _toml(value: str | int) -> str:
    return str(value) if isinstance(value, int) else quoted(value)
