"""A job: script or command, environment, resources, launcher, arguments; each value with where it came from.

How it is made of a job file and a command line stands in asking/making.py, what it may not be in asking/checks.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from runner.environments.environment import Environment
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
