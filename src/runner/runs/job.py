"""A job: script or command, environment, resources, launcher and arguments. Every value has an origin.

`KEYS` declares each setting once. The command line, a job file and a site are layers that map names to values with
origins. `resolve` combines them into a job, and `checks` rejects a job that cannot run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from runner.environments.environment import Environment
from runner.errors import RunnerError
from runner.located_toml import (
    Document,
    read_toml,
    refuse_unknown_keys,
    string_table,
    strings,
    typed,
)
from runner.site import Origin

LAUNCHERS = {
    "torchrun": "one task per node; torch.distributed.run starts the processes",
    "srun": "one task per process; RANK, LOCAL_RANK and WORLD_SIZE are set for each",
    "accelerate": "one task per node; accelerate launch starts the processes",
    "none": "the command itself, once per node unless tasks_per_node is set",
}


@dataclass(frozen=True)
class Restart:
    """How many times a job is restarted after each cause; 0: never."""

    time_limit: int = 0
    """after the time limit, or if the program asks for another attempt (exit code 75)"""
    preemption: int = 0
    node_failure: int = 0
    hang: int = 0
    """after it was ended for a hang"""
    script_failure: int = 0
    """after any other exit code than 0 and 75"""
    without_checkpoint: int = 3
    """after this many attempts in a row without a new checkpoint, there is no further restart, whatever the cause"""
    gpu_hours: int = 0
    """no attempt starts after all attempts together have used this many GPU hours; 0: no limit"""
    in_place: bool | None = None
    """whether the next attempt starts in the same allocation if it can; None: only after a fault of the machine"""

    @property
    def words(self) -> Mapping[str, str]:
        """The values that are set, as the batch script reads them."""
        return {
            name: str(value).lower()
            for name, value in asdict(self).items()
            if value or value is False
        }


_COUNTS = tuple(each.name for each in fields(Restart) if each.name != "in_place")


@dataclass(frozen=True)
class Resources:
    """What the job requests from the scheduler. None: the cluster's default."""

    nodes: int = 1
    """nodes with ranks"""
    gpus_per_node: int = 0
    tasks_per_node: int = 1
    """processes per node"""
    cpus_per_task: int = 1
    """for each of these processes"""
    memory: str | None = None
    """per node, in sbatch's format: 450G"""
    time_minutes: int | None = None
    partition: str | None = None
    account: str | None = None
    spare_nodes: int = 0
    """nodes that the job holds in addition; each stays idle until it replaces a lost or unfit node"""
    min_nodes: int | None = None
    """the smallest number of nodes with which a restart may continue; None: `nodes`"""
    switches: str | None = None
    """the largest number of leaf switches, and how long to wait for them, in sbatch's format: 1@60"""
    segment: int | None = None
    """nodes that must be in the same block of the topology"""


