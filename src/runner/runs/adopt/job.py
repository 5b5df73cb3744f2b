"""Options of sbatch and srun, and the program, read into a job file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from runner.bash import Word
from runner.environments.rewriting import Change, Set
from runner.errors import RunnerError
from runner.expansion import Variable, parts
from runner.machine.secrets import looks_secret
from runner.runs.adopt.adopted import Adopted, plain
from runner.runs.adopt.options import ACCELERATE, PYTHON, TORCHRUN, Grammar, Option, split

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
    "chdir": "tasks start in the snapshot of the code",
    "pty": "`runner shell` gives a prompt", "get-user-env": "the container gets the host's variables",
}  # fmt: skip
# Source: pyxis 0.24.0, the variables that it does not pass to enroot
_NOT_INTO_CONTAINERS = {"PATH", "LD_LIBRARY_PATH", "LD_PRELOAD"}


@dataclass
class Draft:
    """The job file that is being assembled."""

    check: Check
    check_variable: CheckVariable
    resources: dict[str, int | str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    mail_user: str = ""
    mail_events: tuple[str, ...] = ()
    save_seconds: int | None = None
    flags: dict[str, dict[str, str]] = field(default_factory=lambda: {"sbatch": {}, "srun": {}})
    ntasks: int | None = None
    gpus: int | None = None
    gpus_per_task: int | None = None

    def read(self, options: Sequence[Option], program: str, adopted: Adopted) -> None:
        """Read options of sbatch or srun, except those for the container."""
        for option in options:
            value = None if option.computed else plain(option.value or "")
            if value is None:
                adopted.computed(option.given)
            elif not self._number(option, value) and not self._text(option.name, value):
                self._other(option, value, program, adopted)

    def _number(self, option: Option, value: str) -> bool:
        """Whether the option is a count; if so, read its value."""
        name = option.name
        if name in _NUMBERS and value.isdigit() and int(value) > 0:
            self.resources[_NUMBERS[name]] = int(value)
        elif name == "ntasks" and value.isdigit():
            self.ntasks = int(value)
        elif name in {"gpus-per-node", "gres"} and (found := re.fullmatch(r"(?:gpu:)?(?:[\w.-]+:)?(\d+)", value)):
            if name == "gres" and not value.startswith("gpu"):
                return False
            self.resources["gpus_per_node"] = int(found[1])
        elif name == "gpus" and (found := re.fullmatch(r"(?:[\w.-]+:)?(\d+)", value)):
            self.gpus = int(found[1])
        elif name == "gpus-per-task" and (found := re.fullmatch(r"(?:[\w.-]+:)?(\d+)", value)):
            self.gpus_per_task = int(found[1])
        else:
            return False
        return True

    def _text(self, name: str, value: str) -> bool:
        if name in _TEXTS and value:
            self.resources[_TEXTS[name]] = value
        elif name == "mail-user":
            self.mail_user = value
        elif name == "mail-type":
            self.mail_events = tuple(value.split(","))
        else:
            return False
        return True

    def _other(self, option: Option, value: str, program: str, adopted: Adopted) -> None:
        name = option.name
        if name in _NOT_NEEDED:
            adopted.not_needed(option.given, _NOT_NEEDED[name])
        elif name == "job-name":
            adopted.note(option.given, f"a run is named after its job file: rename the file to {value}.toml")
        elif name == "signal" and (found := re.fullmatch(r".*@(\d+)", value)):
            self.save_seconds = int(found[1])
            adopted.note(option.given, f"becomes save_seconds = {found[1]}: runner requests the signal itself")
        elif name == "export" and value.upper().startswith("ALL"):
            for entry in value.split(",")[1:]:
                key, _, text = entry.partition("=")
                self.variable(key, text, option.given, adopted)
            if "," not in value:
                adopted.not_needed(option.given, "the container gets the job's variables")
        else:
            # sbatch accepts both --NAME=VALUE and --NAME VALUE
            flag = f"--{name}={value}" if option.value is not None else f"--{name}"
            try:
                self.check(flag, program)
            except RunnerError as error:
                adopted.not_carried_over(option.given, f"{error.why}; {error.fix}")
            else:
                self.flags[program][name] = flag

    def variable(self, name: str, value: str, given: str, adopted: Adopted) -> None:
        """Read a variable that the job exports. The value is EDF text."""
        text = plain(value)
        if name in RENDEZVOUS:
            adopted.not_needed(given, "runner sets it for each task")
        elif name in _NOT_INTO_CONTAINERS:
            adopted.not_carried_over(given, f"a container does not get the host's {name}; set it in [env] of the EDF")
        elif text is None or looks_secret(name, text):
            adopted.variable(name, value, given)
        else:
            try:
                self.check_variable(name, text)
            except RunnerError as error:
                adopted.not_carried_over(given, f"{error.why}; {error.fix}")
            else:
                self.env[name] = text

    def count(self, program: Program, adopted: Adopted) -> None:
        """Convert the counts of nodes, processes, GPUs and CPUs to those of a job file."""
        nodes = self.resources.get("nodes", 1)
        assert isinstance(nodes, int)
        tasks = self.tasks_per_node(adopted)
        if self.gpus is not None and "gpus_per_node" not in self.resources:
            self.resources["gpus_per_node"] = max(1, self.gpus // nodes)
        if self.gpus_per_task is not None and "gpus_per_node" not in self.resources:
            self.resources["gpus_per_node"] = self.gpus_per_task * (tasks or 1)
            adopted.note("--gpus-per-task", "becomes gpus_per_node: each task sees all GPUs of its node")
        if program.launcher not in {"torchrun", "accelerate"}:
            if tasks is not None:
                self.resources["tasks_per_node"] = tasks
            return
        processes = program.processes or self.resources.get("gpus_per_node")
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
            adopted.not_carried_over(
                f"--ntasks={self.ntasks}", f"it is not a multiple of {nodes} nodes: set tasks_per_node"
            )
            return None
        return self.ntasks // nodes

    def changes(self, program: Program, environment: str, summary: str) -> list[Change]:
        """What to write into the job file."""
        wanted: list[Change] = [Set(("summary",), summary)]
        if program.script:
            wanted.append(Set(("script",), program.script))
        elif program.command:
            wanted.append(Set(("command",), program.command))
        wanted += [Set(("environment",), environment), Set(("launcher",), program.launcher)]
        if program.arguments:
            wanted.append(Set(("arguments",), program.arguments))
        if self.save_seconds is not None:
            wanted.append(Set(("save_seconds",), self.save_seconds))
        wanted += [Set(("resources", name), value) for name, value in self.resources.items()]
        wanted += [Set(("env", name), value) for name, value in self.env.items()]
        if self.mail_user:
            wanted += [Set(("mail", "user"), self.mail_user), Set(("mail", "events"), self.mail_events)]
        wanted += [Set(("slurm", name), tuple(flags.values())) for name, flags in self.flags.items() if flags]
        return wanted


_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.S)
_PYTHON = re.compile(r"python[0-9.]*")
_COUNTED = {"nnodes", "node-rank", "master-addr", "master-port", "standalone", "local-addr", "num-machines",
            "machine-rank", "main-process-ip", "main-process-port", "multi-gpu", "same-network",
            "num-processes"}  # fmt: skip


@dataclass(frozen=True)
class Program:
    """The program of a job file."""

    launcher: str
    script: str = ""
    arguments: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    processes: int | None = None
    """per node; None if the launcher's options do not set it"""


