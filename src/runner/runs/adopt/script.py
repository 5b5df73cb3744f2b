"""Read a batch script into an EDF and a job file: its directives, its variables, and its main step."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runner.bash import Command, Word, commands
from runner.errors import RunnerError
from runner.expansion import expand, literal, names
from runner.runs.adopt import containers
from runner.runs.adopt.adopted import SECRET, Adopted, plain, secrets_in
from runner.runs.adopt.containers import CONTAINER
from runner.runs.adopt.job import RANKS, Draft, Program, read_program
from runner.runs.adopt.options import SBATCH, SRUN, Grammar, Option, read_directives, split
from runner.runs.adopt.scope import ASSIGNMENT, Scope

_ENGINES = ("docker", "nvidia-docker", "podman")
_FOREIGN = {"apptainer", "singularity", "sarus", "shifter"}
_NO_SIF = "an EDF cannot name a .sif file, and Apptainer mounts other folders by default"
# commands that change nothing for the commands after them
_QUIET = re.compile(
    r"done|fi|esac|[})]|for|case|\[\[?|\(\(|function|select|:|true|cd|date|echo|env|exit|hostname|id|ls|nvidia-smi|printenv"
    r"|printf|pwd|set|shopt|sleep|squeue|uname|wait|which|whoami"
)
# a comment, or a line that only exports one variable
_ONE_EXPORT = re.compile(r"""\s*#.*|(\s*export\s+\w+)=("[^"]*"|'[^']*'|[^\s;&|"'\\]*)\s*(#.*)?""")


@dataclass(frozen=True)
class Step:
    """A command of the script that starts programs."""

    command: Command
    kind: str
    """srun, docker or podman"""
    words: tuple[Word, ...]
    before: tuple[Word, ...]
    """assignments in front of the command"""

    @property
    def in_container(self) -> bool:
        return self.kind != "srun" or any(
            containers.is_flag(option) for option in split(self.words, SRUN)[0]
        )


def read_script(
    text: str,
    adopted: Adopted,
    draft: Draft,
    folder: Path,
    name: str,
    *,
    options: Sequence[Option] = (),
    arguments: Sequence[str] = (),
) -> Program:
    """Read a batch script with the options and arguments that sbatch gets; returns its program.

    Raises RunnerError for a script of another language.
    """
    first = text.partition("\n")[0]
    if first.startswith("#!") and not re.search(r"\b(bash|sh|zsh|dash|ksh)\b", first):
        raise RunnerError(
            f"cannot read {name}",
            f"it is not a shell script; its first line is {first}",
            f"run it unchanged: runner launch ./{name}",
        )
    directives = (*read_directives(text, adopted), *options)
    container = [option for option in directives if containers.is_flag(option)]
    draft.allocated = bool(directives)
    draft.read([option for option in directives if option not in container], "sbatch", adopted)
    # as if the script were submitted from the current folder
    adopted.folder = folder / next(
        (option.value or "" for option in directives[::-1] if option.name == "chdir"), ""
    )
    containers.read(container, adopted)
    if container:
        return _whole_script(text, adopted, draft, arguments)
    return _main_step(text, adopted, draft, adopted.folder, name, arguments)


