"""Combine layers of settings into a Job. Each value comes from the strongest layer that has one, with its origin."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from runner.environments.environment import Environment
from runner.errors import RunnerError, unknown
from runner.runs.checks import check
from runner.runs.job import KEYS, LAUNCHERS, MEMORY, Job, Layer, Resources, Restart, Setting
from runner.site import Origin, Site

TYPE_CHECKING = False  # `typing` costs start-up time
if TYPE_CHECKING:
    from runner.runs.program import Program

DEFAULT = Origin("default")
_DEFAULTS = {
    each.name: each.default_factory() if callable(each.default_factory) else each.default
    for each in (*fields(Job), *fields(Resources))
}


def resolve(layers: Sequence[Layer], environment: Environment, site: Site) -> Job:
    """The job that these layers describe on a site. The strongest layer (the command line) comes first.

    Raises RunnerError for a job that cannot run on the site.
    """
    layers = _of_one_program(layers)
    script, command = setting_of("script", layers).value, setting_of("command", layers).value
    if script is None and not command:
        raise _no_program(layers)
    computed: dict[
        str, Setting
    ] = {}  # the weakest layer: defaults that are computed from other settings
    site_layer = _site_layer(site, script)
    layers = (*layers, site_layer, computed)
    is_module = command and command[0] == "-m" and len(command) > 1
    program = script or (command[1] if is_module else command[0])
    _compute(computed, layers, site, program)
    found = {name: setting_of(name, layers) for name in KEYS}
    if found["launcher"] is site_layer.get("launcher") and _is_one_process(found):
        found["launcher"] = Setting("none", Origin("one process needs no launcher"))
    if found["launcher"].value not in LAUNCHERS:
        raise unknown(
            "launcher", found["launcher"].value, LAUNCHERS, place=found["launcher"].origin.place
        )
    parts = {each.name for each in fields(Resources)}
    mine = {each.name for each in fields(Job)} & KEYS.keys() - {"environment"}
    job = Job(
        environment=environment,
        resources=Resources(**{name: found[name].value for name in parts}),
        origins={name: setting.origin for name, setting in found.items()},
        notes=_notes(found, site),
        **{name: found[name].value for name in mine},
    )
    check(job, site)
    return job


def setting_of(name: str, layers: Sequence[Layer]) -> Setting:
    """The setting from the strongest layer that has it; if it adds up, all values, the strongest layer's last."""
    having = [layer[name] for layer in layers if name in layer]
    if not having:
        return Setting(_DEFAULTS.get(name), DEFAULT)
    if not KEYS[name].adds:
        return having[0]
    values = [setting.value for setting in reversed(having)]
    if KEYS[name].kind is tuple:
        return Setting(tuple(word for words in values for word in words), having[0].origin)
    return Setting(
        {key: value for table in values for key, value in table.items()}, having[0].origin
    )