@dataclass(frozen=True)
class Job:
    """The job from which a batch script is rendered."""

    name: str
    environment: Environment
    script: str | None = None
    """path of a .py or .sh file, relative to the snapshot; None: run `command`"""
    batch: str | None = None
    """path of the user's own batch script, which sbatch gets unchanged; there is no script and no command then"""
    command: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    check_arguments: str = ""
    """the program whose arguments runner completes and checks before submission: megatron-gpt"""
    launcher: str = "none"
    resources: Resources = Resources()
    """of a heterogeneous job: of its first component"""
    other_gpus: int = 0
    """the GPUs of the other components of a heterogeneous job"""
    env: Mapping[str, str] = field(default_factory=dict)
    """variables set inside the container; they override those of the EDF, the image and the host"""
    hub_in_cache: bool = False
    """whether the job gets HF_HOME in the shared cache, because everything that it names on the hub is there"""
    program_in_image: bool = False
    """the program is in the image or a mount: tasks start in the image's working directory; no code is copied"""
    host_setup: str = ""
    """bash text that runs on the host before the step; the tasks get the variables that it exports"""
    setup: str = ""
    """shell text that runs inside the container once per node, before the tasks start"""
    task_prolog: str = ""
    """shell text that each task sources before its command, so that its exports apply to the command"""
    task_epilog: str = ""
    """shell text that each task sources after its command; RUNNER_EXIT_CODE is the exit code of the command"""
    notify: tuple[str, ...] = ("requeue", "failure", "end")
    """events to post to the user's webhook, if there is one"""
    mail_user: str = ""
    mail_events: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    save_seconds: int = 120
    """how many seconds before the time limit the job gets the signal to save and exit; 0: no signal"""
    save_signal: tuple[str, ...] = ()
    """signals on which the program saves and exits, besides USR2; empty: those of the trainer that the log shows"""
    hang_seconds: int = 3600
    """end the job after this many seconds without progress; 0: never"""
    save_every: int | str = 0
    """seconds between two saves of the training script, or `auto`; 0: as the arguments of the script say"""
    preflight: bool = False
    """whether each node is tested before the program starts"""
    restart: Restart | None = None
    """None: never restart the job"""
    trainer: str | None = None
    """how to read the log of a program that does not write metrics.jsonl (runs/trainer.py); None: find out"""
    chain: int = 0
    """number of jobs to submit, each of which resumes from the checkpoint of the one before; 0: a single job"""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """warnings, one line each"""

    @property
    def one_task_per_node(self) -> bool:
        """Whether srun starts one task per node, and the launcher starts the processes of the node."""
        return self.launcher in ("torchrun", "accelerate")

    @property
    def tasks_per_node(self) -> int:
        """The number of tasks that srun starts on each node."""
        return 1 if self.one_task_per_node else self.resources.tasks_per_node

    @property
    def tasks(self) -> int:
        """The total number of tasks that srun starts."""
        return self.resources.nodes * self.tasks_per_node

    @property
    def cpus_per_step_task(self) -> int:
        """The number of CPUs for each task that srun starts. A launcher's task gets those of all its processes."""
        return self.resources.cpus_per_task * (
            self.resources.tasks_per_node if self.one_task_per_node else 1
        )

    @property
    def gpus(self) -> int:
        """The total number of GPUs."""
        return self.resources.nodes * self.resources.gpus_per_node + self.other_gpus

    @property
    def keeps_nodes(self) -> bool:
        """Whether the job stays in its allocation after the loss of a node."""
        return bool(self.resources.spare_nodes or self.resources.min_nodes)

    @property
    def nodes_held(self) -> int:
        """The number of nodes that the job requests."""
        return self.resources.nodes + self.resources.spare_nodes

    @property
    def world_size(self) -> int:
        """The total number of processes."""
        return self.resources.nodes * self.resources.tasks_per_node

    def filled(self, place: str, text: str) -> Job:
        """The job with a placeholder in its command and its arguments replaced."""
        command = tuple(word.replace(place, text) for word in self.command)
        return replace(
            self,
            command=command,
            arguments=tuple(word.replace(place, text) for word in self.arguments),
        )


class Key(NamedTuple):
    """How a setting of a job is spelled on the command line, in a job file and in a site file."""

    kind: type
    """items of `tuple` and `dict` are text; `object`: checks.py decides"""
    flag: str = ""
    """the option of `launch`; empty: none"""
    shell: bool = False
    """whether `shell` has the option too"""
    table: str = ""
    """the table in the job file; empty: the top level"""
    key: str = ""
    """the key in the job file, if it differs from the name of the setting"""
    in_file: bool = True
    site: bool = False
    """whether a site can set it, under the same name"""
    adds: bool = False
    """whether the values of all layers are concatenated, the command line's last; otherwise, the strongest layer
    wins"""
    is_one_or_more: bool = False
    """a job file may give a single text instead of an array"""
    is_time_limit: bool = False
    """the value is text in Slurm's format, which is converted to minutes"""
    metavar: str | None = None
    help: str | None = None

    def place(self, name: str) -> tuple[str, ...]:
        """The key path of the setting in a job file."""
        return (*((self.table,) if self.table else ()), self.key or name)