def _main_step(
    text: str, adopted: Adopted, draft: Draft, folder: Path, name: str, arguments: Sequence[str]
) -> Program:
    """The program of the main step; the lines before it go to host_setup."""
    scope = Scope({name: literal(str(folder)) for name in ("PWD", "SLURM_SUBMIT_DIR")})
    if re.search(r"\$\{?(PWD|SLURM_SUBMIT_DIR)\b|\$\(\s*pwd\b|`pwd`", text):
        adopted.note("$PWD", f"read as {folder}, as if you submitted the script from that folder")
    steps, active = _steps(text, scope, adopted, draft)
    main = max(steps, key=lambda step: (step.in_container, step.command.line), default=None)
    if main is None:
        for command, why in active:
            if why:
                adopted.refuse(f"line {command.line}: {command.raw}", why)
        adopted.refuse(name, "it has no command that starts a program in a container")
        return Program("none")
    _refuse_others(steps, active, main, adopted)
    adopted.where = f"line {main.command.line}: "
    program = _take(main, scope, adopted, draft)
    adopted.where = ""
    wanted = _check_variables(scope, adopted)
    host = text.replace("\r\n", "\n").split("\n")[: main.command.line - 1]
    if re.search(r"(?m)^\s*(source|\.|eval)\s", "\n".join(host)):
        wanted = adopted.variables()
    if draft.host_setup or wanted or any(command.line < main.command.line for command, _ in active):
        draft.host_setup[:0] = [f"export {' '.join(sorted(wanted))}"] if wanted else []
        _carry(host, adopted, draft, folder, arguments)
    return _with_ranks(program, adopted, draft)


def _refuse_others(
    steps: Sequence[Step], active: Sequence[tuple[Command, str]], main: Step, adopted: Adopted
) -> None:
    """Refuse the steps beside the main step, and the commands after it."""
    for command, _ in active:
        if command.line >= main.command.line:
            why = "a job file has no place for commands on or after the line that starts the container"
            adopted.refuse(f"line {command.line}: {command.raw}", why)
    for step in steps:
        if step is not main and step.words and _QUIET.fullmatch(step.words[0].text):
            adopted.note(
                f"line {step.command.line}: {step.command.raw}",
                "this step only prints, so it is left out",
            )
        elif step is not main:
            why = "a job has only one step: write another job file for this one"
            adopted.refuse(f"line {step.command.line}: {step.command.raw}", why)


def _carry(
    host: list[str], adopted: Adopted, draft: Draft, folder: Path, arguments: Sequence[str]
) -> None:
    """Move the lines before the step to host_setup."""
    for number, line in enumerate(host):
        what = f"line {number + 1}: {line.strip()}"
        if secrets_in(line.split()) and (found := _ONE_EXPORT.fullmatch(line)):
            host[number] = found[1] or ""  # without the value
            adopted.not_carried_over(what, SECRET)
        elif secrets_in(line.split()):
            adopted.refuse(what, "keep the secret of this line in a file or variable")
    body = re.sub(r"\A(\s*#.*\n|\s*\n)+", "", "\n".join([*host, ""])).rstrip()
    if re.search(r"\$\{?0\b|BASH_SOURCE", body):
        adopted.refuse("$0", "in host_setup, $0 is not the path of the script")
    if found := re.search(r"(?m)^\s*trap\s.*|^.*[^&>|]&[ \t]*$", body):
        adopted.refuse(found[0].strip(), "this would end with host_setup, before the step starts")
    head = [f"cd {shlex.quote(str(folder))}"]
    head += [f"SLURM_SUBMIT_DIR={shlex.quote(str(folder))}"] if "SLURM_SUBMIT_DIR" in body else []
    all_lines = "\n".join((body, *draft.host_setup))
    if re.search(r"\$\{?[0-9@*#]", all_lines):
        head.append(shlex.join(("set", "--", *arguments)))
        if not arguments:
            tell = (
                adopted.refuse if re.search(r"'%q ' \"?\$\{?[0-9@*]", all_lines) else adopted.note
            )
            tell(
                "the script",
                "read without arguments; to give some: runner env adopt … -- sbatch SCRIPT ARGUMENTS",
            )
    draft.host_setup[:] = [*head, *([body] if body else []), *(draft.host_setup or ["true"])]
    adopted.note(
        "the lines before the step",
        "the lines become host_setup of the job file, which runs on the host",
    )