def read_program(words: Sequence[Word], tasks_per_node: int | None, adopted: Adopted) -> Program:
    """The program that these words start in every task."""
    words = _without_prefixes(list(words), adopted)
    first = words[0].text.rsplit("/", 1)[-1] if words else ""
    launcher, grammar, behind = "", PYTHON, 1
    texts = [word.text for word in words]
    if first == "torchrun":
        launcher, grammar = "torchrun", TORCHRUN
    elif _PYTHON.fullmatch(first) and "-m" in texts[1:3]:
        at = texts.index("-m", 1)
        if texts[at + 1 : at + 2] in (["torch.distributed.run"], ["torch.distributed.launch"]):
            launcher, grammar, behind = "torchrun", TORCHRUN, at + 2
        elif texts[at + 1 : at + 3] in (["accelerate.commands.launch"],):
            launcher, grammar, behind = "accelerate", ACCELERATE, at + 2
    elif first == "accelerate" and texts[1:2] == ["launch"]:
        launcher, grammar, behind = "accelerate", ACCELERATE, 2
    if launcher:
        return _launched(launcher, grammar, words[behind:], adopted)
    several = "srun" if (tasks_per_node or 1) > 1 else "none"
    if _PYTHON.fullmatch(first):
        options, rest = split(words[1:], PYTHON)
        if {option.name for option in options} <= {"u"} and rest and rest[0].text.endswith(".py"):
            return _program(several, rest, words)
    if first in {"bash", "sh"} and len(words) > 1 and words[1].text.endswith(".sh"):
        return _program(several, words[1:], words)
    if first.endswith((".py", ".sh")):
        return _program(several, words, words)
    return _program("none", (), words)


