"""Read a batch script into an EDF and a job file: its directives, its variables, and its main step."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from runner.bash import Command, Word, commands
from runner.errors import RunnerError
from runner.expansion import Variable, join, literal, names, parts
from runner.runs.adopt import containers
from runner.runs.adopt.adopted import Adopted
from runner.runs.adopt.containers import read_container_run
from runner.runs.adopt.job import RENDEZVOUS, Draft, Program, read_program
from runner.runs.adopt.options import SBATCH, SRUN, Option, split

_ENGINES = ("docker", "podman")
_STARTERS = ("torchrun", "accelerate", "python", "python3", "deepspeed", "mpirun", "mpiexec")
_STRUCTURE = {"done", "fi", "esac", "}", ")", "for", "case", "[", "[[", "((", "function", "select", ":", "true"}


@dataclass(frozen=True)
class Step:
    """A command of the script that starts programs."""

    command: Command
    kind: str
    """srun, docker, podman, or empty for a program that the script starts itself"""
    words: tuple[Word, ...]
    options: tuple[Option, ...]
    exported: Mapping[str, tuple[str, str]]
    """name -> (words, EDF text) of the variables exported before it"""

    @property
    def rank(self) -> tuple[int, int]:
        """The step with the highest rank is the main step: prefer steps in a container, then srun, then later steps."""
        contained = self.kind in _ENGINES or any(containers.is_flag(option) for option in self.options)
        return (3 if contained else 2 if self.kind == "srun" else 1, self.command.line)


def read_script(text: str, adopted: Adopted, draft: Draft, folder: Path, name: str) -> Program:
    """Read a batch script; returns its program. Raises RunnerError for a script of another language."""
    first = text.partition("\n")[0]
    if first.startswith("#!") and not re.search(r"\b(bash|sh|zsh|dash|ksh)\b", first):
        raise RunnerError(
            f"cannot read {name}",
            f"it is not a shell script; its first line is {first}",
            "pass the srun command that starts it: runner env adopt -- srun …",
        )
    directives = _directives(text, adopted)
    container = tuple(option for option in directives if containers.is_flag(option))
    draft.read([option for option in directives if option not in container], "sbatch", adopted)
    containers.read_flags(container, adopted)
    # as if the script were submitted from the current folder
    scope = Scope({name: literal(str(folder)) for name in ("PWD", "SLURM_SUBMIT_DIR")})
    adopted.folder = folder
    if re.search(r"\$\{?(PWD|SLURM_SUBMIT_DIR)\b|\$\(\s*pwd\b|`pwd`", text):
        adopted.note("$PWD", f"read as {folder}, as if you submitted the script from that folder")
    steps, others = _steps(text, scope, adopted)
    adopted.where = ""
    if not steps:
        adopted.note(name, "the script starts no step: the whole script becomes the job's command")
        return Program("none", "", (), ("bash", name))
    main = max(steps, key=lambda step: step.rank)
    for command, why in others:
        adopted.where = f"line {command.line}: "
        adopted.not_carried_over(command.raw, why)
    for step in steps:
        if step is not main:
            adopted.where = f"line {step.command.line}: "
            adopted.not_carried_over(step.command.raw, "a job runs one program: write another job file for this step")
    adopted.where = f"line {main.command.line}: "
    program = _take(main, adopted, draft, folder)
    adopted.where = ""
    note_unknown(scope, adopted, main.words)
    return program


def _directives(text: str, adopted: Adopted) -> tuple[Option, ...]:
    """The options in the `#SBATCH` lines. sbatch reads them up to the first command, and expands nothing in them."""
    words: list[Word] = []
    ended = False
    for number, line in enumerate(text.splitlines(), 1):
        ended = ended or bool(line.strip() and not line.lstrip().startswith("#"))
        if not line.startswith("#SBATCH"):
            continue
        if ended:
            adopted.not_carried_over(f"line {number}: {line}", "sbatch ignores #SBATCH lines after the first command")
            continue
        try:
            found = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        except ValueError:
            adopted.not_carried_over(f"line {number}: {line}", "a quote is not closed")
            continue
        words += [Word(literal(word), word) for word in found]
    options, rest = split(words, SBATCH)
    for word in rest:
        adopted.not_carried_over(f"#SBATCH {word.raw}", "this word is not an option")
    return options


def _steps(text: str, scope: Scope, adopted: Adopted) -> tuple[list[Step], list[tuple[Command, str]]]:
    """(the steps in order, the other commands, each with the reason why it is not carried over)."""
    steps: list[Step] = []
    others: list[tuple[Command, str]] = []
    for command in commands(text):
        if command.array:
            if command.nested:
                what = f"line {command.line}: {command.array}=(…)"
                adopted.note(
                    what,
                    "the command is inside a conditional, a loop or a function, but is read as if it always ran",
                )
            scope.arrays[command.array] = (*scope.arrays.get(command.array, ()), *command.words) if (
                f"{command.array}+=" in command.raw
            ) else command.words  # fmt: skip
            continue
        words = list(command.words)
        before: list[Word] = []
        while words and ASSIGNMENT.fullmatch(words[0].text) and not words[0].text.startswith("-"):
            before.append(words.pop(0))
        first = words[0].text if words else ""
        if first in {"export", "declare", "readonly", "local", "typeset"} or not words:
            for word in (*before, *words[1:]):
                if not word.text.startswith("-"):
                    scope.assign(
                        word, command, export=first == "export" or (first == "declare" and "-x" in command.raw)
                    )
            continue
        if first == ":" and assign_default(words[1:], scope, command):
            continue
        step = _step(command, before, scope.resolve(words), scope)
        if step is not None:
            steps.append(step)
        elif first == "unset":
            _unset(words[1:], scope, adopted, command)
        elif first not in _STRUCTURE:
            others.append(
                (command, "it runs on the host, outside the step; `setup` of the job file runs inside the container")
            )
    return steps, others


def _unset(words: Sequence[Word], scope: Scope, adopted: Adopted, command: Command) -> None:
    for word in words:
        if not word.text.startswith("-"):
            scope.values.pop(word.text, None)
            scope.exported.pop(word.text, None)
            adopted.env[word.text] = ""
            adopted.note(
                f"line {command.line}: {command.raw}",
                "the container will not have this variable, even if the image sets it",
            )


def _step(command: Command, before: Sequence[Word], words: tuple[Word, ...], scope: Scope) -> Step | None:
    """The step that a command starts; None for any other command."""
    while words and words[0].text.rsplit("/", 1)[-1] in {"exec", "time", "sudo", "nohup"}:
        words = words[1:]
    first = words[0].text.rsplit("/", 1)[-1] if words else ""
    exported = {name: (raw, scope.values[name]) for name, raw in scope.exported.items() if name in scope.values}
    for word in before:
        if not word.computed and (found := ASSIGNMENT.fullmatch(word.text)):
            exported[found[1]] = (word.raw, scope.value(found[2]))
    if first == "srun":
        return Step(command, "srun", words[1:], split(words[1:], SRUN)[0], exported)
    if first in _ENGINES and len(words) > 1 and words[1].text == "run":
        return Step(command, first, words[2:], (), exported)
    if first in _STARTERS or first.endswith((".py", ".sh")) or (first in {"bash", "sh"} and len(words) > 1):
        return Step(command, "", words, (), exported)
    return None


def _take(step: Step, adopted: Adopted, draft: Draft, folder: Path) -> Program:
    """Read the main step."""
    for name, (raw, value) in step.exported.items():
        draft.variable(name, value, raw, adopted)
    for redirection in step.command.redirections:
        if not re.fullmatch(r"\d*>&\d", redirection):
            adopted.not_carried_over(redirection, "a run has one log: runner logs")
    if step.command.pipe:
        adopted.not_carried_over("|", "the step's output goes only to the run's log")
    if step.command.nested:
        adopted.note(
            "the step", "the step is inside a loop, a conditional or a function, but the job runs the step only once"
        )
    words = take_step(step.kind, step.words, adopted, draft, folder)
    program = read_program(words, draft.tasks_per_node(adopted), adopted)
    draft.count(program, adopted)
    return program


def take_step(kind: str, words: Sequence[Word], adopted: Adopted, draft: Draft, folder: Path) -> tuple[Word, ...]:
    """Read the words after `srun`, `docker run` or `podman run`, and return those of the program."""
    if kind in _ENGINES:
        read_container_run(words, adopted, kind, folder)
        return tuple(adopted.command)
    if kind != "srun":
        return tuple(words)
    options, rest = split(words, SRUN)
    while rest and (rest[0].splits or rest[0].array):
        adopted.not_carried_over(rest[0].raw, "its value is unknown: write the value itself")
        more, rest = split(rest[1:], SRUN)
        options = (*options, *more)
    container = tuple(option for option in options if containers.is_flag(option))
    for option in container:
        if option.name == "container-env" and option.value:
            _name_variables(option.value, adopted, draft)
    draft.read([option for option in options if option not in container], "srun", adopted)
    containers.read_flags(container, adopted)
    inner = [word.text for word in rest[:2]]
    if inner and inner[0].rsplit("/", 1)[-1] in _ENGINES and inner[1:] == ["run"]:
        read_container_run(rest[2:], adopted, inner[0], folder)
        return tuple(adopted.command)
    return rest


def _name_variables(listed: str, adopted: Adopted, draft: Draft) -> None:
    """Move variables whose exported value must override the image's to [env] of the EDF."""
    for name in listed.split(","):
        if name in draft.env:
            adopted.env[name] = literal(draft.env.pop(name))


