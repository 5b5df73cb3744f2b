"""Options of sbatch and srun, read into a job file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from runner.environments.rewriting import Change, Set
from runner.errors import RunnerError
from runner.expansion import expand, literal, names
from runner.machine.secrets import looks_secret
from runner.runs.adopt.adopted import Adopted, plain
from runner.runs.adopt.options import Option

RENDEZVOUS = {"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
"""set for each task by the batch script that runner writes"""


Check = Callable[[str, str], None]
"""(flag, `sbatch` or `srun`): raises RunnerError for a flag that a job file cannot pass on"""
CheckVariable = Callable[[str, str], None]

_NUMBERS = {"nodes": "nodes", "ntasks-per-node": "tasks_per_node", "cpus-per-task": "cpus_per_task"}
_TEXTS = {"mem": "memory", "time": "time", "partition": "partition", "account": "account"}
_NOT_NEEDED = {
    "output": "a run has one log: runner logs", "error": "a run has one log: runner logs",
    "open-mode": "a run has one log, to which attempts append", "parsable": "runner launch --parsable",
    "get-user-env": "the container gets the host's variables",
}  # fmt: skip
# Source: pyxis 0.24.0, the variables that it does not pass to enroot
_NOT_INTO_CONTAINERS = {"PATH", "LD_LIBRARY_PATH", "LD_PRELOAD"}


@dataclass(frozen=True)
class Program:
    """The program of a job file."""

    launcher: str
    command: tuple[str, ...] = ()
    processes: int | None = None
    """per node; None if the launcher's options do not set it"""


# Source: srun(1): options that configure the step; sbatch does not know most of them
_OF_STEPS = {
    "accel-bind", "bcast", "cpu-bind", "disable-status", "distribution", "epilog", "exact", "het-group", "input",
    "kill-on-bad-exit", "label", "mem-bind", "mpi", "msg-timeout", "multi-prog", "network", "overlap", "prolog",
    "propagate", "pty", "quit-on-interrupt", "relative", "resv-ports", "send-libs", "slurmd-debug", "task-epilog",
    "task-prolog", "threads", "unbuffered", "verbose", "wait", "whole",
}  # fmt: skip
# flags that runner refuses, but without which the job does the same
_HARMLESS = {"export", "parsable", "wait", "overcommit", "pty"}


