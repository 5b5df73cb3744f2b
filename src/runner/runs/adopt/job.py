"""Options of sbatch and srun and the words after them, read into a job file."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runner.bash import Word
from runner.environments.rewriting import Change, Set
from runner.errors import RunnerError
from runner.expansion import expand, literal, names
from runner.machine.secrets import looks_secret
from runner.runs.adopt.adopted import Adopted, plain, secrets_in
from runner.runs.adopt.options import TORCHRUN, Option, split
from runner.runs.checks import check_variable
from runner.runs.schedulers import flags

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_KEYS = {"ntasks-per-node": "tasks_per_node", "cpus-per-task": "cpus_per_task", "mem": "memory"}
# flags that runner refuses, but without which the job does the same
_HARMLESS = {"export", "wait", "overcommit", "pty"}
# Source: pyxis 0.24.0, the variables that it does not pass to enroot
RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
_NOT_INTO_CONTAINERS = {"PATH", "LD_LIBRARY_PATH", "LD_PRELOAD"}


@dataclass(frozen=True)
class Program:
    """The program of a job file."""

    launcher: str
    command: tuple[str, ...] = ()
    processes: int | None = None
    """per node; None if the launcher's options do not set it"""


@dataclass
class Draft:
    """The job file that is being assembled."""

    resources: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """the options ntasks, gpus, gpus-per-task and cpus-per-gpu, which a job file does not have"""
    env: dict[str, str] = field(default_factory=dict)
    host_setup: list[str] = field(default_factory=list)
    task_prolog: list[str] = field(default_factory=list)
    save_seconds: int | None = None
    flags: dict[str, dict[str, str]] = field(default_factory=lambda: {"sbatch": {}, "srun": {}})
    allocated: bool = False
    """sbatch requests the resources, and srun starts a step in them"""
    sets_ranks: bool = False
    """the step sets variables of RANKS, so its program reads them"""
    all_gpus: str = ""
    """the option that requests all GPUs of a node"""

    def read(self, options: Sequence[Option], program: str, adopted: Adopted) -> None:
        """Read options of sbatch or srun, except those for the container."""
        step = program == "srun" and self.allocated
        if step and {option.name for option in options} & {"ntasks", "ntasks-per-node"}:
            self.counts.pop("ntasks", None)
            self.resources.pop("tasks_per_node", None)
        for option in options:
            value = self.value(option)
            if option.name == "job-name":
                name = value or "NAME"
                adopted.note(
                    option.given,
                    f"a run is named after its job file: rename the file to {name}.toml",
                )
            elif option.name in _TABLES["not_needed"]:
                adopted.not_needed(option.given, _TABLES["not_needed"][option.name])
            elif value is None:
                adopted.refuse(option.given, "only a shell can evaluate this text: write its value")
            elif not value and option.value:
                adopted.not_needed(option.given, "the step has the resources of the job")
            elif (
                step and option.name == "nodes" and value != str(self.resources.get("nodes", value))
            ):
                adopted.refuse(
                    option.given,
                    f"the step uses only a part of the job's {self.resources['nodes']} nodes",
                )
            else:
                self._read(option, value, program, adopted)
        listed = next(
            (plain(option.value or "") for option in options if option.name == "nodelist"), None
        )
        if listed and "nodes" not in self.resources:
            self.resources["nodes"] = _hosts(listed)

    def value(self, option: Option) -> str | None:
        """The value of an option; empty for a variable with which Slurm says what the job has; None: not known."""
        text, counts = option.value or "", {"nodes": 1, **self.resources, **self.counts}
        values = {name: str(counts.get(key, "")) for name, key in _TABLES["of_slurm"].items()}
        return (
            None
            if option.computed or set(names(text)) - values.keys()
            else expand(text, values, "an option")
        )

    def _read(self, option: Option, value: str, program: str, adopted: Adopted) -> None:
        name = option.name
        gpus = re.fullmatch(r"(?:gpu:)?(?:([A-Za-z_][\w.-]*):)?(\d+)", value)
        match name:
            case "nodes" | "ntasks-per-node" | "cpus-per-task" if value.isdigit() and int(value):
                self.resources[_KEYS.get(name, name)] = int(value)
            case "mem" | "time" | "partition" | "account" if value:
                self.resources[_KEYS.get(name, name)] = value
            case "ntasks" | "cpus-per-gpu" if value.isdigit():
                self.counts[name] = int(value)
            case "gpus-per-task" if gpus:
                self.counts[name] = int(gpus[2])
            case "gpus-per-node" | "gres" if value in {"gpu", "none"}:
                self.resources["gpus_per_node"] = int(value == "gpu")
            case "gpus-per-node" | "gres" | "gpus" if gpus and (
                name != "gres" or value.startswith("gpu:")
            ):
                if name == "gpus":
                    self.counts[name] = int(gpus[2])
                else:
                    self.resources["gpus_per_node"] = int(gpus[2])
                if gpus[
                    1
                ]:  # the kind of GPU; this flag overrides the one that runner makes of gpus_per_node
                    self.flags["sbatch"]["gpus"] = f"--{name}={value}"
            case "signal" if found := re.fullmatch(r".*@(\d+)", value):
                self.save_seconds = int(found[1])
                adopted.note(
                    option.given,
                    f"becomes save_seconds = {found[1]}: runner requests the signal itself",
                )
            case "export" if value.upper() != "NONE":
                for key, equals, text in (entry.partition("=") for entry in value.split(",")):
                    if equals:
                        self._read_variable(key, text, option.given, adopted)
                adopted.not_needed(option.given, "the container gets the job's variables")
            case _:
                self._read_flag(option, value, program, adopted)

    def _read_variable(self, name: str, value: str, given: str, adopted: Adopted) -> None:
        """Read a variable that the job exports. The value is plain text."""
        self.sets_ranks = self.sets_ranks or name in RANKS
        if name in _NOT_INTO_CONTAINERS:
            adopted.not_carried_over(
                given, f"a container does not get the host's {name}; set it in [env] of the EDF"
            )
        elif name == "NVIDIA_VISIBLE_DEVICES" or looks_secret(
            name, value
        ):  # the engine reads the first one
            adopted.variable(name, literal(value), given)
        else:
            try:
                check_variable(name, value)
            except RunnerError as error:
                adopted.not_carried_over(given, f"{error.why}; {error.fix}")
            else:
                self.env[name] = value

    def _read_flag(self, option: Option, value: str, program: str, adopted: Adopted) -> None:
        """Pass an option on to sbatch or srun."""
        name = option.name
        if program == "srun" and not self.allocated and name not in _TABLES["of_steps"]:
            program = "sbatch"  # srun requests the resources itself
        if name == "exclusive" and program == "sbatch":
            self.all_gpus = option.given
        if name in {"task-prolog", "task-epilog", "input"} and adopted.folder:
            value = str(adopted.folder / value)
        # sbatch accepts both --NAME=VALUE and --NAME VALUE
        flag = f"--{name}={value}" if option.value is not None else f"--{name}"
        try:
            flags.refuse((flag,), program)
        except RunnerError as error:
            tell = adopted.not_carried_over if name in _HARMLESS else adopted.refuse
            tell(option.given, f"{error.why}; {error.fix}")
        else:
            self.flags[program][name] = flag

    def count(self, program: Program, adopted: Adopted) -> None:
        """Convert the counts of nodes, processes, GPUs and CPUs to those of a job file."""
        resources, tasks, processes = (
            self.resources,
            self.tasks_per_node(adopted),
            program.processes,
        )
        if "gpus_per_node" not in resources:
            self._count_gpus(tasks or 1, processes, adopted)
        gpus, per_gpu = resources.get("gpus_per_node"), self.counts.get("cpus-per-gpu", 0)
        if per_gpu and gpus is not None and not per_gpu * gpus % (tasks or 1):
            resources["cpus_per_task"] = per_gpu * gpus // (tasks or 1)
        elif per_gpu:
            adopted.refuse(f"--cpus-per-gpu={per_gpu}", "the number of GPUs per node is not known")
        if program.launcher == "torchrun":
            tasks = processes
            resources.pop("tasks_per_node", None)
            cpus, processes = resources.get("cpus_per_task"), processes or gpus
            if cpus and processes and processes > 1:
                resources["cpus_per_task"] = max(1, cpus // processes)
                adopted.note(
                    f"--cpus-per-task={cpus}", f"divided among the {processes} processes of a node"
                )
        if tasks:
            resources["tasks_per_node"] = tasks

    def _count_gpus(self, tasks: int, processes: int | None, adopted: Adopted) -> None:
        if "gpus" in self.counts:
            self.resources["gpus_per_node"] = self._per_node("gpus", adopted) or 0
        elif "gpus-per-task" in self.counts:
            self.resources["gpus_per_node"] = self.counts["gpus-per-task"] * tasks
            adopted.note(
                "--gpus-per-task", "becomes gpus_per_node: each task sees all GPUs of its node"
            )
        elif self.all_gpus and processes:
            self.resources["gpus_per_node"] = processes
            adopted.note(self.all_gpus, f"gpus_per_node = {processes}, one for each process")
        elif self.all_gpus:
            adopted.note(
                self.all_gpus, "the job gets all GPUs of each node, unless you set gpus_per_node"
            )

    def tasks_per_node(self, adopted: Adopted) -> int | None:
        """How many tasks srun starts on a node; None if not given."""
        given: int | None = self.resources.get("tasks_per_node")
        return (
            self._per_node("ntasks", adopted)
            if given is None and "ntasks" in self.counts
            else given
        )

    def _per_node(self, name: str, adopted: Adopted) -> int | None:
        """The share of one node in the count of an option."""
        count, nodes = self.counts[name], self.resources.get("nodes", 1)
        if count % nodes:
            adopted.refuse(f"--{name}={count}", f"it cannot be divided evenly among {nodes} nodes")
            return None
        return int(count // nodes)

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
        wanted += [
            Set(("slurm", name), tuple(given.values()))
            for name, given in self.flags.items()
            if given
        ]
        return wanted


def _hosts(listed: str) -> int:
    """How many nodes a list like `a,b[1-3,07]` names."""
    count = 0
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", listed):
        brackets = re.findall(r"\[([^\]]*)\]", part)
        ranges = [[each.split("-") for each in inside.split(",")] for inside in brackets]
        count += math.prod(
            sum(int(each[-1]) - int(each[0]) + 1 for each in inside) for inside in ranges
        )
    return count


def read_program(words: Sequence[Word], draft: Draft, adopted: Adopted) -> Program:
    """The program that these words start in every task."""
    words = _without_secrets(words, adopted)
    texts = [word.text for word in words]
    first = texts[0].rsplit("/", 1)[-1] if words else ""
    if first in {"bash", "sh", "zsh"} and all(
        text.startswith("-") and text != "-c" for text in texts[1:]
    ):
        adopted.refuse(
            " ".join(texts),
            "an interactive shell is not a job; for a shell in the container: runner shell NAME",
        )
    module = (
        texts.index("-m") + 1 if re.fullmatch(r"python[0-9.]*", first) and "-m" in texts[1:3] else 0
    )
    # with several tasks per node, srun starts several launchers on each node
    if (first == "torchrun" or texts[module : module + 1] == ["torch.distributed.run"]) and (
        (draft.tasks_per_node(adopted) or 1) == 1
    ):
        launched = _torchrun(words[module + 1 :], draft, adopted)
        if launched:
            return launched
    return _program("none", words, draft)


def _without_secrets(words: Sequence[Word], adopted: Adopted) -> list[Word]:
    """The words, in which variables of the user's environment replace secrets."""
    found = list(words)
    for index, (option, before) in secrets_in([word.text for word in words]).items():
        name = re.sub(r"\W+", "_", option.strip("-")).upper() or "SECRET"
        found[index] = replace(words[index], raw=f'{before}"${{{name}:?}}"', computed=True)
        adopted.note(f"{option} …", f"its value is a secret: export {name} where you launch")
    return found


def _torchrun(words: Sequence[Word], draft: Draft, adopted: Adopted) -> Program | None:
    """The program that torchrun starts; None if the job file cannot express one of its options."""
    options, rest = split(words, TORCHRUN)
    processes: int | None = 1
    for option in options:
        name, value = option.name, draft.value(option)
        if name == "nnodes" and value and value.isdigit():
            if draft.resources.setdefault("nodes", int(value)) != int(value):
                adopted.refuse(option.given, f"the job has {draft.resources['nodes']} nodes")
        elif (
            name == "nproc-per-node" and value is not None and re.fullmatch(r"\d*|gpu|auto", value)
        ):
            processes = int(value) if value.isdigit() else None
        elif name == "module":
            rest = (Word("-m", "-m"), *rest)
        elif name == "max-restarts" and value != "0":
            adopted.not_carried_over(
                option.given, "runner restarts the whole job, not single processes"
            )
        elif name in _TABLES["of_launcher"] or name.startswith("rdzv-"):
            adopted.not_needed(
                option.given, "runner sets the rendezvous, the ranks and the logs of each process"
            )
        elif name != "no-python":
            return None
    return _program("torchrun", rest, draft, processes)


def _program(
    launcher: str, words: Sequence[Word], draft: Draft, processes: int | None = None
) -> Program:
    """The words as a command, or as STEP_COMMAND if only a shell can evaluate them."""
    texts = [plain(word.text) if not word.computed and not word.array else None for word in words]
    if None not in texts:
        return Program(launcher, tuple(str(text) for text in texts), processes)
    python = ["python"] if launcher == "torchrun" and words[0].text.endswith((".py", "-m")) else []
    draft.host_setup.append(
        f"export STEP_COMMAND=$(printf '%q ' {' '.join((*python, *(word.raw for word in words)))})"
    )
    return Program(launcher, ("bash", "-c", 'eval "exec $STEP_COMMAND"'), processes)