def _of_one_program(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """The layers, without programs that a stronger layer replaces, and without the launchers of these programs.

    Raises RunnerError for a layer with two programs.
    """
    kept: list[Layer] = []
    replaced: set[str] = set()
    has_script = False
    for layer in layers:
        if "script" in layer and "command" in layer:
            raise RunnerError(
                "both a script and a command are given",
                "a job starts one program",
                "leave out one of the two",
            )
        # the launcher for a script also works for another script, which may be the same one at another path
        own = replaced | (
            {"launcher"} if replaced and not (has_script and "script" in layer) else set()
        )
        kept.append({name: setting for name, setting in layer.items() if name not in own})
        if not replaced and ("script" in layer or "command" in layer):
            replaced, has_script = {"script", "command", "batch", "name"}, "script" in layer
    return tuple(kept)


def _no_program(layers: Sequence[Layer]) -> RunnerError:
    path = next(
        (
            name.origin.place.path
            for layer in layers
            if (name := layer.get("name")) and name.origin.place
        ),
        None,
    )
    if path:
        return RunnerError(
            "nothing to run",
            f"{path} sets none of `script`, `batch` and `command`",
            f'add script = "jobs/NAME.py" to {path.name}',
        )
    what = "there is no job, no script and no command on the command line"
    return RunnerError("nothing to run", what, "give a JOB, --script NAME, or -- COMMAND")


def _site_layer(site: Site, script: str | None) -> Layer:
    """The site's settings. Its launcher applies only to Python scripts.

    sbatch's variables come before the site's partition and account, because a user has chosen them.
    """
    found = {}
    for name, key in KEYS.items():
        value = getattr(site, name) if key.site else None
        if value is not None and (
            name != "launcher" or (script is not None and script.endswith(".py"))
        ):
            found[name] = Setting(value, _site_origin(site, name))
    for name in () if site.is_local else ("partition", "account"):
        variable = f"SBATCH_{name.upper()}"
        if chosen := os.environ.get(variable):
            found[name] = Setting(chosen, Origin(variable))
    return found


def _site_origin(site: Site, name: str) -> Origin:
    return site.origins.get(name, Origin(f"site {site.name}"))


def _compute(
    computed: dict[str, Setting], layers: Sequence[Layer], site: Site, program: str
) -> None:
    """Compute defaults from other settings. `computed` is the weakest of the layers."""

    def default(name: str, value: object) -> None:
        computed[name] = Setting(value, DEFAULT)

    name = program.rstrip("/").rsplit("/", 1)[-1].removesuffix(".py").removesuffix(".sh")
    default("name", re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60] or "job")
    default("launcher", "none")
    gpus = setting_of("gpus_per_node", layers).value
    without_gpus = setting_of(
        "cpu_tasks_per_node", layers
    )  # the default for jobs that can run with and without GPUs
    default("tasks_per_node", 1 if setting_of("launcher", layers).value == "none" else max(1, gpus))
    if gpus == 0 and without_gpus.value is not None:
        computed["tasks_per_node"] = without_gpus
    default(
        "cpus_per_task",
        max(1, _cpus(site, gpus) // max(1, setting_of("tasks_per_node", layers).value)),
    )
    if gpus and site.memory_per_gpu:
        limit = MEMORY.fullmatch(site.memory_per_gpu)
        # checks.py refuses other text
        memory = f"{int(limit[1]) * gpus}{limit[2]}" if limit else site.memory_per_gpu
        computed["memory"] = Setting(memory, _site_origin(site, "memory_per_gpu"))
    default("preflight", gpus > 0 and not site.is_local)
    chain = setting_of("chain", layers).value
    if chain:  # each job of a chain continues after the time limit of the one before
        default("restart", Restart(time_limit=chain - 1))


def _is_one_process(found: Mapping[str, Setting]) -> bool:
    return bool(found["nodes"].value == 1 and found["tasks_per_node"].value == 1)


def _notes(found: Mapping[str, Setting], site: Site) -> tuple[str, ...]:
    """Warnings about values that a default replaced."""
    if site.is_local:
        return ()
    notes = []
    if found["gpus_per_node"].origin is DEFAULT:
        notes.append(
            f"requesting no GPUs: neither the job nor site {site.name} sets gpus_per_node (--gpus-per-node N)"
        )
    if found["spare_nodes"].value or found["min_nodes"].value:
        notes.append(
            "losing the first node, where the batch script runs, ends the allocation: the job is then queued again"
        )
    known = site.cpus_per_node or site.cpus_per_gpu
    if found["cpus_per_task"].origin is DEFAULT and found["gpus_per_node"].value > 0 and not known:
        notes.append(
            f"requesting 1 CPU per process: site {site.name} does not set cpus_per_node"
            f" (--cpus-per-task N, or cpus_per_node in the site file)"
        )
    return tuple(notes)


def _cpus(site: Site, gpus: int) -> int:
    """The number of CPUs per node for a job with this many GPUs; 0: not known."""
    if site.cpus_per_gpu and gpus:
        return min(site.cpus_per_gpu * gpus, site.cpus_per_node or site.cpus_per_gpu * gpus)
    return site.cpus_per_node or 0


_SAVE_KEY = "checkpoint_seconds"  # key of an entry in metrics.jsonl: how long a save took
_RUNS = 10  # look only at the newest runs of the job; older ones may have used another model
_TAIL_BYTES = 1 << 20
_FACTOR, _EXTRA_SECONDS = (
    2,
    30,
)  # the file system may be slow, and the current training step must end first
_MOST = 65535  # sbatch(1), --signal


def with_measured(job: Job, runs: Path) -> Job:
    """The job, with an earlier signal if a save of one of its earlier runs took too long for `save_seconds`."""
    if not job.save_seconds:
        return job
    seconds, run = max(
        ((max(taken), run) for run, taken in _saves(job.name, runs, _SAVE_KEY)), default=(0.0, "")
    )
    needed = min(math.ceil(_FACTOR * seconds + _EXTRA_SECONDS), _MOST)
    if not run or needed <= job.save_seconds:
        return job
    origin = Origin(f"measured: a save of {run} took {seconds:.0f} s")
    note = f"the job saves {needed} s before its limit, not {job.save_seconds} s: {run} took {seconds:.0f} s to save"
    return replace(
        job,
        save_seconds=needed,
        origins={**job.origins, "save_seconds": origin},
        notes=(*job.notes, note),
    )


def _saves(name: str, runs: Path, key: str) -> Iterator[tuple[str, list[float]]]:
    """(run, seconds of its saves) of those of the job's newest runs that have saved, oldest first."""
    folders = [path for path in runs.glob(f"{name}-*") if path.name[len(name) + 1 :].isdigit()]
    if not folders:
        return
    from runner.runs.metrics import Metrics, newest_records  # slow to import

    folders.sort(key=lambda path: int(path.name[len(name) + 1 :]))
    for folder in folders[-_RUNS:]:
        metrics = Metrics.of_file(folder / "metrics.jsonl")
        taken = [entry.get(key) for entry in newest_records(metrics, _TAIL_BYTES)]
        if seconds := [float(each) for each in taken if isinstance(each, int | float) and each > 0]:
            yield folder.name, seconds


_WAIT_KEY = "checkpoint_wait_seconds"  # the part of a save in which the training waited
_RUNS_WITH_FAILURES = 200
# 419 unexpected interruptions of 2,048 nodes in 54 days. Source: https://arxiv.org/abs/2407.21783
_PUBLISHED = Setting(6000, Origin("the training of Llama 3"))


def with_save_every(job: Job, program: Program, site: Site, runs: Path | None) -> Job:
    """The job with the variables for `save_every`: for `auto`, the mean time between two failures on these nodes.

    It is what the site's runs have measured; the published figure, or the site's, counts as one failure more.
    Raises RunnerError for a program that does not read them.
    """
    if not job.save_every:
        return job
    from runner.runs.program import check_saves

    check_saves(job, program)
    job = replace(job, env={**job.env, "RUNNER_SAVE_EVERY": str(job.save_every)})
    if job.save_every != "auto":
        return job
    found = (
        Setting(site.failure_hours, _site_origin(site, "failure_hours"))
        if site.failure_hours
        else _PUBLISHED
    )
    why = f"1 failure in {found.value:,} node-hours: {found.origin.source}"
    failures, node_hours = _failures(site.name, runs) if runs else (0, 0)
    if node_hours >= 1:
        why += f"; {failures} in {node_hours:,.0f} node-hours of earlier runs"
    hours = (node_hours + found.value) / (failures + 1) / job.resources.nodes
    first = "first save after 300 s, to measure how long it takes"
    for run, waits in _saves(job.name, runs, _WAIT_KEY) if runs else ():
        first = f"the training waited {waits[-1]:.1f} s for a save of {run}"
    origin = replace(
        job.origins["save_every"], source=f"{first}; a failure every {hours:.1f} h ({why})"
    )
    env = {**job.env, "RUNNER_FAILURE_HOURS": f"{hours:.2f} ({why})"}
    return replace(job, env=env, origins={**job.origins, "save_every": origin})


def _failures(site: str, runs: Path) -> tuple[int, float]:
    """(failures of nodes and hangs, node-hours) of the site's newest runs."""
    from runner.runs.run import list_runs

    found = [run for run in list_runs(runs) if run.site == site][-_RUNS_WITH_FAILURES:]
    ended = [(run, attempt, attempt.last_sign or 0) for run in found for attempt in run.attempts]
    seconds = sum(
        (end - attempt.started) * run.nodes for run, attempt, end in ended if attempt.started
    )
    return sum(attempt.cause in ("node_failure", "hang") for _, attempt, _ in ended), seconds / 3600
