"""A job: script or command, environment, resources, launcher, arguments; each value with where it came from.

How it is made of a job file and a command line stands in asking/making.py, what it may not be in asking/checks.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from runner.environments.environment import Environment
from runner.errors import RunnerError
from runner.located_toml import Document, read_toml, refuse_unknown_keys, string_table, strings, typed
from runner.site import Origin

LAUNCHERS = {
    "torchrun": "one task per node; torch.distributed.run starts the processes",
    "srun": "one task per process; RANK, LOCAL_RANK and WORLD_SIZE are set for each",
    "accelerate": "one task per node; accelerate launch starts the processes",
    "none": "the command as it is, once per node unless tasks_per_node says otherwise",
}
SAVE_SECONDS = 120
HANG_SECONDS = 3600


@dataclass(frozen=True)
class Restart:
    """How often a job is started anew, by the cause of its end; 0: never."""

    time_limit: int = 0
    """after the time limit, or whenever the program asks to be continued (exit code 75)"""
    preemption: int = 0
    node_failure: int = 0
    hang: int = 0
    """after it was ended because it made no progress"""
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
    """processes per node, whoever starts them"""
    cpus_per_task: int = 1
    """for each of these processes"""
    memory: str | None = None
    """per node, as sbatch writes it: 450G"""
    time_minutes: int | None = None
    partition: str | None = None
    account: str | None = None


@dataclass(frozen=True)
class Overrides:
    """What the command line says about a job; None or empty where it says nothing."""

    name: str | None = None
    script: str | None = None
    """relative to the snapshot"""
    command: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    """come after those of the job file"""
    launcher: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    memory: str | None = None
    time: str | None = None
    """in Slurm's words: 30, 00:30:00, 1-00"""
    partition: str | None = None
    account: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    sbatch: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    chain: int | None = None
    preflight: bool | None = None


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
    """events of which the user's webhook is told, where there is one"""
    mail_user: str = ""
    mail_events: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    save_seconds: int = SAVE_SECONDS
    """how long before the time limit the job is told to save and leave; 0: not at all"""
    hang_seconds: int = HANG_SECONDS
    """without a sign of progress, after which the job is ended; 0: never"""
    preflight: bool = False
    """whether each node is tried before the program starts"""
    restart: Restart | None = None
    """None: each start is somebody's own"""
    chain: int = 0
    """jobs to submit, each of which goes on with what the one before has left; 0: one that stands alone"""
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


KEYS = ("summary", "script", "command", "environment", "launcher", "arguments", "setup", "task_prolog", "task_epilog",
        "save_seconds", "hang_seconds", "preflight", "resources", "restart", "env", "mail", "notify",
        "slurm")  # fmt: skip
RESOURCES = (
    *("nodes", "gpus_per_node", "tasks_per_node", "cpu_tasks_per_node", "cpus_per_task"),
    *("memory", "time", "partition", "account"),
)


@dataclass(frozen=True)
class JobFile:
    """What a job file says; None or empty where it says nothing. Its name is the file's."""

    name: str
    document: Document
    script: str | None = None
    """path of a .py or .sh file, relative to the project"""
    command: tuple[str, ...] = ()
    environment: str | None = None
    launcher: str | None = None
    arguments: tuple[str, ...] = ()
    setup: str = ""
    task_prolog: str = ""
    task_epilog: str = ""
    save_seconds: int | None = None
    hang_seconds: int | None = None
    preflight: bool | None = None
    resources: Mapping[str, int | str] = field(default_factory=dict)
    """by the field of Resources that it sets: `time` of the file is `time_minutes` here"""
    restart: Restart | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    notify: tuple[str, ...] | None = None
    """events of which the webhook is told; None: the usual ones"""
    mail_user: str = ""
    mail_events: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()


def load_job_file(path: Path) -> JobFile:
    """The job file at `path`. Raises RunnerError that names line and key of what is wrong."""
    return job_of(read_toml(path))


