"""A batch script, read into a job file that runs it unchanged, and into an EDF if its container is literal text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from runner.bash import UNKNOWN, Command, commands, evaluated
from runner.expansion import literal
from runner.option_grammar import SRUN, Option, split
from runner.runs.adopt import containers
from runner.runs.adopt.adopted import Adopted
from runner.runs.job import KEYS
from runner.runs.schedulers.directives import FLAGS, of_script
from runner.runs.secrets import HIDDEN, hide_words

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.S)
_BEFORE = {"exec", "time", "sudo", "nohup"}
_OF_CONTAINERS = (
    r"--(no-)?container-|--environment\b|--edf\b|\b(docker|podman) run|enroot start"
    r"|\b(apptainer|singularity) (exec|run)"
)
_JOB_FILE = """\
# Made from {name} by `runner env adopt`. Slurm gets the script itself, unchanged.
batch = {batch}

# Ends the job if it does not make progress for this long. To turn it on, remove the #.
# hang_seconds = 1800

# How often the job is restarted, at most, after each cause. To turn it on, remove each #.
# [restart]
# time_limit = 5
# node_failure = 2
# hang = 2
"""
_OWN_VALUES = """
# What the script sets. A value here overrides the script's: remove the # of the line and of its table.
"""


def job_text(name: str, batch: str, text: str) -> str:
    """The job file for a script; `batch` is its path, as the job file needs it."""
    whole = _JOB_FILE.format(name=name, batch=json.dumps(batch, ensure_ascii=False))
    options, *others = of_script(text, name)
    if others or not options:
        return whole  # an option of a job file would apply to all components
    resources: dict[str, object] = {}
    given = {option: str(setting.value) for option, setting in options.items()}
    for setting, option in {**FLAGS, "time_minutes": "time"}.items():
        key, value = KEYS[setting], given.get(option, "")
        if key.table == "resources" and value and (key.kind is not int or value.isdigit()):
            resources[key.place(setting)[1]] = int(value) if key.kind is int else given[option]
            del given[option]
    flags = [f"--{option}={value}" if value else f"--{option}" for option, value in given.items()]
    flags = [flag for flag in flags if not _has_secret(flag)]
    lines = ["[resources]"] if resources else []
    lines += [f"{key} = {json.dumps(value)}" for key, value in resources.items()]
    lines += [""] if resources and flags else []
    lines += ["[slurm]", f"sbatch = {json.dumps(flags, ensure_ascii=False)}"] if flags else []
    return whole + _OWN_VALUES + "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _has_secret(flag: str) -> bool:
    """Also in `--export=ALL,NAME=VALUE`."""
    return any(
        HIDDEN in word for word in hide_words(re.split("[, ]", flag.replace("--export=", "")))
    )


def read_container(text: str) -> Adopted:
    """The container of a script's steps. `no_edf` says why it has none, or why only a shell knows it."""
    is_shell = re.match(r"#!.*\b(bash|sh|zsh|dash|ksh)\b", text)
    found = list(_containers(text)) if is_shell else []
    if not found:
        none = Adopted(None)
        none.no_edf.append(
            "it has no command with the options of a container"
            if is_shell
            else "it is not a shell script"
        )
        return none
    first = found[0]
    for other in found:
        first.no_edf += [line for line in other.no_edf if line not in first.no_edf]
        if not first.no_edf and other.changes() != first.changes():
            lines = f"{first.where.removesuffix(': ')} and {other.where}"
            first.no_edf.append(f"{lines}they start different containers")
    return first


def _containers(text: str) -> Iterator[Adopted]:
    """The container of each command that starts one, and of the `#SBATCH` lines."""
    directives = Adopted(None, "#SBATCH: ")
    flags = [
        Option(name, literal(value), f"--{name}={value}{UNKNOWN if '$' in value else ''}")
        for layer in of_script(text, "")
        for name, value in ((name, str(setting.value)) for name, setting in layer.items())
    ]
    if flags := [option for option in flags if containers.is_flag(option)]:
        containers.read(flags, directives)
        yield directives
    known: dict[str, str] = {}
    for command in commands(text):
        if command.words[:1] in (("source",), (".",), ("eval",)):
            known.clear()  # it can change any variable
        known |= _assigned(command, known, text)
        adopted = Adopted(None, f"line {command.line}: ")
        if _read_command(command, known, adopted) or _holds_command(command, text, adopted):
            if found := re.search(r"<\w[^<>]*\w>", command.raw):
                adopted.refuse(found[0], "replace this placeholder")
            elif not (adopted.image or adopted.base or adopted.no_edf):
                adopted.refuse(command.raw, "it names no image")
            yield adopted


def _assigned(command: Command, known: Mapping[str, str], text: str) -> dict[str, str]:
    """The variables that a command sets to literal text, if nothing else in the script sets them."""
    words = (
        command.words[1:] if command.words[:1] in (("export",), ("readonly",)) else command.words
    )
    pairs = [_ASSIGNMENT.fullmatch(word) for word in words]
    if command.nested or not all(pairs):
        return {}
    values: dict[str, str] = {}
    # a comment, or the export of a variable that has its value already
    rest = re.sub(r"(?m)^\s*(#.*|export( +\w+)+\s*)$", "", text)
    for name, word in (found.groups() for found in pairs if found):
        value = evaluated(word, {**known, **values})
        mentions = re.findall(rf"(?<![\w$])(?<!\$\{{){name}(?!\w)", rest)
        if len(mentions) == len(value) == 1 and value[0] and UNKNOWN not in value[0]:
            values[name] = value[0]
    return values


def _holds_command(command: Command, text: str, adopted: Adopted) -> bool:
    """Whether the command begins with a variable that holds a command with the options of a container."""
    name = re.match(r"\"?\$\{?(\w+)", command.words[0]) if command.words else None
    if name is None or not re.search(
        rf"(?m)^[^#\n]*\b{name[1]}\+?=(\([^)]*|.*)({_OF_CONTAINERS})", text
    ):
        return False
    adopted.refuse(command.words[0], "only a shell can evaluate this command")
    return True


def _read_command(command: Command, known: Mapping[str, str], adopted: Adopted) -> bool:
    """Whether the command starts a container, or may start one; its options are then in `adopted`."""
    words = [text for word in command.words for text in evaluated(word, known)]
    while words and (words[0] in _BEFORE or _ASSIGNMENT.fullmatch(words[0])):
        words.pop(0)
    rest = tuple(word if UNKNOWN in word else literal(word) for word in words)
    flags: list[Option] = []
    if rest and rest[0].rsplit("/", 1)[-1] == "srun":
        options, rest = split(rest[1:], SRUN)
        flags = [option for option in options if containers.is_flag(option)]
        containers.read(flags, adopted)
        if rest and UNKNOWN in rest[0] and rest[0][0] in '"$`':
            why = "only a shell knows whether this contains options of a container"
            adopted.refuse(rest[0].replace(UNKNOWN, ""), why)
    if containers.starts_container(rest):
        containers.read_engine(rest, adopted)
    return bool(flags or adopted.no_edf) or containers.starts_container(rest)
