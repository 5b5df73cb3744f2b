"""Flags of sbatch and srun from the user, the site and runner: their precedence, and which ones are rejected."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from runner.errors import RunnerError
from runner.option_grammar import SHORT

_LONG = re.compile(r"--([a-z][a-z0-9_-]*)(?:=(.*))?", re.DOTALL)
_SHORT = re.compile(r"-([A-Za-z])(.*)", re.DOTALL)

_COUNTS = (
    "runner computes the world size from the nodes and processes of the job",
    "use --nodes and --tasks-per-node, or nodes and tasks_per_node in the job file",
)
_ONE_CLUSTER = (
    "`runner status` and `runner cancel` only use the default cluster",
    "submit on a login node of that cluster, or set SLURM_CLUSTERS for all commands",
)
_GPUS_PER_TASK = (
    "it hides the other GPUs of the node from each task, but NCCL needs them",
    "use --gpus-per-node",
)
_ONE_LOG = ("a run has one output file, job.log, which `runner logs` reads", "leave out the flag")
_CONTAINER = (
    "the environment sets the container of the step",
    "use --env NAME, or --env FILE for an EDF elsewhere",
)

_REFUSED_BY_BOTH = {
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), _COUNTS),
    "gpus-per-task": _GPUS_PER_TASK,
    **dict.fromkeys(("output", "error", "open-mode"), _ONE_LOG),
    **dict.fromkeys(("environment", "edf"), _CONTAINER),
}
CPUS = {"cpus-per-task", "cpus-per-gpu"}
# pyxis has these options with and without `no-`. The environment sets one of the two, and srun fails if both are given
_CHOICES = {
    "container-entrypoint": "set entrypoint = true or false in the EDF",
    "container-mount-home": 'set mounts = ["${HOME}:${HOME}"] in the EDF',
    "container-remap-root": "leave out the flag: processes run with your user ID",
    "container-writable": "set writable = true or false in the EDF",
    "container-readonly": "set writable = true or false in the EDF",
}
# the options of pyxis 0.24, of which srun accepts each unique beginning
_OF_EDF = {"container-image", "container-mounts", "container-workdir", *_CHOICES}
_PYXIS = (
    *_OF_EDF,
    "container-name",
    "container-save",
    "container-env",
    "container-entrypoint-log",
    "container-unshare",
)
REFUSED: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "sbatch": {
        **_REFUSED_BY_BOTH,
        "chdir": ("the batch script must start in the run folder", "leave out the flag"),
        "signal": (
            "the batch script requests the signal itself, and handles it",
            "--save-signal and --save-seconds",
        ),
        "array": (
            "the tasks of an array would share one run folder",
            "runner launch --sweep NAME=VALUE,VALUE",
        ),
        "clusters": _ONE_CLUSTER,
        "wrap": ("--wrap would replace the batch script", "runner launch -- COMMAND"),
        "parsable": ("runner already passes this flag", "leave out the flag"),
        "wait": ("sbatch would return only after the end of the job", "runner launch --wait"),
        "test-only": ("nothing would be submitted", "runner launch --dry-run"),
        "no-kill": (
            "after the loss of its first node, the job would do nothing until its time limit",
            "use --spare",
        ),
    },
    "srun": {
        **_REFUSED_BY_BOTH,
        "chdir": ("tasks run in the code snapshot", "set workdir in the EDF"),
        "container-workdir": ("tasks run in the code snapshot", "set workdir in the EDF"),
        "pty": ("a batch script has no terminal", "runner shell"),
        "jobid": ("the step belongs to the job of the run", "runner shell RUN"),
        "multi-prog": (
            "every task runs the same command",
            "choose the program by RANK: --launcher srun -- sh -c '… $RANK …'",
        ),
        "overcommit": (
            "several tasks would share a CPU, and all of them would be slow",
            "use fewer --tasks-per-node, or more --nodes",
        ),
    },
}


def option(word: str, program: str) -> tuple[str, str | None]:
    """Long name and value of a flag of sbatch or srun (`program`). Raises RunnerError unless it is one flag."""
    if found := _LONG.fullmatch(word):
        return _in_full(found[1].replace("_", "-")), found[2]
    found = _SHORT.fullmatch(word)
    if found and found[1] in SHORT[program] and not found[2].startswith((" ", "=")):
        return SHORT[program][found[1]], found[2] or None
    advice = re.sub(r"^(--[a-z-]+)\s+", r"\1=", word)
    raise RunnerError(
        f"cannot pass {word!r} on to {program}",
        f"it must be one word: --name, --name=value, or a short option of {program} (-x, -xvalue)",
        f"--{program}={advice}"
        if advice != word
        else f"write, for example, --{program}=--constraint=gpu",
    )


def _in_full(name: str) -> str:
    """The name of a pyxis option of which `name` is a beginning; `name` itself for all others."""
    no = "no-" if name.startswith("no-") else ""
    fitting = [each for each in _PYXIS if each.startswith(name.removeprefix("no-"))]
    return no + fitting[0] if name.startswith(f"{no}container-") and len(fitting) == 1 else name


def refuse(words: Iterable[str], program: str, taken: Mapping[str, str] | None = None) -> None:
    """Raise RunnerError for a flag that would break the run. `taken`: option -> what has already set it."""
    for word in words:
        name, value = option(word, program)
        what = f"cannot pass {word!r} on to {program}"
        if program == "sbatch" and name == "signal":
            raise RunnerError(what, REFUSED[program][name][0], _instead_of_signal(value or ""))
        if name in REFUSED[program]:
            raise RunnerError(what, *REFUSED[program][name])
        choice = name.removeprefix("no-")
        if program == "sbatch" and choice.startswith("container-"):
            why = "the batch script itself would start in a container, which has no srun"
            otherwise = "set it in the EDF" if choice in _OF_EDF else f"use --srun={word}"
            raise RunnerError(what, why, _CHOICES.get(choice, otherwise))
        if choice in _CHOICES and any(each.removeprefix("no-") in _CHOICES for each in taken or {}):
            why = "runner already passes this option or its opposite to srun, because of the EDF"
            raise RunnerError(what, why, _CHOICES[choice])
        if name == "export" and not (value or "").upper().startswith("ALL"):
            raise RunnerError(
                what,
                "without ALL, Slurm drops all variables that the flag does not name, including PATH",
                f"use --{program}=--export=ALL,NAME=VALUE, or set the variables in [env] of the job file",
            )
        if name == "distribution" and not (value or "").startswith("block"):
            raise RunnerError(
                what,
                "ranks must be numbered node by node, so that rank / tasks_per_node is the node's number",
                f"to change only the order within a node: --{program}=--distribution=block:cyclic",
            )
        if name in (taken or {}):
            raise RunnerError(
                what, f"--{name} comes from {(taken or {})[name]}", "change that setting instead"
            )


_SIGNAL = re.compile(r"(?:[BR]{1,2}:)?(?:SIG)?([A-Z0-9]+)(?:@(\d+))?", re.IGNORECASE)
_SIGNAL_NAMES = {"10": "USR1", "15": "TERM", "12": "USR2"}


def _instead_of_signal(value: str) -> str:
    """What to use instead of `--signal=VALUE`. Source of the format: sbatch(1)."""
    found = _SIGNAL.fullmatch(value)
    name = _SIGNAL_NAMES.get(found[1], found[1].upper()) if found else ""
    seconds = f"--save-seconds {found[2]}" if found and found[2] else "--save-seconds 60"
    if name == "USR2":  # sent in any case
        return f"use {seconds}: every program that handles USR2 gets it"
    if name in ("TERM", "USR1"):
        return f"use --save-signal {name} {seconds}, or save_signal and save_seconds in a job file"
    return f"use --save-signal TERM or USR1, and {seconds}; runner sends no other signals than these and USR2"


def refuse_of_site(words: Iterable[str], refused: Mapping[str, str], site: str) -> None:
    """Raise RunnerError for a flag that the site's Slurm rejects."""
    for word in words:
        if word in refused:
            raise RunnerError(
                f"the site {site!r} refuses {word}",
                refused[word],
                "change the value in the job file or the flag",
            )


def merge(
    own: Sequence[str], site: Sequence[str], user: Sequence[str], program: str
) -> tuple[str, ...]:
    """Merge the flags. For each option, the user's flags take precedence over the site's, and the site's over ours."""

    def without(words: Sequence[str], winners: Sequence[str]) -> list[str]:
        names = {option(word, program)[0] for word in winners}
        if names & {"gres", "gpus", "gpus-per-node"} and any("gpu" in word for word in winners):
            names |= {"gres", "gpus", "gpus-per-node"}  # different spellings of the same request
        if names & {"mem", "mem-per-cpu", "mem-per-gpu"}:
            names |= {"mem", "mem-per-cpu", "mem-per-gpu"}  # Slurm accepts only one of them
        if names & CPUS:
            names |= CPUS  # sbatch and srun refuse both together
        return [word for word in words if option(word, program)[0] not in names]

    own = without(own, (*site, *user))
    return (*own, *without(site, user), *user)
