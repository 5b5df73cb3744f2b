"""A job: script or command, environment, resources, launcher, arguments; each value with where it came from.

`KEYS` declares each setting once. The command line, a job file and a site are layers, name -> value and origin;
`resolve` makes a job of them, and `checks` refuses a job that cannot run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from runner.environments.environment import Environment
from runner.errors import RunnerError
from runner.located_toml import Document, read_toml, refuse_unknown_keys, string_table, strings, typed
from runner.site import Origin

LAUNCHERS = {
    "torchrun": "one task per node; torch.distributed.run starts the processes",
    "srun": "one task per process; RANK, LOCAL_RANK and WORLD_SIZE are set for each",
    "accelerate": "one task per node; accelerate launch starts the processes",
    "none": "the command itself, once per node unless tasks_per_node is set",
}
SAVE_SECONDS = 120
HANG_SECONDS = 3600


@dataclass(frozen=True)
class Restart:
    """How often a job is restarted after each cause; 0: never."""

    time_limit: int = 0
    """after the time limit, or whenever the program asks to be continued (exit code 75)"""
    preemption: int = 0
    node_failure: int = 0
    hang: int = 0
    """after it was ended for lack of progress"""
    script_failure: int = 0
    """after any other exit code than 0 and 75"""
    without_checkpoint: int = 3
    """attempts in a row without a new checkpoint after which it stops, whatever else is allowed"""
    gpu_hours: int = 0
    """of all attempts together, after which no new one begins; 0: no limit"""


@dataclass(frozen=True)
class Resources:
    """What is asked of the scheduler. None: left to the cluster's default."""

    nodes: int = 1
    gpus_per_node: int = 0
    tasks_per_node: int = 1
    """processes per node"""
    cpus_per_task: int = 1
    """for each of these processes"""
    memory: str | None = None
    """per node, as sbatch writes it: 450G"""
    time_minutes: int | None = None
    partition: str | None = None
    account: str | None = None


@dataclass(frozen=True)
class Job:
    """What a batch script is rendered from."""

    name: str
    environment: Environment
    script: str | None = None
    """path of a .py or .sh file relative to the snapshot; None: `command` runs"""
    command: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    launcher: str = "none"
    resources: Resources = Resources()
    env: Mapping[str, str] = field(default_factory=dict)
    """set inside the container: wins over the EDF, the image and the host"""
    setup: str = ""
    """shell text that runs inside the container, once per node, before any task goes on"""
    task_prolog: str = ""
    """shell text that each task reads before its command, so that its exports count"""
    task_epilog: str = ""
    """shell text that each task reads after its command, with its exit code in RUNNER_EXIT_CODE"""
    notify: tuple[str, ...] = ("requeue", "failure", "end")
    """events that are posted to the user's webhook, if there is one"""
    mail_user: str = ""
    mail_events: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    save_seconds: int = SAVE_SECONDS
    """how long before the time limit the job is signalled to save and exit; 0: no signal"""
    hang_seconds: int = HANG_SECONDS
    """without a sign of progress, after which the job is ended; 0: never"""
    preflight: bool = False
    """whether each node is tried before the program starts"""
    restart: Restart | None = None
    """None: it is never restarted"""
    chain: int = 0
    """jobs to submit, each resuming from the last one's checkpoint; 0: a single job"""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """warnings, one line each"""

    @property
    def one_task_per_node(self) -> bool:
        """Whether the launcher itself starts a node's processes."""
        return self.launcher in ("torchrun", "accelerate")

    @property
    def tasks_per_node(self) -> int:
        """Tasks that srun starts on a node."""
        return 1 if self.one_task_per_node else self.resources.tasks_per_node

    @property
    def tasks(self) -> int:
        """Tasks that srun starts in all."""
        return self.resources.nodes * self.tasks_per_node

    @property
    def cpus_per_step_task(self) -> int:
        """CPUs of each task that srun starts: a launcher's task has those of all its processes."""
        return self.resources.cpus_per_task * (self.resources.tasks_per_node if self.one_task_per_node else 1)

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.resources.nodes * self.resources.gpus_per_node

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.resources.nodes * self.resources.tasks_per_node