def _check_variables(scope: Scope, adopted: Adopted) -> set[str]:
    """The variables of the EDF that host_setup must export. Refuses those that `launch` must know."""
    if names(adopted.base):
        adopted.refuse(
            adopted.base, "a base environment must be known at launch: write its name", edf=True
        )
    for name in names(adopted.image):
        if name in scope.computed:
            adopted.refuse(
                adopted.image,
                f"the image must be known at launch ({scope.computed[name]})",
                edf=True,
            )
    for name in sorted(adopted.bare_mounts):
        if name in scope.computed or "mount" in name.lower():
            adopted.refuse(
                f"${name}", "this variable may contain several mounts: write its value", edf=True
            )
    if scope.defaults:
        adopted.note(
            ", ".join(dict.fromkeys(scope.defaults)), "read with the default values in the script"
        )
    wanted = adopted.variables() & scope.computed.keys()
    for name in sorted(wanted):
        adopted.note(
            scope.computed[name], f"the EDF uses ${{{name}}}, so host_setup now exports {name}"
        )
    return wanted


def _whole_script(text: str, adopted: Adopted, draft: Draft, arguments: Sequence[str]) -> Program:
    """The program if sbatch itself has the options of the container: the script runs inside, once, on one node."""
    first = text.partition("\n")[0]
    shell = shlex.split(first[2:]) if first.startswith("#!") else ["/bin/sh"]
    if draft.resources.get("nodes", 1) != 1:
        adopted.refuse(
            f"--nodes={draft.resources['nodes']}",
            "the script runs in a container on the first node only",
        )
    for command in commands(text):
        if any(word.text.rsplit("/", 1)[-1] in {"srun", *_ENGINES} for word in command.words[:2]):
            why = "the script itself runs in a container, and so do its steps"
            adopted.refuse(f"line {command.line}: {command.raw}", why)
    if re.search(r"\$\{?0\b|BASH_SOURCE", text):
        adopted.refuse("$0", "in the job, $0 is not the path of the script")
    if "SLURM_SUBMIT_DIR" in text:
        draft.host_setup.append(f"export SLURM_SUBMIT_DIR={shlex.quote(str(adopted.folder))}")
    if secrets_in(text.split()):
        adopted.refuse("the script", "a launch would copy the script, with the secret in it")
    adopted.note("the script", "the options of sbatch start the whole script in the container")
    text = re.sub(r"\A([ \t]*(#.*)?\n)+", "", text)
    tasks, cpus = draft.tasks_per_node(adopted) or 1, draft.resources.get("cpus_per_task", 1)
    program = Program("none", (*shell, "-c", text, *(("script", *arguments) if arguments else ())))
    draft.count(program, adopted)
    if tasks > 1 and isinstance(cpus, int):
        draft.resources |= {"tasks_per_node": 1, "cpus_per_task": tasks * cpus}
    return program


def _steps(
    text: str, scope: Scope, adopted: Adopted, draft: Draft
) -> tuple[list[Step], list[tuple[Command, str]]]:
    """(the steps in order, the commands that must run on the host; with a reason if one may start a container)."""
    steps: list[Step] = []
    active: list[tuple[Command, str]] = []
    found = commands(text)
    for previous, command in zip((None, *found), found, strict=False):
        if command.array:
            scope.assign_array(command)
            continue
        words = list(command.words)
        before: list[Word] = []
        while words and ASSIGNMENT.fullmatch(words[0].text):
            before.append(words.pop(0))
        first = words[0].text if words else ""
        if first == "exit" and not command.nested:
            break
        if first in {"export", "declare", "readonly", "local", "typeset"} or not words:
            for word in (*before, *words[1:]):
                scope.assign(word, command)
            active += (
                [(command, "")] if first == "export" or "-x" in command.raw.split()[:2] else []
            )
            continue
        if first == ":" and scope.assign_default(words[1:], command):
            continue
        if first == "tee" and steps and steps[-1].command.pipe and steps[-1].command is previous:
            steps[-1] = replace(steps[-1], command=replace(steps[-1].command, pipe=False))
            adopted.not_carried_over(
                f"line {command.line}: {command.raw}", "a run has one log: runner logs"
            )
            continue
        step = _step(command, before, scope.resolve(words))
        if step is not None:
            steps.append(step)
        elif first in {"source", ".", "eval"}:
            active.append((command, ""))
            why = "the options of the step are read as if this line changed none of their variables"
            adopted.note(f"line {command.line}: {command.raw}", why)
        elif first == "cd":
            _cd(words[1:], scope, adopted, command)
        elif first in {"ulimit", "umask"} and not command.nested:
            draft.task_prolog.append(command.raw)
        elif words[0].computed or words[0].splits:
            active.append((command, "only a shell can tell which program this line starts"))
        elif not _QUIET.fullmatch(first) or any(
            re.match(r"\d*>(?!&\d|.?\s*/dev/)", each) for each in command.redirections
        ):
            active.append((command, _NO_SIF if first.rsplit("/", 1)[-1] in _FOREIGN else ""))
    return steps, active