@dataclass
class Draft:
    """The job file that is being assembled."""

    check: Check
    check_variable: CheckVariable
    resources: dict[str, int | str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    host_setup: list[str] = field(default_factory=list)
    task_prolog: list[str] = field(default_factory=list)
    mail_user: str = ""
    mail_events: tuple[str, ...] = ()
    save_seconds: int | None = None
    flags: dict[str, dict[str, str]] = field(default_factory=lambda: {"sbatch": {}, "srun": {}})
    allocated: bool = False
    """sbatch requests the resources, and srun starts a step in them"""
    ntasks: int | None = None
    gpus: int | None = None
    gpus_per_task: int | None = None
    cpus_per_gpu: int | None = None
    all_gpus: str = ""
    """the option that requests all GPUs of a node"""

    def read(self, options: Sequence[Option], program: str, adopted: Adopted) -> None:
        """Read options of sbatch or srun, except those for the container."""
        given = {option.name for option in options}
        step = program == "srun" and self.allocated
        if step and given & {"ntasks", "ntasks-per-node"}:
            self.ntasks = None
            self.resources.pop("tasks_per_node", None)
        for option in options:
            value = self.value(option)
            if option.name == "job-name":
                name = value or "NAME"
                adopted.note(option.given, f"a run is named after its job file: rename the file to {name}.toml")
            elif option.name in _NOT_NEEDED:
                adopted.not_needed(option.given, _NOT_NEEDED[option.name])
            elif value is None:
                adopted.refuse(option.given, "only a shell can evaluate this text: write its value")
            elif not value and option.value:
                adopted.not_needed(option.given, "the step has the resources of the job")
            elif step and option.name == "nodes" and value != str(self.resources.get("nodes", value)):
                adopted.refuse(option.given, f"the step uses only a part of the job's {self.resources['nodes']} nodes")
            elif not self._number(option, value) and not self._text(option.name, value):
                self._other(option, value, program, adopted)
        listed = next((plain(option.value or "") for option in options if option.name == "nodelist"), None)
        if listed and "nodes" not in self.resources:
            self.resources["nodes"] = _hosts(listed)

    def value(self, option: Option) -> str | None:
        """The value of an option; empty for a variable with which Slurm says what the job has; None: not known."""
        text = option.value or ""
        has = self.resources.get
        nodes, tasks = str(has("nodes", 1)), has("tasks_per_node")
        known = {"SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_NTASKS": str(self.ntasks or "")}
        known |= {"SLURM_NTASKS_PER_NODE": str(tasks or ""), "SLURM_CPUS_PER_TASK": str(has("cpus_per_task", ""))}
        known |= dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"), "")
        return None if option.computed or set(names(text)) - known.keys() else expand(text, known, "an option")

    def _number(self, option: Option, value: str) -> bool:
        """Whether the option is a count; if so, read its value."""
        name = option.name
        typed = re.fullmatch(r"(?:gpu:)?(?:([A-Za-z_][\w.-]*):)?(\d+)", value)
        if name in _NUMBERS and value.isdigit() and int(value) > 0:
            self.resources[_NUMBERS[name]] = int(value)
        elif name == "ntasks" and value.isdigit():
            self.ntasks = int(value)
        elif name == "cpus-per-gpu" and value.isdigit():
            self.cpus_per_gpu = int(value)
        elif name in {"gpus-per-node", "gres"} and value in {"gpu", "none"}:
            self.resources["gpus_per_node"] = int(value == "gpu")
        elif name in {"gpus-per-node", "gres", "gpus"} and typed and (name != "gres" or value.startswith("gpu:")):
            if name == "gpus":
                self.gpus = int(typed[2])
            else:
                self.resources["gpus_per_node"] = int(typed[2])
            if typed[1]:  # the kind of GPU; this flag overrides the one that runner makes of gpus_per_node
                self.flags["sbatch"]["gpus"] = f"--{name}={value}"
        elif name == "gpus-per-task" and typed:
            self.gpus_per_task = int(typed[2])
        else:
            return False
        return True

    def _text(self, name: str, value: str) -> bool:
        if name in _TEXTS and value:
            self.resources[_TEXTS[name]] = value
        elif name == "mail-user":
            self.mail_user = value
        elif name == "mail-type":
            self.mail_events = (*self.mail_events, *value.split(","))
        else:
            return False
        return True

    def _other(self, option: Option, value: str, program: str, adopted: Adopted) -> None:
        name = option.name
        if name == "signal" and (found := re.fullmatch(r".*@(\d+)", value)):
            self.save_seconds = int(found[1])
            adopted.note(option.given, f"becomes save_seconds = {found[1]}: runner requests the signal itself")
        elif name == "export" and value.upper() != "NONE":
            for entry in value.split(","):
                key, equals, text = entry.partition("=")
                if equals:
                    self.variable(key, text, option.given, adopted)
            adopted.not_needed(option.given, "the container gets the job's variables")
        else:
            if program == "srun" and not self.allocated and name not in _OF_STEPS:
                program = "sbatch"  # srun requests the resources itself
            if name == "exclusive" and program == "sbatch":
                self.all_gpus = option.given
            if name in {"task-prolog", "task-epilog", "input"} and adopted.folder:
                value = str(adopted.folder / value)
            # sbatch accepts both --NAME=VALUE and --NAME VALUE
            flag = f"--{name}={value}" if option.value is not None else f"--{name}"
            try:
                self.check(flag, program)
            except RunnerError as error:
                tell = adopted.not_carried_over if name in _HARMLESS else adopted.refuse
                tell(option.given, f"{error.why}; {error.fix}")
            else:
                self.flags[program][name] = flag

    def variable(self, name: str, value: str, given: str, adopted: Adopted) -> None:
        """Read a variable that the job exports. The value is plain text."""
        if name in RENDEZVOUS:
            adopted.not_needed(given, "runner sets it for each task")
        elif name in _NOT_INTO_CONTAINERS:
            adopted.not_carried_over(given, f"a container does not get the host's {name}; set it in [env] of the EDF")
        elif name == "NVIDIA_VISIBLE_DEVICES" or looks_secret(name, value):  # the engine reads the first one
            adopted.variable(name, literal(value), given)
        else:
            try:
                self.check_variable(name, value)
            except RunnerError as error:
                adopted.not_carried_over(given, f"{error.why}; {error.fix}")
            else:
                self.env[name] = value

    def count(self, program: Program, adopted: Adopted) -> None:
        """Convert the counts of nodes, processes, GPUs and CPUs to those of a job file."""
        nodes = self.resources.get("nodes", 1)
        assert isinstance(nodes, int)
        tasks = self.tasks_per_node(adopted)
        has_gpus = "gpus_per_node" in self.resources
        if self.gpus is not None and not has_gpus:
            self.resources["gpus_per_node"] = self.gpus // nodes
            if self.gpus % nodes:
                adopted.refuse(f"--gpus={self.gpus}", f"it is not a multiple of {nodes} nodes")
        elif self.gpus_per_task is not None and not has_gpus:
            self.resources["gpus_per_node"] = self.gpus_per_task * (tasks or 1)
            adopted.note("--gpus-per-task", "becomes gpus_per_node: each task sees all GPUs of its node")
        elif self.all_gpus and not has_gpus and program.processes:
            self.resources["gpus_per_node"] = program.processes
            adopted.note(self.all_gpus, f"gpus_per_node = {program.processes}, one for each process")
        elif self.all_gpus and not has_gpus:
            adopted.note(self.all_gpus, "the job gets the GPUs of the site's node, unless you set gpus_per_node")
        gpus = self.resources.get("gpus_per_node")
        if self.cpus_per_gpu and isinstance(gpus, int) and not self.cpus_per_gpu * gpus % (tasks or 1):
            self.resources["cpus_per_task"] = self.cpus_per_gpu * gpus // (tasks or 1)
        elif self.cpus_per_gpu:
            adopted.refuse(f"--cpus-per-gpu={self.cpus_per_gpu}", "the number of GPUs per node is not known")
        if program.launcher != "torchrun":
            if tasks is not None:
                self.resources["tasks_per_node"] = tasks
            return
        processes = program.processes or gpus
        self.resources.pop("tasks_per_node", None)
        if program.processes:
            self.resources["tasks_per_node"] = program.processes
        cpus = self.resources.get("cpus_per_task")
        if isinstance(cpus, int) and isinstance(processes, int) and processes > 1:
            self.resources["cpus_per_task"] = max(1, cpus // processes)
            adopted.note(f"--cpus-per-task={cpus}", f"divided among the {processes} processes of a node")

    def tasks_per_node(self, adopted: Adopted) -> int | None:
        """How many tasks srun starts on a node; None if not given."""
        given = self.resources.get("tasks_per_node")
        if isinstance(given, int) or self.ntasks is None:
            return given if isinstance(given, int) else None
        nodes = self.resources.get("nodes", 1)
        assert isinstance(nodes, int)
        if self.ntasks % nodes:
            adopted.refuse(f"--ntasks={self.ntasks}", f"it is not a multiple of {nodes} nodes")
            return None
        return self.ntasks // nodes

    def changes(self, program: Program, environment: str, summary: str) -> list[Change]:
        """What to write into the job file."""
        wanted: list[Change] = [Set(("summary",), summary)]
        if program.command:
            wanted += [Set(("command",), program.command), Set(("program_in_image",), True)]
        wanted += [Set(("environment",), environment), Set(("launcher",), program.launcher)]
        for name, lines in (("host_setup", self.host_setup), ("task_prolog", self.task_prolog)):
            if lines:
                wanted.append(Set((name,), "\n".join(lines) + "\n"))
        if self.save_seconds is not None:
            wanted.append(Set(("save_seconds",), self.save_seconds))
        wanted += [Set(("resources", name), value) for name, value in self.resources.items()]
        wanted += [Set(("env", name), value) for name, value in self.env.items()]
        if self.mail_user:
            wanted += [Set(("mail", "user"), self.mail_user), Set(("mail", "events"), self.mail_events)]
        elif self.mail_events:
            self.flags["sbatch"]["mail-type"] = f"--mail-type={','.join(self.mail_events)}"
        wanted += [Set(("slurm", name), tuple(flags.values())) for name, flags in self.flags.items() if flags]
        return wanted


def _hosts(listed: str) -> int:
    """How many nodes a list like `a,b[1-3,07]` names."""
    count = 0
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", listed):
        brackets = re.findall(r"\[([^\]]*)\]", part)
        ranges = [[each.split("-") for each in inside.split(",")] for inside in brackets]
        count += math.prod(sum(int(each[-1]) - int(each[0]) + 1 for each in inside) for inside in ranges)
    return count