# The fields of Job and Resources define the types and defaults of the values.
KEYS: Mapping[str, Key] = {
    "name": Key(str, "--name", in_file=False, help="the job's name (default: the script's name)"),
    "script": Key(str),
    "command": Key(tuple),
    "batch": Key(str),
    "environment": Key(str),
    "launcher": Key(str, "--launcher", site=True, help="torchrun, srun, accelerate or none"),
    "arguments": Key(tuple, adds=True),
    "check_arguments": Key(str),
    "nodes": Key(int, "--nodes", table="resources", metavar="N", help="number of nodes"),
    "spare_nodes": Key(int, "--spare", table="resources", metavar="S",
                       help="request S more nodes, which replace nodes that fail while the job runs"),
    "min_nodes": Key(int, table="resources"),
    "switches": Key(str, "--switches", table="resources", metavar="N[@TIME]",
                    help="place the nodes on at most N leaf switches; TIME: how long to wait for them"),
    "segment": Key(int, "--segment", table="resources", metavar="N",
                   help="place each N nodes in one block of the topology"),
    "gpus_per_node": Key(int, "--gpus-per-node", shell=True, table="resources", site=True, metavar="N",
                         help="GPUs per node"),
    "tasks_per_node": Key(int, "--tasks-per-node", table="resources", metavar="N", help="processes per node"),
    "cpu_tasks_per_node": Key(int, table="resources"),
    "cpus_per_task": Key(int, "--cpus-per-task", shell=True, table="resources", metavar="N", help="CPUs per process"),
    "memory": Key(str, "--memory", shell=True, table="resources", site=True, metavar="SIZE",
                  help="memory per node: 450G"),
    "time_minutes": Key(str, "--time", shell=True, table="resources", key="time", site=True, is_time_limit=True,
                        metavar="LIMIT", help="time limit: MINUTES, HH:MM:SS or D-HH:MM:SS"),
    "partition": Key(str, "--partition", shell=True, table="resources", site=True, help="the Slurm partition"),
    "account": Key(str, "--account", shell=True, table="resources", site=True, help="the account to charge"),
    "sbatch": Key(tuple, "--sbatch", table="slurm", adds=True, metavar="FLAG",
                  help="any flag for sbatch: --sbatch=FLAG"),
    "srun": Key(tuple, "--srun", shell=True, table="slurm", adds=True, metavar="FLAG",
                help="any flag for srun: --srun=FLAG"),
    "chain": Key(int, "--chain", in_file=False, metavar="N",
                 help="submit N jobs, each of which continues where the previous job ended"),
    "preflight": Key(bool, "--no-preflight", help="do not check the nodes first"),
    "save_seconds": Key(int, "--save-seconds", metavar="S",
                        help="ask the program to save and exit S seconds before the time limit (0: never)"),
    "save_signal": Key(tuple, "--save-signal", is_one_or_more=True, metavar="SIGNAL",
                       help="the signal on which the program saves and exits: TERM, USR1 or none; can be repeated"),
    "hang_seconds": Key(int, "--hang-seconds", metavar="S",
                        help="end an attempt after S seconds without progress (0: never)"),
    "save_every": Key(object),
    "restart": Key(Restart, "--restart", metavar="KEY=VALUE",
                   help="a key of [restart], which this replaces: time_limit=3, in_place=true, ...; can be repeated"),
    "trainer": Key(str, "--trainer", metavar="NAME", help="how to read step and loss from the log (none: do not)"),
    "env": Key(dict, adds=True),
    "program_in_image": Key(bool),
    "host_setup": Key(str),
    "setup": Key(str),
    "task_prolog": Key(str),
    "task_epilog": Key(str),
    "notify": Key(tuple),
    "mail_user": Key(str, table="mail", key="user"),
    "mail_events": Key(tuple, table="mail", key="events"),
}  # fmt: skip


class Setting(NamedTuple):
    """A value and its origin."""

    value: Any
    origin: Origin


Layer = Mapping[str, Setting]
"""the settings from one source: the command line, a job file or a site"""


def value(layer: Layer, name: str) -> Any:
    """The value of a setting; None if the layer does not have it."""
    return layer[name].value if name in layer else None


def command_line(values: Mapping[str, Any]) -> Layer:
    """The layer of the command line, without None and empty values. Raises RunnerError for an invalid time limit."""
    found: dict[str, Setting] = {}
    for name, value in values.items():
        key = KEYS[name]
        if value is None or (key.kind in (tuple, dict) and not value):
            continue
        if key.kind is Restart:
            value = _restart_of(value)
        if key.is_time_limit:
            value = time_limit_minutes(value, key.flag)
        found[name] = Setting(tuple(value) if key.kind is tuple else value, Origin("command line"))
    return found