def job_of(document: Document) -> JobFile:
    """What the text of a job file says. Raises RunnerError that names line and key of what is wrong."""
    refuse_unknown_keys(document, (), KEYS, "job")
    refuse_unknown_keys(document, ("resources",), RESOURCES, "job")
    refuse_unknown_keys(document, ("mail",), ("user", "events"), "job")
    refuse_unknown_keys(document, ("slurm",), ("sbatch", "srun"), "job")
    script, command = typed(document, ("script",), str), strings(document, ("command",))
    if script is not None and command:
        raise RunnerError(
            f"{document.place('command')}: both script and command are given",
            "a job starts one program",
            "keep script for a .py or .sh file of the project, command for anything else",
        )
    return JobFile(
        name=document.path.stem,
        document=document,
        script=script,
        command=command,
        environment=typed(document, ("environment",), str),
        launcher=typed(document, ("launcher",), str),
        arguments=strings(document, ("arguments",)),
        setup=typed(document, ("setup",), str, ""),
        task_prolog=typed(document, ("task_prolog",), str, ""),
        task_epilog=typed(document, ("task_epilog",), str, ""),
        save_seconds=typed(document, ("save_seconds",), int),
        hang_seconds=typed(document, ("hang_seconds",), int),
        preflight=typed(document, ("preflight",), bool),
        resources=_resources(document),
        restart=_restart(document),
        env=string_table(document, ("env",)),
        notify=strings(document, ("notify",)) if "notify" in document.data else None,
        mail_user=typed(document, ("mail", "user"), str, ""),
        mail_events=strings(document, ("mail", "events")),
        sbatch=strings(document, ("slurm", "sbatch")),
        srun=strings(document, ("slurm", "srun")),
    )


def _resources(document: Document) -> dict[str, int | str]:
    typed(document, ("resources",), dict)
    found: dict[str, int | str] = {}
    for key in ("nodes", "gpus_per_node", "tasks_per_node", "cpu_tasks_per_node", "cpus_per_task"):
        count = typed(document, ("resources", key), int)
        if count is not None:
            found[key] = count
    for key in ("memory", "partition", "account"):
        word = typed(document, ("resources", key), str)
        if word is not None:
            found[key] = word
    limit = typed(document, ("resources", "time"), str)
    if limit is not None:
        found["time_minutes"] = time_limit_minutes(limit, str(document.place("resources", "time")))
    return found


def _restart(document: Document) -> Restart | None:
    """The policy of [restart]; None without that table. Raises RunnerError for a number below 0."""
    if typed(document, ("restart",), dict) is None:
        return None
    names = tuple(item.name for item in fields(Restart))
    refuse_unknown_keys(document, ("restart",), names, "job")
    found = {name: count for name in names if (count := typed(document, ("restart", name), int)) is not None}
    for name, count in found.items():
        least = 1 if name == "without_checkpoint" else 0
        if count < least:
            raise RunnerError(
                f"{document.place('restart', name)}: {name} is {count}",
                f"it counts, and is {least} at least",
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
            "a limit is MINUTES, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS",
            '"00:30:00" for half an hour, "1-00" for a day',
        )
    part = {name: int(value or 0) for name, value in found.groupdict().items()}
    hours = part["days"] * 24 + part["day_hours"] + part["hours"]
    whole = hours * 60 + part["day_minutes"] + part["minutes"] + part["bare_minutes"]
    total = whole + -(-(part["day_seconds"] + part["seconds"]) // 60)
    if total < 1:
        raise RunnerError(f"{what}: the time limit {text!r} is zero", "a job needs time", "give a minute at least")
    return total


def time_limit_text(total: int) -> str:
    """`HH:MM:00`, or `D-HH:MM:00` from a day on."""
    days, rest = divmod(total, 24 * 60)
    clock = f"{rest // 60:02}:{rest % 60:02}:00"
    return f"{days}-{clock}" if days else clock


@dataclass(frozen=True)
class Estimate:
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