class Key(NamedTuple):
    """How a setting of a job is written: on the command line, in a job file, in a site file."""

    kind: type
    """`tuple` and `dict` hold text"""
    flag: str = ""
    """of `launch`; empty: not an option"""
    shell: bool = False
    """whether `shell` takes the flag too"""
    table: str = ""
    """of the job file; empty: its top level"""
    key: str = ""
    """in the job file, where it differs from the setting's name"""
    in_file: bool = True
    site: bool = False
    """whether a site may set it, under the same name"""
    adds: bool = False
    """whether the values of all layers count, the command line's last; else the first layer that has one wins"""
    is_time_limit: bool = False
    """text in Slurm's form, which becomes minutes"""
    metavar: str | None = None
    help: str | None = None

    def place(self, name: str) -> tuple[str, ...]:
        """The keys that lead to the setting in a job file."""
        return (*((self.table,) if self.table else ()), self.key or name)


# Types and defaults of the values are those of the fields of Job and Resources.
KEYS: Mapping[str, Key] = {
    "name": Key(str, "--name", in_file=False, help="the job's name (default: the script's)"),
    "script": Key(str),
    "command": Key(tuple),
    "environment": Key(str),
    "launcher": Key(str, "--launcher", site=True, help="torchrun, srun, accelerate or none"),
    "arguments": Key(tuple, adds=True),
    "nodes": Key(int, "--nodes", table="resources", metavar="N"),
    "gpus_per_node": Key(int, "--gpus-per-node", shell=True, table="resources", site=True, metavar="N"),
    "tasks_per_node": Key(int, "--tasks-per-node", table="resources", metavar="N", help="processes per node"),
    "cpu_tasks_per_node": Key(int, table="resources"),
    "cpus_per_task": Key(int, "--cpus-per-task", shell=True, table="resources", metavar="N"),
    "memory": Key(
        str,
        "--memory",
        shell=True,
        table="resources",
        site=True,
        metavar="SIZE",
        help="memory per node, for example 450G",
    ),
    "time_minutes": Key(
        str,
        "--time",
        shell=True,
        table="resources",
        key="time",
        site=True,
        is_time_limit=True,
        metavar="LIMIT",
        help="MINUTES, HH:MM:SS or D-HH:MM:SS",
    ),
    "partition": Key(str, "--partition", shell=True, table="resources", site=True),
    "account": Key(str, "--account", shell=True, table="resources", site=True),
    "sbatch": Key(
        tuple, "--sbatch", table="slurm", adds=True, metavar="FLAG", help="any flag for sbatch: --sbatch=FLAG"
    ),
    "srun": Key(
        tuple, "--srun", shell=True, table="slurm", adds=True, metavar="FLAG", help="any flag for srun: --srun=FLAG"
    ),
    "chain": Key(
        int,
        "--chain",
        in_file=False,
        metavar="N",
        help="submit N jobs, each of which continues where the previous one ended",
    ),
    "preflight": Key(bool, "--no-preflight", help="do not check the nodes first"),
    "save_seconds": Key(int),
    "hang_seconds": Key(int),
    "restart": Key(Restart),
    "env": Key(dict, adds=True),
    "setup": Key(str),
    "task_prolog": Key(str),
    "task_epilog": Key(str),
    "notify": Key(tuple),
    "mail_user": Key(str, table="mail", key="user"),
    "mail_events": Key(tuple, table="mail", key="events"),
}


class Setting(NamedTuple):
    """A value and where it comes from."""

    value: Any
    origin: Origin


Layer = Mapping[str, Setting]
"""what one source says about a job: the command line, a job file, a site"""


def value(layer: Layer, name: str) -> Any:
    """The value of a setting; None where the layer does not have it."""
    return layer[name].value if name in layer else None


def command_line(values: Mapping[str, Any]) -> Layer:
    """The layer of the command line; None and empty values are left out. Raises RunnerError for a bad time limit."""
    found: dict[str, Setting] = {}
    for name, value in values.items():
        key = KEYS[name]
        if value is None or (key.kind in (tuple, dict) and not value):
            continue
        if key.is_time_limit:
            value = time_limit_minutes(value, key.flag)
        found[name] = Setting(tuple(value) if key.kind is tuple else value, Origin("command line"))
    return found


def load_job_file(path: Path) -> Layer:
    """The layer of the job file at `path`. Raises RunnerError that names line and key of what is wrong."""
    return layer_of(read_toml(path))