def read_command_line(argv: Sequence[str], adopted: Adopted, draft: Draft, folder: Path) -> Program:
    """Read a command line, and return the program. The shell has already expanded all variables in the words.

    Raises RunnerError for an unknown program.
    """
    words = tuple(Word(literal(word), shlex.quote(word)) for word in argv)
    adopted.folder = folder
    while words and words[0].text in {"sudo", "exec", "time"}:
        words = words[1:]
    first = words[0].text if words else ""
    first = first if first.startswith("-") else first.rsplit("/", 1)[-1]
    if first in {"docker", "nvidia-docker", "podman"}:
        words = words[1:]
        while words and words[0].text in {"container", "run", "--remote"}:
            words = words[1:]
        words = take_step(first.removeprefix("nvidia-"), words, adopted, draft, folder)
    elif first == "srun" or first.startswith(("--container-", "--no-container-", "--environment", "--edf")):
        words = take_step("srun", words[1:] if first == "srun" else words, adopted, draft, folder)
    elif first == "sbatch":
        return _sbatch(words[1:], adopted, draft, folder)
    else:
        raise RunnerError(
            f"cannot adopt a command line that starts with {first!r}",
            "only srun, sbatch, docker run, podman run, or the flags of pyxis (--container-image=…) can be adopted",
            "write the command line in one of these forms, or write the EDF yourself: docs/env.md lists its keys",
        )
    program = read_program(words, draft.tasks_per_node(adopted), adopted)
    draft.count(program, adopted)
    return program


