"""A command line of srun or a container engine, read into an EDF and a job file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.environments.rewriting import Change, Set
from runner.errors import RunnerError
from runner.expansion import literal
from runner.machine.secrets import LEAST_LENGTH, looks_secret
from runner.option_grammar import OF_STEPS, SRUN, Grammar, Option, split
from runner.runs.adopt import containers
from runner.runs.adopt.adopted import Adopted, plain
from runner.runs.checks import NAME, check_variable
from runner.runs.schedulers import flags
from runner.runs.schedulers.directives import gpus_of_gres, nodes_for
from runner.runs.secrets import HIDDEN, hide_words

_KEYS = {"ntasks-per-node": "tasks_per_node", "cpus-per-task": "cpus_per_task", "mem": "memory"}
# flags that runner refuses, but without which the job does the same
_HARMLESS = {"export", "wait", "overcommit", "pty", "output", "error", "open-mode"}
# Source: pyxis 0.24.0, the variables that it does not pass to enroot
_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
# Source: torchrun --help of PyTorch 2.7; the launcher of a job sets the rendezvous, the ranks and the logs itself
_TORCHRUN = Grammar({"m": "module"}, frozenset(("standalone", "module", "no-python")))
_OF_LAUNCHER = re.compile(
    r"rdzv-.*|node-rank|master-(addr|port)|standalone|local-addr|tee|redirects|log-dir|role"
)


@dataclass
class Draft:
    """The job file that is being assembled."""

    adopted: Adopted
    path: str = ""
    """the job file; empty if none is written"""
    resources: dict[str, Any] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    """the options ntasks, gpus and gpus-per-task, which a job file does not have"""
    env: dict[str, str] = field(default_factory=dict)
    save_seconds: int | None = None
    sbatch: list[str] = field(default_factory=list)
    srun: list[str] = field(default_factory=list)
    launcher: str = "none"
    command: tuple[str, ...] = ()

    def read(self, option: Option) -> None:
        """Read an option of srun, except those for the container."""
        name, value = option.name, plain(option.value or "")
        gpus = re.fullmatch(r"(?:gpu:)?(?:([A-Za-z_][\w.-]*):)?(\d+)", value)
        match name:
            case "nodes" | "ntasks-per-node" | "cpus-per-task" if value.isdigit() and int(value):
                self.resources[_KEYS.get(name, name)] = int(value)
            case "mem" | "time" | "partition" | "account" if value:
                self.resources[_KEYS.get(name, name)] = value
            case "ntasks" if value.isdigit():
                self.totals[name] = int(value)
            case "gpus" | "gpus-per-task" if gpus and not gpus[1]:
                self.totals[name] = int(gpus[2])
            case "gpus-per-node" if gpus:
                self.resources["gpus_per_node"] = int(gpus[2])
                if gpus[1]:  # the kind of GPU; the flag overrides the one made of gpus_per_node
                    self.sbatch.append(f"--{name}={value}")
            case "gres" if re.search(r"(^|,)(gres[:/])?gpu(:|,|$)", value):
                self.resources["gpus_per_node"] = gpus_of_gres(value)
                if not re.fullmatch(r"gpu(:\d+)?", value):  # its kind, or other resources
                    self.sbatch.append(f"--{name}={value}")
            case "signal" if found := re.fullmatch(r".*@(\d+)", value):
                self.save_seconds = int(found[1])
                why = f"becomes save_seconds = {found[1]}; if the program saves on TERM or USR1, add save_signal"
                self.adopted.note(option.given, why)
            case "export" if value.upper() != "NONE":
                for key, equals, text in (entry.partition("=") for entry in value.split(",")):
                    if equals:
                        self._read_variable(key, text, option.given)
            case "job-name":
                self._read_name(value, option.given)
            case _:
                self._read_flag(option, value)

    def _read_name(self, name: str, given: str) -> None:
        """Read the job's name, which a run has from its job file."""
        if Path(self.path).stem == name:
            return
        why = "a run is named after its job file"
        keep = f"; to keep the name: --job jobs/{name}.toml" if NAME.fullmatch(name) else ""
        self.adopted.not_carried_over(given, why + keep)

    def _read_variable(self, name: str, value: str, given: str) -> None:
        """Read a variable that the job exports."""
        # the engine reads the first one before the program starts; no file gets a secret
        if name == "NVIDIA_VISIBLE_DEVICES" or looks_secret(name, value):
            self.adopted.variable(name, literal(value), given)
            return
        try:
            check_variable(name, value)
        except RunnerError as error:
            self.adopted.not_carried_over(given, f"{error.why}; {error.fix}")
        else:
            self.env[name] = value

    def _read_flag(self, option: Option, value: str) -> None:
        """Pass an option on to srun, or to sbatch if it is one of the job."""
        program = "srun" if option.name in OF_STEPS else "sbatch"
        flag = f"--{option.name}" + ("" if option.value is None else f"={value}")
        try:
            flags.refuse((flag,), program)
        except RunnerError as error:
            harmless = option.name in _HARMLESS
            tell = self.adopted.not_carried_over if harmless else self.adopted.refuse_job
            tell(option.given, f"{error.why}; {error.fix}")
        else:
            (self.srun if program == "srun" else self.sbatch).append(flag)

    def count(self) -> None:
        """Convert totals to numbers per node."""
        if "nodes" not in self.resources and any("--nodelist=" in flag for flag in self.sbatch):
            self.adopted.refuse_job("--nodelist", "the number of nodes is not given: add --nodes")
        pairs = (("ntasks", "tasks_per_node"), ("gpus", "gpus_per_node"))
        all_gpus, gpus_of_task = (self.totals.get(name, 0) for name in ("gpus", "gpus-per-task"))
        if all_gpus and gpus_of_task and "tasks_per_node" not in self.resources:
            # Source: Slurm 25.11, srun(1), --gpus-per-task
            self.totals.setdefault("ntasks", all_gpus // gpus_of_task)
        needed = nodes_for(*((self.totals.get(a, 0), self.resources.get(b, 0)) for a, b in pairs))
        if needed > 1:
            self.resources.setdefault("nodes", needed)
        for name, key in pairs:
            count, nodes = self.totals.get(name), self.resources.get("nodes", 1)
            if count is None:
                continue
            each = self.resources.setdefault(key, count // nodes)
            if count % nodes:
                why = f"it cannot be divided evenly among {nodes} nodes"
                self.adopted.refuse_job(f"--{name}={count}", why)
            elif each * nodes != count:
                why = f"it is not nodes × {key}, which is {nodes} × {each}"
                self.adopted.refuse_job(f"--{name}={count}", why)
        tasks = self.resources.get("tasks_per_node", 1)
        if "gpus-per-task" in self.totals and "gpus_per_node" not in self.resources:
            self.resources["gpus_per_node"] = self.totals["gpus-per-task"] * tasks
            why = "becomes gpus_per_node: each task sees all GPUs of its node"
            self.adopted.note("--gpus-per-task", why)
        if self.adopted.gpus == 0 and "gpus_per_node" not in self.resources:
            self.adopted.note("GPUs", "the command line requests no GPUs, so gpus_per_node is 0")
        if self.adopted.gpus is not None:
            self.resources.setdefault("gpus_per_node", self.adopted.gpus)
        if "gpus_per_node" not in self.resources:
            why = "the job gets gpus_per_node of the site, unless you set it"
            self.adopted.note("GPUs", why)

    def read_program(self, words: Sequence[str]) -> None:
        """Read the program that every task starts."""
        texts = tuple(map(plain, words))
        first = texts[0].rsplit("/", 1)[-1] if texts else ""
        if first in {"bash", "sh", "zsh"} and all(
            text.startswith("-") and text != "-c" for text in texts[1:]
        ):
            why = (
                "an interactive shell is not a job; for a shell in the container: runner shell NAME"
            )
            self.adopted.refuse_job(" ".join(texts), why)
        for word, hidden in zip(texts, hide_words(texts), strict=True):
            before, secret, _ = hidden.partition(HIDDEN)
            if secret and len(word) - len(before) >= LEAST_LENGTH:
                why = "it looks like a secret: let the program read it from a variable or a file"
                self.adopted.refuse_job(f"{before}…", why)
        self.command = texts
        is_module = re.fullmatch(r"python[0-9.]*", first) and texts[1:3] == (
            "-m",
            "torch.distributed.run",
        )
        if first == "torchrun" or is_module:
            self._read_torchrun(texts[3 if is_module else 1 :])
        variables = {*self.env, *self.adopted.env}
        if texts[:1] == ("env",):
            variables |= {word.partition("=")[0] for word in texts[1:] if "=" in word}
        if self.launcher == "none" and variables & _RANKS:
            self.launcher = "srun"  # it keeps the ranks that the user sets

    def _read_torchrun(self, words: Sequence[str]) -> None:
        """Let runner start the processes, if it knows all options; otherwise, torchrun stays in the command."""
        options, program = split(words, _TORCHRUN)
        values = {each.name: each.value or "" for each in options}
        processes, nodes = values.pop("nproc-per-node", "1"), values.pop("nnodes", "")
        if values.pop("module", None) is not None:
            program = ("-m", *program)
        values.pop("no-python", None)
        unknown = [name for name in values if not _OF_LAUNCHER.fullmatch(name)]
        fixed = processes.isdigit() and (nodes.isdigit() or not nodes)
        if unknown or not fixed or self.resources.get("tasks_per_node", 1) != 1:
            return
        if nodes and self.resources.setdefault("nodes", int(nodes)) != int(nodes):
            self.adopted.refuse_job(f"--nnodes {nodes}", "it is not the number of nodes of srun")
        self.launcher, self.command = "torchrun", program
        self.resources["tasks_per_node"] = int(processes)
        if cpus := self.resources.get("cpus_per_task"):
            self.resources["cpus_per_task"] = max(1, cpus // int(processes))
            why = f"divided among the {processes} processes of a node"
            self.adopted.note(f"--cpus-per-task={cpus}", why)

    def changes(self, environment: str, summary: str) -> list[Change]:
        """What to write into the job file."""
        top: dict[str, Any] = {
            "summary": summary,
            "command": self.command or None,
            "program_in_image": True if self.command else None,
            "environment": environment,
            "launcher": self.launcher,
            "save_seconds": self.save_seconds,
        }
        wanted: list[Change] = [
            Set((key,), value) for key, value in top.items() if value is not None
        ]
        tables: dict[str, dict[str, Any]] = {
            "resources": self.resources,
            "env": self.env,
            "slurm": {"sbatch": self.sbatch, "srun": self.srun},
        }
        for table, values in tables.items():
            wanted += [
                Set((table, name), value) for name, value in values.items() if value not in ([], ())
            ]
        return wanted


def read_command_line(
    argv: Sequence[str], folder: Path, job_file: str = ""
) -> tuple[Adopted, Draft]:
    """Read a command line, in which the shell has already expanded all variables.

    `job_file`: where the job file is to be written; empty: nowhere. Raises RunnerError for an unknown program.
    """
    words = [literal(word) for word in argv]
    if argv[0].startswith(("--container-", "--no-container-", "--environment", "--edf")):
        words.insert(0, "srun")
    adopted = Adopted(folder)
    draft = Draft(adopted, job_file)
    if words[0].rsplit("/", 1)[-1] == "srun":
        options, rest = split(words[1:], SRUN)
        containers.read([each for each in options if containers.is_flag(each)], adopted)
        for option in options:
            if not containers.is_flag(option):
                draft.read(option)
        if ":" in rest:
            adopted.refuse_job("srun `:`", "it starts several programs, but a job has only one")
    elif containers.starts_container(words):
        rest = tuple(words)
    else:
        raise RunnerError(
            f"cannot adopt a command line that starts with {' '.join(argv[:2])!r}",
            "it must start with srun, docker run, podman run, enroot start, apptainer exec or run (or singularity), "
            "or with flags of pyxis (--container-image=…)",
            "for a batch script: runner env adopt SCRIPT",
        )
    if containers.starts_container(rest):
        rest = containers.read_engine(rest, adopted)
    draft.count()
    draft.read_program(rest)
    return adopted, draft
