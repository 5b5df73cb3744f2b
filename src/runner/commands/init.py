"""init: create files to edit, in a project of the user's own, or a site file."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runner import cluster_facts
from runner.commands.console import Console
from runner.commands.options import Verbs
from runner.detection import cluster_name, find_site
from runner.environments.environment import quoted
from runner.errors import RunnerError
from runner.machine import process
from runner.site_files import load_site, signs, site_names

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from runner.site import Site


def add(subparsers: Verbs, common: argparse.ArgumentParser) -> None:
    init = subparsers.add_parser(
        "init",
        parents=[common],
        description="Make this folder a project. With --site NAME: write a site file for a cluster instead.",
    )
    init.add_argument(
        "--all",
        action="store_true",
        help="without --site: write every script, job file, environment, recipe and cluster file",
    )
    init.add_argument("--account", metavar="NAME", help="with --site: the account to charge")
    init.add_argument("--partition", metavar="NAME", help="with --site: the partition to use")
    init.add_argument(
        "--dry-run", action="store_true", help="print what would be written; write nothing"
    )
    init.set_defaults(run=init_project)


_SETTINGS = b"""\
# This folder is a runner project: its edf/, jobs/, containers/ and Containerfile.* win over those of runner.
# environment = "NAME"    # the environment to use when a command names none
"""


def init_project(args: argparse.Namespace, console: Console) -> int:
    """`runner init`: prints the path of each file that was written."""
    from runner.machine import files
    from runner.project import find_project

    given = [name for name in ("account", "partition") if getattr(args, name) and not args.site]
    given += ["all"] if args.all and args.site else []
    if given:
        raise RunnerError(
            f"init: --{given[0]} is given {'with' if args.site else 'without'} --site",
            "with --site, runner writes a site file, and without it a project",
            f"runner init --site {args.site or 'NAME'}{'' if args.site else f' --{given[0]} NAME'}",
            exit_code=2,
        )
    if args.site:
        return _init_site(args, console)
    shipped, here = find_project().shipped, Path.cwd()
    environment = "cpu" if find_site(None, os.environ)[0].is_local else "ngc-ds"
    first = (f"edf/{environment}.toml", "jobs/sft.py", "jobs/sft.toml")
    texts = {Path("runner.toml"): _SETTINGS}
    for path in _editable(shipped) if args.all else (shipped / name for name in first):
        texts[path.relative_to(shipped)] = path.read_bytes()
    kept = {path for path in texts if (here / path).exists()}
    for path in sorted(texts.keys() - kept):
        if not args.dry_run:
            files.write(
                here / path, texts[path], mode=0o777 if texts[path].startswith(b"#!") else 0o666
            )
        console.answer(str(path))
    differ = sorted(str(path) for path in kept if (here / path).read_bytes() != texts[path])
    if kept:
        count = "1 file exists" if len(kept) == 1 else f"{len(kept)} files exist"
        nothing = ", so nothing was written" if kept == texts.keys() else ""
        console.say(f"{count} already{nothing}")
        if differ:
            console.say(f"these differ from runner's copies: {', '.join(differ)}")
    if not args.all:
        console.say("to write all scripts, job files, environments and recipes: runner init --all")
    console.say(
        "you can delete any file that you do not edit (runner has its own copy), but keep runner.toml"
    )
    console.say(f"next: runner launch sft --env {environment} --build")
    return 0


def _editable(shipped: Path) -> list[Path]:
    """The shipped files that users edit. What always comes from runner is not copied."""
    found = [*shipped.glob("Containerfile.*")]
    for kind in ("containers", "edf", "jobs", "clusters"):
        found += [path for path in (shipped / kind).rglob("*") if path.is_file()]
    own = [shipped / "jobs" / name for name in ("training", "prefetch.py")]
    return [
        path
        for path in found
        if "__pycache__" not in path.parts and not any(map(path.is_relative_to, own))
    ]


def _init_site(args: argparse.Namespace, console: Console) -> int:
    """Write the user's site file: it overrides values of a known site, or defines a new one."""
    from runner.machine import files
    from runner.site_files import user_folder

    path = user_folder(os.environ) / f"{args.site}.toml"
    if path.exists():
        raise RunnerError(
            f"the site file {path} already exists",
            "runner never overwrites your files",
            f"edit {path}",
        )
    seen = look(os.environ)
    if not args.dry_run:
        _ask(args, seen, base_of(args.site, seen, os.environ))
    text, questions = site_file(args.site, args.account, args.partition, os.environ, seen)
    for question in questions:
        console.warn(question)
    if args.dry_run:
        console.answer(text)
        return 0
    files.write(path, text)
    console.answer(str(path))
    console.say(
        f"next: runner doctor --site {args.site}   (to leave out --site: export RUNNER_SITE={args.site})"
    )
    return 0