def _sbatch(words: Sequence[Word], adopted: Adopted, draft: Draft, folder: Path) -> Program:
    """Read `sbatch OPTIONS SCRIPT`. The options override those in the script."""
    options, rest = split(words, SBATCH)
    program = Program("none")
    if rest:
        path = folder / rest[0].text
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise RunnerError(f"cannot read {path}", why, "check the path") from error
        program = read_script(text, adopted, draft, folder, rest[0].text)
    for word in rest[1:]:
        adopted.not_carried_over(word.raw, "the values of $1, $2 … in the script are not read")
    container = [option for option in options if containers.is_flag(option)]
    containers.read_flags(container, adopted)
    draft.read([option for option in options if option not in container], "sbatch", adopted)
    return program


ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.S)


@dataclass
class Scope:
    """The variables that the script has set so far."""

    values: dict[str, str] = field(default_factory=dict)
    """EDF text"""
    arrays: dict[str, tuple[Word, ...]] = field(default_factory=dict)
    computed: dict[str, str] = field(default_factory=dict)
    """name -> the words that only a shell can evaluate, with their line"""
    exported: dict[str, str] = field(default_factory=dict)
    """name -> the words that export it"""

    def resolve(self, words: Sequence[Word]) -> tuple[Word, ...]:
        """The words with known variables and arrays replaced."""
        found: list[Word] = []
        for word in words:
            if word.array in self.arrays:
                found += self.resolve(self.arrays[word.array])
            elif word.computed or word.array:
                found.append(replace(word, computed=True, text=word.raw))
            elif word.splits and word.text.strip("${}") in self.values:
                found += [Word(text, text) for text in self.value(word.text).split()]
            else:
                found.append(replace(word, text=self.value(word.text)))
        return tuple(found)

    def value(self, text: str) -> str:
        """EDF text with known variables replaced. Other variables are unchanged."""
        pieces: list[str | Variable] = []
        for part in parts(text, "a word"):
            known = self.values.get(part.name) if isinstance(part, Variable) else None
            pieces += [part] if known is None else [*parts(known, "a variable")]
        return join(tuple(pieces))

    def assign(self, word: Word, command: Command, *, export: bool) -> None:
        """Record one NAME=VALUE."""
        found = ASSIGNMENT.fullmatch(word.text)
        if found is None:
            if export:
                self.exported[word.text] = command.raw
            return
        name, value = found[1], found[2]
        own = () if word.computed else parts(value, "a word")
        if len(own) == 1 and isinstance(own[0], Variable) and own[0].name == name and name not in self.values:
            value = own[0].default or value  # A=${A:-x}
        for kind in (self.values, self.computed):
            kind.pop(name, None)
        if word.computed or command.nested:
            self.computed[name] = f"line {command.line}: {word.raw}"
        else:
            self.values[name] = self.value(value)
        if export:
            self.exported[name] = f"export {word.raw}"