def _cd(words: Sequence[Word], scope: Scope, adopted: Adopted, command: Command) -> None:
    """Change the folder to which relative paths refer."""
    to = plain(scope.resolve(words)[0].text) if words and not words[0].computed else None
    if command.nested or to is None or adopted.folder is None:
        scope.values.pop("PWD", None)
        scope.computed["PWD"] = f"line {command.line}: {command.raw}"
        adopted.folder = None
    else:
        adopted.folder = adopted.folder / to
        scope.values["PWD"] = literal(os.path.normpath(adopted.folder))


def _step(command: Command, before: Sequence[Word], words: Sequence[Word]) -> Step | None:
    """The step that a command starts; None for any other command."""
    while words and words[0].text.rsplit("/", 1)[-1] in {"exec", "time", "sudo", "nohup"}:
        words = words[1:]
    first = words[0].text.rsplit("/", 1)[-1] if words else ""
    words = words[1:]
    if first in _ENGINES:
        words = words[1:] if words and words[0].text in {"container", "--remote"} else words
        return (
            Step(command, first, tuple(words[1:]), tuple(before))
            if words and words[0].text == "run"
            else None
        )
    return Step(command, first, tuple(words), tuple(before)) if first == "srun" else None


def _take(step: Step, scope: Scope, adopted: Adopted, draft: Draft) -> Program:
    """Read the main step."""
    for redirection in step.command.redirections:
        if re.match(r"\d*<", redirection):
            adopted.refuse(redirection, "the step reads this text as its input")
        elif not re.fullmatch(r"\d*>&\d", redirection):
            adopted.not_carried_over(redirection, "a run has one log: runner logs")
    if step.command.pipe:
        adopted.refuse("|", "another command reads the output of the step")
    if step.command.nested:
        adopted.refuse(
            step.command.raw, "it is inside a condition, a loop or a function, or behind && or ||"
        )
    program = read_program(_read_step(step.kind, step.words, adopted, draft, scope), draft, adopted)
    draft.count(program, adopted)
    draft.host_setup[:0] = [f"export {word.raw}" for word in step.before]
    return program


def _with_ranks(program: Program, adopted: Adopted, draft: Draft) -> Program:
    """The program with the launcher `srun`, which sets RANK and WORLD_SIZE for each task, if the user sets them too:
    on the host, in an option of the step, or with `env` in front of the program."""
    on_host = re.search(rf"export\b.*\b({'|'.join(RANKS)})=", "\n".join(draft.host_setup))
    words = program.command[1:] if program.command[:1] == ("env",) else ()
    by_env = {word.partition("=")[0] for word in words if ASSIGNMENT.fullmatch(word)}
    if program.launcher == "none" and (
        draft.sets_ranks or on_host or RANKS & (by_env | adopted.env.keys())
    ):
        return replace(program, launcher="srun")
    return program