def load_job_file(path: Path) -> Layer:
    """The layer of the job file at `path`. Raises RunnerError, with line and key, for an error in the file."""
    return layer_of(read_toml(path))


def layer_of(document: Document) -> Layer:
    """The layer of a parsed job file. Raises RunnerError, with line and key, for an error in the file."""
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
            found[name] = Setting(
                _read(document, place, key), Origin("job file", "", document.place(*place))
            )
    if len(both := [name for name in ("script", "command", "batch") if name in found]) > 1:
        raise RunnerError(
            f"{document.place(both[1])}: both {both[0]} and {both[1]} are given",
            "a job starts one program",
            "use `script` for a .py or .sh file of the project, `batch` for a script with #SBATCH lines, "
            "and `command` for anything else",
        )
    return found


def _read(document: Document, place: tuple[str, ...], key: Key) -> Any:
    if key.is_one_or_more and isinstance(found := document.get(*place), str):
        return (found,)
    if key.kind is tuple or key.kind is dict:
        return strings(document, place) if key.kind is tuple else string_table(document, place)
    if key.kind is Restart:
        return _restart(document)
    value: Any = document.get(*place) if key.kind is object else typed(document, place, key.kind)
    return time_limit_minutes(value, str(document.place(*place))) if key.is_time_limit else value


def _restart_of(words: Sequence[str]) -> Restart:
    """Parse the values of --restart. Raises RunnerError for other text."""
    causes = "|".join(_COUNTS)
    for word in words:
        if not re.fullmatch(rf"({causes})=\d{{1,9}}|in_place=(true|false)", word, re.ASCII):
            what, why = (
                f"cannot read --restart {word!r}",
                f"it must be KEY=N, in_place=true or in_place=false; KEY is one of {causes.replace('|', ', ')}",
            )
            raise RunnerError(
                what, why, "--restart time_limit=3 --restart node_failure=2", exit_code=2
            )
    found: Any = {
        n: int(text) if n in _COUNTS else text == "true"
        for n, text in (word.split("=") for word in words)
    }
    return Restart(**found)


def _restart(document: Document) -> Restart:
    """Read the table [restart]. Raises RunnerError for a negative number."""
    typed(document, ("restart",), dict)
    refuse_unknown_keys(document, ("restart",), (*_COUNTS, "in_place"), "job")
    found = {
        name: count
        for name in _COUNTS
        if (count := typed(document, ("restart", name), int)) is not None
    }
    for name, count in found.items():
        least = 1 if name == "without_checkpoint" else 0
        if count < least:
            raise RunnerError(
                f"{document.place('restart', name)}: {name} cannot be {count}",
                f"it must be {least} or more",
                f"{name} = {least}",
            )
    return Restart(**found, in_place=typed(document, ("restart", "in_place"), bool))


MEMORY = re.compile(r"(\d+)((?:[KMGT]B?)?)", re.IGNORECASE)
"""(number, unit) of an amount of memory. Source: Slurm 25.11, src/common/proc_args.c, str_to_mbytes"""


def time_limit_minutes(text: str, what: str) -> int:
    """Convert `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M` or `D-H:M:S` to minutes, rounded up. Source: sbatch(1), --time."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", text.strip())
    if not found:
        raise RunnerError(
            f"{what}: cannot read the time limit {text!r}",
            "a limit must have the form MINUTES, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS",
            'use "00:30:00" for half an hour, "1-00" for a day',
        )
    numbers = [int(number) for number in found[2].split(":")]
    from_hours = found[1] or len(numbers) == 3  # otherwise, the first number is minutes
    hours, minutes, seconds = (*numbers, 0, 0)[:3] if from_hours else (0, *numbers, 0)[:3]
    total = (int(found[1] or 0) * 24 + hours) * 60 + minutes + -(-seconds // 60)
    if total < 1:
        raise RunnerError(
            f"{what}: the time limit {text!r} is zero",
            "Slurm reads zero as no limit, which runner does not request",
            "give at least one minute, or leave out the time",
        )
    return total