def assign_default(words: Sequence[Word], scope: Scope, command: Command) -> bool:
    """Whether the words are `"${NAME:=value}"`, which sets NAME if it is unset."""
    found = re.fullmatch(r"\"?\$\{([A-Za-z_][A-Za-z0-9_]*):?=(.*)\}\"?", words[0].raw, re.S) if words else None
    if found and found[1] not in scope.values:
        [value, *_] = commands(f'{found[1]}="{found[2]}"')
        scope.assign(value.words[0], replace(command, nested=False), export=found[1] in scope.exported)
    return found is not None


def note_unknown(scope: Scope, adopted: Adopted, words: Sequence[Word]) -> None:
    """Add notes about variables of the EDF, the program and the exports that only the script sets."""
    texts = [adopted.image, adopted.workdir, adopted.base, *adopted.env.values(), *adopted.annotations.values()]
    texts += [mount.text() for mount in adopted.mounts]
    in_edf = {name for text in texts for name in names(text)}
    raw = [word.text for word in words if word.computed]
    in_words = {name for text in raw for name in re.findall(r"(?<!\\)\$\{?([A-Za-z_]\w*)", text)}
    in_words |= {name for word in words if not word.computed for name in names(word.text)}
    for name, given in scope.computed.items():
        if name in RENDEZVOUS and name in scope.exported:
            adopted.not_needed(given, "runner sets it for each task")
        elif name in in_edf:
            adopted.note(given, f"the EDF needs ${{{name}}}: export it where you launch, or write its value")
        elif name in scope.exported:
            adopted.not_carried_over(given, "only a shell can evaluate it: export it in task_prolog of the job file")
        elif name in in_words:
            adopted.note(given, f"the step uses ${name}: write its value, or export it where you launch")
    for name in sorted(in_words & (scope.values.keys() | scope.arrays.keys()) - scope.exported.keys()):
        if name not in {"PWD", "SLURM_SUBMIT_DIR"}:
            adopted.note(
                f"${name}", "the step uses this variable, but no shell expands it there: write its value instead"
            )