def _ask(args: argparse.Namespace, seen: Seen, base: Site) -> None:
    """At a terminal, ask for what cannot be detected: the account, and the partition if there are several."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    if (
        args.account is None
        and base.account is None
        and (base.account_required or len(seen.accounts) > 1)
    ):
        args.account = _answer("account to charge", seen.accounts, None)
    if args.partition is None and base.partition is None and len(seen.partitions) > 1:
        likely = seen.partition(None)
        names = tuple(partition.name for partition in seen.partitions)
        args.partition = _answer("partition", names, likely.name if likely else None)


def _answer(what: str, known: tuple[str, ...], default: str | None) -> str | None:
    choices = f" ({', '.join(known)})" if known else ""
    print(
        f"{what}{choices}{f' [{default}]' if default else ''}: ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    return sys.stdin.readline().strip() or default


_HINTS = {
    "account": "the project that pays: sbatch --account",
    "partition": "sbatch --partition; see sinfo",
    "gpus_per_node": "a number; see sinfo -o %G",
    "cpus_per_node": "a number; see sinfo -o %c",
    "memory": 'the memory to request per node, for example "450G"',
    "architecture": '"amd64" or "arm64": the processors of the compute nodes',
    "gpu": "the model of the GPUs",
}


@dataclass(frozen=True)
class Seen:
    """What Slurm reports about the cluster; empty if there is no Slurm."""

    name: str | None = None
    partitions: tuple[cluster_facts.Partition, ...] = ()
    accounts: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    def partition(self, name: str | None) -> cluster_facts.Partition | None:
        """The partition with that name, or else the most likely one."""
        named = [partition for partition in self.partitions if partition.name == name]
        return named[0] if named else None if name else cluster_facts.likely(self.partitions)


def look(environ: Mapping[str, str]) -> Seen:
    """Query Slurm, if this machine belongs to a Slurm cluster."""
    found, _ = find_site(None, environ)
    if found.is_local or process.which("sinfo") is None:
        return Seen()
    return Seen(
        cluster_name(environ),
        cluster_facts.partitions(),
        cluster_facts.accounts(),
        cluster_facts.versions(),
    )


def base_of(name: str, seen: Seen, environ: Mapping[str, str]) -> Site:
    """The site to inherit from: the known site of this name, one with the same partitions, or the detected one."""
    if name in site_names(environ):
        return load_site(name, environ)
    there = {partition.name for partition in seen.partitions}
    for known in site_names(environ):
        if any(kind == "partitions" and word in there for kind, word in signs(known, environ)):
            return load_site(known, environ)
    found, _ = find_site(None, environ)
    return find_site("generic-slurm", environ)[0] if found.is_local else found


def site_file(
    name: str, account: str | None, partition: str | None, environ: Mapping[str, str], seen: Seen
) -> tuple[str, tuple[str, ...]]:
    """(the text of the file, the values that the user still has to fill in)."""
    base = base_of(name, seen, environ)
    known = name in site_names(environ)
    lines = [
        f"# My values for the site {name}. They override the values that runner ships (runner site show {name})."
    ]
    if not known:
        lines += [f"name = {quoted(name)}", 'summary = "…"', f"base = {quoted(base.name)}"]
        if seen.name:
            lines += ["", "[detect]", f"clusters = [{quoted(seen.name)}]"]
    if account is None and len(seen.accounts) == 1:
        account = seen.accounts[0]
    said = {"account": account, "partition": partition}
    found = _found(seen, partition, base)
    if found or seen.versions:
        lines += [
            "",
            "[sources.cluster]",
            f'title = "sinfo, scontrol and programs of the cluster {seen.name or name}"',
        ]
        lines += [f'date = "{time.strftime("%Y-%m-%d")}"']
    lines += ["", "[values]"]
    for key, hint in _HINTS.items():
        value, of_base = said.get(key), getattr(base, key)
        if value is not None:
            lines.append(f"{key} = {quoted(value)}")
        elif key in found and found[key] != of_base:
            shown = quoted(text) if isinstance(text := found[key], str) else text
            lines += [f"# value of the site {base.name}: {of_base}"] if of_base is not None else []
            lines.append(f'{key} = {{ value = {shown}, source = "cluster" }}')
        elif of_base is None:
            lines.append(f"# {key} = …    # {hint}")
    lines.append(f"# image_folder = {quoted(base.image_folder)}")
    lines += _tables(seen, base)
    return "\n".join(lines) + "\n", _questions(name, account, partition, base, seen)


def _found(seen: Seen, name: str | None, base: Site) -> dict[str, str | int]:
    """The values that Slurm reports for the nodes of the partition."""
    partition = seen.partition(name or base.partition) or seen.partition(name)
    if partition is None:
        return {}
    architecture = cluster_facts.node_architecture(partition.name)
    return {
        "partition": partition.name,
        "cpus_per_node": partition.cpus_per_node,
        # node sizes differ slightly, and the values in a shipped file were chosen with care
        **(
            {"memory": partition.memory}
            if base.memory is None and base.memory_per_gpu is None
            else {}
        ),
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
            noun = "node" if partition.nodes == 1 else "nodes"
            limit = f"time limit {partition.time_limit}"
            if partition.time_limit == "infinite":
                limit = "no time limit"
            text = f"{partition.nodes} {noun}; {limit}"
            lines.append(
                f'{quoted(partition.name)} = {{ value = {quoted(text)}, source = "cluster" }}'
            )
    if seen.versions:
        lines += ["", "[values.versions]"]
        lines += [
            f'{key} = {{ value = {quoted(text)}, source = "cluster" }}'
            for key, text in seen.versions.items()
        ]
    return lines


def _questions(
    name: str, account: str | None, partition: str | None, base: Site, seen: Seen
) -> tuple[str, ...]:
    questions = []
    if account is None and base.account is None and (base.account_required or seen.accounts):
        yours = f" (your accounts: {', '.join(seen.accounts)})" if seen.accounts else ""
        questions.append(
            f"no account is set{yours}: set `account` in the file; or delete the file, and give --account NAME"
        )
    if partition is not None and seen.partitions and seen.partition(partition) is None:
        there = ", ".join(known.name for known in seen.partitions)
        questions.append(f"this cluster has no partition {partition!r}; its partitions: {there}")
    return tuple(questions)
