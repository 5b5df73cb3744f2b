"""The options of sbatch that a script, the environment and settings give, and what they request."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from runner.errors import RunnerError
from runner.option_grammar import SBATCH, split
from runner.runs.job import Layer, Resources, Setting, time_limit_minutes, value
from runner.runs.schedulers.flags import CPUS
from runner.runs.schedulers.slurm_commands import gpu_request, time_limit_text
from runner.site import Origin, Site


def head(text: str) -> Iterator[str]:
    """The lines that sbatch reads: those before the first command."""
    for line in text.split("\n"):
        if line.strip() and not line.lstrip().startswith("#"):
            return
        yield line


def of_words(words: Sequence[str], origin: Origin) -> dict[str, Setting]:
    """The options in words of sbatch; of the same option, sbatch takes the last."""
    found = split(words, SBATCH)[0]
    return {each.name.replace("_", "-"): Setting(each.value or "", origin) for each in found}


def of_script(text: str, name: str) -> list[dict[str, Setting]]:
    """The options of the `#SBATCH` lines, for each component of a heterogeneous job."""
    found: list[dict[str, Setting]] = [{}]
    for number, line in enumerate(head(text), 1):
        if line.startswith("#SBATCH"):
            with suppress(ValueError):  # a quote that is not closed: sbatch itself reports it
                words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
                if words[:1] in (["hetjob"], ["packjob"]):
                    found.append({})
                else:
                    found[-1] |= of_words(words, Origin(f"{name}:{number}"))
    return found


_OF_VARIABLE = {
    "ARRAY_INX": "array",
    "TIMELIMIT": "time",
    "MEM_PER_NODE": "mem",
    "REQ_SWITCH": "switches",
    "SEGMENT_SIZE": "segment",
}


def of_environ(environ: Mapping[str, str]) -> dict[str, Setting]:
    """The options in the SBATCH_* variables."""
    return {option: Setting(environ[name], Origin(name)) for name, option in _of_variables(environ)}


def _of_variables(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(variable, option) for the SBATCH_* variables."""
    for name in names:
        if name.startswith("SBATCH_"):
            known = name.removeprefix("SBATCH_")
            yield name, _OF_VARIABLE.get(known, known.lower().replace("_", "-"))


# of each group, sbatch uses one option
_ALTERNATIVES = (
    {"mem", "mem-per-cpu", "mem-per-gpu"},
    {"requeue", "no-requeue"},
    {"gpus", "gpus-per-node"},
    CPUS,
)


def overriding(text: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The SBATCH_* variables that would override an option of the script."""
    options = {name for component in of_script(text, "") for name in component}
    options = options.union(*(group for group in _ALTERNATIVES if options & group))
    return tuple(sorted(name for name, option in _of_variables(environ) if option in options))


FLAGS = {
    "nodes": "nodes",
    "tasks_per_node": "ntasks-per-node",
    "cpus_per_task": "cpus-per-task",
    "memory": "mem",
    "partition": "partition",
    "account": "account",
    "mail_user": "mail-user",
    "switches": "switches",
    "segment": "segment",
}
"""settings of runner -> the option of sbatch"""


def of_settings(layer: Layer, site: Site) -> tuple[str, ...]:
    """The flags of sbatch for the settings of the command line or of a job file."""
    minutes, events = value(layer, "time_minutes"), value(layer, "mail_events")
    return (
        *(f"--{option}={value(layer, name)}" for name, option in FLAGS.items() if name in layer),
        *gpu_request(value(layer, "gpus_per_node") or 0, site),
        *((f"--time={time_limit_text(minutes)}",) if minutes else ()),
        *((f"--mail-type={','.join(events).upper()}",) if events else ()),
        *(value(layer, "sbatch") or ()),
    )


def resources(options: Layer, others: Sequence[Layer] = ()) -> Resources:
    """What a job requests, as far as it is known. Its time is that of the longest component.

    `others` are the options of the other components of a heterogeneous job.
    """
    found = requested(options)
    times = [found.time_minutes, *(requested(other).time_minutes for other in others)]
    known = [minutes for minutes in times if minutes]
    return replace(found, time_minutes=max(known) if len(known) == len(times) else None)


def requested(options: Layer) -> Resources:
    """What the options request, as far as they are numbers. Of a range of nodes, the largest number."""

    def text(name: str) -> str:
        return str(value(options, name) or "")

    def number(name: str) -> int:
        found = re.search(r"(\d+)\D*$", text(name))
        return int(found[1]) if found else 0

    ntasks, tasks, gpus = number("ntasks"), number("ntasks-per-node"), number("gpus-per-node")
    nodes = number("nodes") or nodes_for((ntasks, tasks), (number("gpus"), gpus))
    gres = gpus_of_gres(text("gres"))
    tasks = tasks or -(-ntasks // nodes) or 1
    gpus = gpus or gres or -(-number("gpus") // nodes)
    found = Resources(
        nodes, gpus or number("gpus-per-task") * tasks, account=text("account") or None
    )
    with suppress(RunnerError):
        return replace(found, time_minutes=time_limit_minutes(text("time"), "time"))
    return found


def nodes_for(*counts: tuple[int, int]) -> int:
    """The nodes of a job without --nodes: as many as its tasks and its GPUs, each (total, number per node), need.

    A number that is not given is 0. Source: Slurm 25.11, src/common/slurm_opt.c and src/slurmctld/gres_ctld.c.
    """
    return max([1, *(-(-total // per_node) for total, per_node in counts if per_node)])


def gpus_of_gres(gres: str) -> int:
    """The GPUs in `--gres`: `gpu` and `gpu:a100` are one, `gpu:4` and `gpu:a100:4` four. Source: sbatch(1) 25.11."""
    found = (
        re.fullmatch(r"(?:gres[:/])?gpu(?::[^:\d][^:]*)?(?::(\d+))?", part.strip())
        for part in gres.split(",")
    )
    return sum(int(each[1] or 1) for each in found if each)


def array_tasks(text: str) -> tuple[int, ...]:
    """The task numbers of --array (`1-10:3,15%2`); empty for a single job."""
    found: list[int] = []
    for part in text.partition("%")[0].split(","):
        if each := re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part.strip()):
            found += range(int(each[1]), int(each[2] or each[1]) + 1, int(each[3] or 1))
    return tuple(dict.fromkeys(found))