def layer_of(document: Document) -> Layer:
    """What the text of a job file says, and its name. Raises RunnerError that names line and key of what is wrong."""
    keys = {name: key for name, key in KEYS.items() if key.in_file}
    tables = {key.table for key in keys.values() if key.table}
    top = {"summary", *tables, *(key.place(name)[0] for name, key in keys.items())}
    refuse_unknown_keys(document, (), top, "job")
    for table in sorted(tables):
        typed(document, (table,), dict)
        inside = [key.place(name)[1] for name, key in keys.items() if key.table == table]
        refuse_unknown_keys(document, (table,), inside, "job")
    found = {"name": Setting(document.path.stem, Origin("job file", "", document.place()))}
    for name, key in keys.items():
        place = key.place(name)
        if document.get(*place) is not None:
            found[name] = Setting(_read(document, place, key), Origin("job file", "", document.place(*place)))
    if "script" in found and "command" in found:
        raise RunnerError(
            f"{document.place('command')}: both script and command are given",
            "a job starts one program",
            "use `script` for a .py or .sh file of the project, and `command` for anything else",
        )
    return found


def _read(document: Document, place: tuple[str, ...], key: Key) -> Any:
    if key.kind is tuple:
        return strings(document, place)
    if key.kind is dict:
        return string_table(document, place)
    if key.kind is Restart:
        return _restart(document)
    value: Any = typed(document, place, key.kind)
    return time_limit_minutes(value, str(document.place(*place))) if key.is_time_limit else value


def _restart(document: Document) -> Restart:
    """The policy of [restart]. Raises RunnerError for a number below 0."""
    typed(document, ("restart",), dict)
    names = tuple(item.name for item in fields(Restart))
    refuse_unknown_keys(document, ("restart",), names, "job")
    found = {name: count for name in names if (count := typed(document, ("restart", name), int)) is not None}
    for name, count in found.items():
        least = 1 if name == "without_checkpoint" else 0
        if count < least:
            raise RunnerError(
                f"{document.place('restart', name)}: {name} cannot be {count}",
                f"it must be {least} or more",
                f"{name} = {least}",
            )
    return Restart(**found)


_FORMS = re.compile(
    r"(?:(?P<days>\d+)-(?P<day_hours>\d+)(?::(?P<day_minutes>\d+)(?::(?P<day_seconds>\d+))?)?"
    r"|(?:(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+))|(?P<bare_minutes>\d+))"
)


def time_limit_minutes(text: str, what: str) -> int:
    """Whole minutes, rounded up, of `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M` or `D-H:M:S`. Source: sbatch(1), --time."""
    found = _FORMS.fullmatch(text.strip())
    if not found:
        raise RunnerError(
            f"{what}: cannot read the time limit {text!r}",
            "a limit must have the form MINUTES, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS",
            'use "00:30:00" for half an hour, "1-00" for a day',
        )
    part = {name: int(value or 0) for name, value in found.groupdict().items()}
    hours = part["days"] * 24 + part["day_hours"] + part["hours"]
    whole = hours * 60 + part["day_minutes"] + part["minutes"] + part["bare_minutes"]
    total = whole + -(-(part["day_seconds"] + part["seconds"]) // 60)
    if total < 1:
        raise RunnerError(
            f"{what}: the time limit {text!r} is zero",
            "a job with that limit could not run",
            "give at least one minute",
        )
    return total


def time_limit_text(total: int) -> str:
    """`HH:MM:00`, or `D-HH:MM:00` from a day on."""
    days, rest = divmod(total, 24 * 60)
    clock = f"{rest // 60:02}:{rest % 60:02}:00"
    return f"{days}-{clock}" if days else clock


class Estimate(NamedTuple):
    """GPU hours."""

    attempt: float
    """of one attempt that takes all of its time"""
    most: float
    """of all attempts that follow time limits, each as long"""

    @property
    def text(self) -> str:
        """One line for the user."""
        more = f", {self.most:,.1f} with all restarts after the time limit" if self.most > self.attempt else ""
        return f"{self.attempt:,.1f} GPU hours at most{more}"


def estimate(job: Job) -> Estimate | None:
    """What the job may cost; None without GPUs, or where no time limit is known."""
    if not job.gpus or not job.resources.time_minutes:
        return None
    attempt = job.gpus * job.resources.time_minutes / 60
    most = attempt * (1 + job.restart.time_limit if job.restart else 1)
    if job.restart and job.restart.gpu_hours:
        most = max(attempt, min(most, job.restart.gpu_hours))
    return Estimate(attempt, most)