def _read_step(
    kind: str, words: Sequence[Word], adopted: Adopted, draft: Draft, scope: Scope
) -> tuple[Word, ...]:
    """Read the words after `srun`, `docker run` or `podman run`, and return those of the program."""
    options, rest = _options(words, CONTAINER if kind in _ENGINES else SRUN, adopted, scope)
    if kind in _ENGINES:
        rest = containers.read_container_run(options, rest, adopted, kind)
        draft.all_gpus = f"{kind} run" if adopted.gpus is None else ""
        if adopted.gpus is not None and "gpus" not in draft.counts and not draft.allocated:
            draft.counts["gpus"] = adopted.gpus
        return rest
    container = [option for option in options if containers.is_flag(option)]
    for option in container:
        for name in (option.value or "").split(",") if option.name == "container-env" else ():
            adopted.env |= (
                {name: scope.values[name]}
                if plain(scope.values.get(name, "${x}")) is not None
                else {}
            )
    draft.read([option for option in options if option not in container], "srun", adopted)
    containers.read(container, adopted)
    if any(word.text == ":" for word in rest):
        adopted.refuse("srun `:`", "it starts several programs, but a job has only one")
    if rest and rest[0].text.rsplit("/", 1)[-1] in _FOREIGN:
        adopted.refuse(rest[0].text, _NO_SIF, edf=True)
    return rest


def _options(
    words: Sequence[Word], grammar: Grammar, adopted: Adopted, scope: Scope
) -> tuple[tuple[Option, ...], tuple[Word, ...]]:
    """(options, the words after them); variables have the values before a condition changes them."""
    options, rest = split(words, grammar)
    while rest and (rest[0].splits or rest[0].array):
        name = rest[0].array or rest[0].raw.strip("${}")
        known = scope.resolve(scope.fallback.get(name, ()))
        if name in scope.fallback:
            said = " ".join(word.raw for word in known)
            adopted.note(
                f"${name}",
                f"read as {said!r}; the condition that changes the value is not carried over",
            )
        elif grammar is CONTAINER and not rest[0].array:
            break  # the image
        else:
            adopted.refuse(rest[0].raw, "only a shell can evaluate these options", edf=True)
        more, rest = split((*known, *rest[1:]), grammar)
        options = (*options, *more)
    return options, rest


def read_command_line(argv: Sequence[str], adopted: Adopted, draft: Draft, folder: Path) -> Program:
    """Read a command line, and return the program. The shell has already expanded all variables in the words.

    Raises RunnerError for an unknown program.
    """
    words = [Word(literal(word), shlex.quote(word)) for word in argv]
    if argv[0].rsplit("/", 1)[-1] == "sbatch":
        return _sbatch(words[1:], adopted, draft, folder)
    if argv[0].startswith(("--container-", "--no-container-", "--environment", "--edf")):
        words.insert(0, Word("srun", "srun"))
    step = _step(Command(tuple(words), 1, shlex.join(argv)), (), words)
    if step is None:
        raise RunnerError(
            f"cannot adopt a command line that starts with {argv[0]!r}",
            "only srun, sbatch, docker run, podman run, or the flags of pyxis (--container-image=…) can be adopted",
            "write it in one of these forms, or put it into a script, which runs unchanged: runner launch PATH",
        )
    adopted.folder = folder
    return _with_ranks(_take(step, Scope(), adopted, draft), adopted, draft)


def _sbatch(words: Sequence[Word], adopted: Adopted, draft: Draft, folder: Path) -> Program:
    """Read `sbatch OPTIONS SCRIPT ARGUMENTS`. The options override those in the script."""
    options, rest = split(words, SBATCH)
    wrapped = [option.value or "" for option in options if option.name == "wrap"]
    options = tuple(option for option in options if option.name != "wrap")
    if wrapped:
        text = f"#!/bin/sh\n{expand(wrapped[-1], {}, '--wrap')}\n"
        return read_script(text, adopted, draft, folder, "--wrap", options=options)
    if not rest:
        raise RunnerError(
            "sbatch has no script", "it would read the script from stdin", "sbatch OPTIONS SCRIPT"
        )
    name, *arguments = (expand(word.text, {}, "an argument") for word in rest)
    try:
        text = (folder / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise RunnerError(
            f"cannot read {name}", why, "check the path; a command line goes after --"
        ) from error
    return read_script(text, adopted, draft, folder, name, options=options, arguments=arguments)