def _without_prefixes(words: list[Word], adopted: Adopted) -> list[Word]:
    """The words without a leading `exec` or `env -u NAME NAME=VALUE`. The variables of `env` go to [env]."""
    while words and words[0].text in {"exec", "env", "time"}:
        prefix = words.pop(0)
        while prefix.text == "env" and words:
            if words[0].text == "-u" and len(words) > 1:
                adopted.env[words[1].text] = ""
                words = words[2:]
            elif (found := _ASSIGNMENT.fullmatch(words[0].text)) and not words[0].computed:
                adopted.variable(found[1], found[2], words[0].raw)
                words = words[1:]
            else:
                break
    return words


def _launched(launcher: str, grammar: Grammar, words: Sequence[Word], adopted: Adopted) -> Program:
    dashed = [
        Word(re.sub(r"^--[^=]*", lambda name: name[0].replace("_", "-"), word.text), word.raw, word.computed)
        for word in words
    ]
    options, rest = split(dashed, grammar)
    rest = tuple(words[len(words) - len(rest) :])
    processes, module = None, False
    for option in options:
        if option.name == "nproc-per-node":
            processes = int(option.value) if option.value and option.value.isdigit() else None
            if processes is None:
                adopted.not_needed(option.given, "the default is one process per GPU")
        elif option.name in {"module", "no-python"}:
            module = option.name == "module"
        else:
            _say(option, adopted)
    if module:
        command = (Word("python", "python"), Word("-m", "-m"), *rest)
        return _program(launcher, (), command, processes)
    return _program(launcher, rest, rest, processes)


def _say(option: Option, adopted: Adopted) -> None:
    if option.name in _COUNTED or option.name.startswith("rdzv-"):
        adopted.not_needed(option.given, "runner sets the rendezvous and the ranks for each task")
    elif option.name == "max-restarts":
        adopted.not_carried_over(option.given, "runner restarts the whole job, not single processes")
    else:
        adopted.not_carried_over(option.given, "a job file has no key for it: set it in the script")


def _program(launcher: str, rest: Sequence[Word], words: Sequence[Word], processes: int | None = None) -> Program:
    """The script with its arguments, or a command if there is no script, or if a shell must evaluate the words."""
    texts = [plain(word.text) if not word.computed else None for word in rest]
    if texts and None not in texts and str(texts[0]).endswith((".py", ".sh")):
        script, *arguments = (str(text) for text in texts)
        return Program(launcher, script, tuple(arguments), (), processes)
    texts = [plain(word.text) if not word.computed else None for word in words]
    if words and None not in texts:
        return Program(launcher, "", (), tuple(str(text) for text in texts), processes)
    if not words:
        return Program(launcher, processes=processes)
    prefix = ["python"] if words[0].text.endswith(".py") and launcher in {"torchrun", "accelerate"} else []
    text = " ".join((*prefix, *(shell_text(word) for word in words)))
    return Program(launcher, "", (), ("bash", "-c", f"exec {text}"), processes)


def shell_text(word: Word) -> str:
    """The word as shell text: variables stay variables, other text is quoted, computed words are unchanged."""
    if word.computed or re.fullmatch(r"[A-Za-z0-9_@%+:,./=-]+", word.text):
        return word.raw if word.computed else word.text
    written = ""
    for piece in parts(word.text, "a word"):
        if isinstance(piece, Variable):
            written += f"${{{piece.name}}}" if piece.default is None else f"${{{piece.name}:-{piece.default}}}"
        else:
            written += re.sub(r'([\\"$`])', r"\\\1", piece)
    return f'"{written}"'
