"""A user's own batch script as the program of a run: `runner launch PATH`, or `batch` in a job file.

sbatch gets the user's file itself, from the user's folder. payload/batch.sh records the attempts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from runner.bash import Word
from runner.environments.environment import Environment
from runner.errors import RunnerError
from runner.expansion import literal
from runner.project import Project
from runner.quoting import literal as quoted
from runner.runs.adopt.options import SBATCH, split
from runner.runs.job import KEYS, Job, Layer, Resources, Setting, time_limit_minutes, time_limit_text, value
from runner.runs.schedulers.slurm_commands import SUBMIT, gpu_request
from runner.site import Origin, Site

SETTINGS = "settings.sh"
KEPT = "script"
"""the folder, in the run folder, of the copy of the script"""
_INHERITS = "BASH_ENV"

# the options of bash with which it still reads BASH_ENV, and prints nothing for it
_OPTIONS = re.compile(r"-[abefhklmruxBCEHPT]+|--login|--noprofile|--norc|")
_BASH = re.compile(r"#! *(?:/\S*/bash|/usr/bin/env(?: +-S)? +bash) *(.*?) *")


class Option(NamedTuple):
    """One option of sbatch, and where it comes from."""

    name: str
    value: str
    origin: str


@dataclass(frozen=True)
class Batch:
    """A batch script, and how it is submitted."""

    word: str
    """the script's path, as sbatch gets it"""
    folder: Path
    """where sbatch runs"""
    text: str
    """the script's bytes, decoded with surrogateescape"""
    options: tuple[Option, ...]
    """the effective options, each with its origin"""
    flags: tuple[str, ...] = ()
    """the flags of sbatch: from the command line and the job file, and what the site adds"""

    @property
    def name(self) -> str:
        return Path(self.word).name

    @property
    def reads_bash_env(self) -> bool:
        """Whether the script's interpreter reads BASH_ENV. Otherwise, sbatch gets a wrapper."""
        found = _BASH.fullmatch(self.text.partition("\n")[0])
        return found is not None and _OPTIONS.fullmatch(found[1]) is not None

    def option(self, name: str) -> str:
        """The value of an option; empty if it is not set."""
        return next((each.value for each in self.options if each.name == name), "")


def read(word: str, project: Project) -> str:
    """The text of the script. Raises RunnerError for a file that sbatch would reject, or that has no #SBATCH line."""
    path = project.start / Path(word).expanduser()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunnerError(f"cannot read {word}", error.strerror or str(error), "check the path") from error
    why, fix = "", ""
    if not data.strip():
        why, fix = "the file is empty", "check the path"
    elif b"\0" in data:
        why, fix = "it contains NUL bytes, so it is a program or another binary file", f"runner launch -- {word}"
    elif not data.startswith(b"#!"):
        why, fix = "its first line is not `#!` with the path of an interpreter", "add the first line: #!/bin/bash"
    elif b"\r\n" in data:
        why, fix = r"its lines end in \r\n, as on Windows", f"sed -i 's/\\r$//' {shlex.quote(word)}"
    if why:
        raise RunnerError(f"sbatch would reject {word}", why, fix)
    text = data.decode(errors="surrogateescape")
    if not any(line.startswith("#SBATCH") for line in _head(text)):
        raise RunnerError(
            f"{word} is not a batch script",
            "it has no #SBATCH line before its first command",
            f"add `#SBATCH` lines; or, to run it in an environment: runner launch --script {word}",
        )
    return text


def _head(text: str) -> Iterator[str]:
    """The lines that sbatch reads: those before the first command."""
    for line in text.split("\n"):
        if line.strip() and not line.lstrip().startswith("#"):
            return
        yield line


def _words(line: str) -> list[Word]:
    with suppress(ValueError):  # a quote that is not closed: sbatch itself reports it
        return [Word(literal(word), word) for word in shlex.split(line, comments=True)]
    return []


def _options(words: Sequence[str], origin: str) -> Iterator[Option]:
    for each in split([Word(literal(word), word) for word in words], SBATCH)[0]:
        yield Option(each.name.replace("_", "-"), each.value or "", origin)


def of_script(text: str, name: str) -> tuple[Option, ...]:
    """The options of the `#SBATCH` lines; for a heterogeneous job, those of its first component."""
    found: list[Option] = []
    for number, line in enumerate(_head(text), 1):
        if line.startswith("#SBATCH"):
            words = _words(line.removeprefix("#SBATCH"))
            if words and words[0].raw in ("hetjob", "packjob"):
                break
            found += _options([word.raw for word in words], f"{name}:{number}")
    return tuple(found)


_OF_VARIABLE = {"ARRAY_INX": "array", "TIMELIMIT": "time", "MEM_PER_NODE": "mem", "CPUS_PER_TASK": "cpus-per-task"}


def of_environ(environ: Mapping[str, str]) -> tuple[Option, ...]:
    """The options in the SBATCH_* variables."""
    found = []
    for name, text in environ.items():
        if name.startswith("SBATCH_"):
            known = name.removeprefix("SBATCH_")
            found.append(Option(_OF_VARIABLE.get(known, known.lower().replace("_", "-")), text, name))
    return tuple(found)


# settings of runner -> the option of sbatch
_FLAGS = {"nodes": "nodes", "tasks_per_node": "ntasks-per-node", "cpus_per_task": "cpus-per-task", "memory": "mem",
          "partition": "partition", "account": "account", "mail_user": "mail-user"}  # fmt: skip


def _flags(layer: Layer, site: Site) -> Iterator[str]:
    """The flags of sbatch for the settings of the command line or of a job file."""
    for name, option in _FLAGS.items():
        if name in layer:
            yield f"--{option}={value(layer, name)}"
    if "gpus_per_node" in layer:
        yield from gpu_request(value(layer, "gpus_per_node"), site)
    if "time_minutes" in layer:
        yield f"--time={time_limit_text(value(layer, 'time_minutes'))}"
    if "mail_events" in layer:
        yield f"--mail-type={','.join(value(layer, 'mail_events')).upper()}"
    yield from value(layer, "sbatch") or ()


# what sbatch would do instead of submitting the job and printing its id, and what to use instead
_REFUSED = {
    "wrap": ("sbatch does not accept a script together with --wrap", "leave out the option"),
    "wait": ("sbatch would return only after the end of the job", "leave out the option, and use runner launch --wait"),
    "test-only": ("sbatch would submit nothing", "leave out the option, and use runner launch --dry-run"),
    "clusters": ("`runner status` and `runner cancel` only use the default cluster",
                 "leave out the option, and launch on a login node of that cluster"),
    "help": ("sbatch would submit nothing", "leave out the option"),
    "usage": ("sbatch would submit nothing", "leave out the option"),
    "version": ("sbatch would submit nothing", "leave out the option"),
}  # fmt: skip


_NO_CONTAINER = "the script itself chooses its containers and starts its programs"


def refuse(given: Layer, job_file: Layer, env: str | None, engine: str | None) -> None:
    """Raise RunnerError for a setting that cannot apply to a batch script."""
    found = [(f"--{name}", "command line") for name, word in (("env", env), ("engine", engine)) if word is not None]
    for layer in (given, job_file):
        found += [(name, str(layer[name].origin)) for name in ("environment", "launcher", "srun") if name in layer]
    for name, origin in found:
        raise RunnerError(f"{origin}: {name} cannot apply to a batch script", _NO_CONTAINER, f"leave out {name}")


def load(word: str, layers: Sequence[Layer], project: Project, environ: Mapping[str, str], site: Site) -> Batch:
    """The script with its options. Raises RunnerError for an option that a run cannot have."""
    text = read(word, project)
    given, job_file = layers
    known = [
        *reversed((*_options([*_flags(given, site)], "command line"),)),  # of the same option, sbatch takes the last
        *reversed((*_options([*_flags(job_file, site)], "job file"),)),
        *of_environ(environ),
        *reversed(of_script(text, word)),
    ]
    flags = (*_flags(job_file, site), *_flags(given, site))
    for name in ("account", "partition"):
        own = getattr(site, name)
        if own and not any(each.name == name for each in known):
            known.append(Option(name, own, str(site.origins.get(name, f"site {site.name}"))))
            flags = (f"--{name}={own}", *flags)
    if "name" in given:
        known.insert(0, Option("job-name", value(given, "name"), "command line"))
        flags = (*flags, f"--job-name={value(given, 'name')}")
    effective: dict[str, Option] = {}
    for each in known:
        effective.setdefault(each.name, each)
    for each in effective.values():
        if each.name in _REFUSED:
            why, fix = _REFUSED[each.name]
            raise RunnerError(f"{each.origin}: cannot launch a script with --{each.name}", why, fix)
    export = effective.get("export")
    if export and export.value.upper() == "NIL":
        raise RunnerError(
            f"{export.origin}: cannot launch a script with --export=NIL",
            "the job would get no variable that tells it its run folder",
            "use --export=NONE",
        )
    if export and not re.match(r"ALL(,|$)", export.value, re.IGNORECASE):
        listed = [] if export.value.upper() == "NONE" else [export.value]
        flags = (*flags, f"--export={','.join((*listed, _INHERITS))}")
    return Batch(word, project.start, text, tuple(effective.values()), flags)


def job_of(batch: Batch, layers: Sequence[Layer], environment: Environment) -> Job:
    """The job. Its resources are what the options say, as far as they are numbers."""
    given, job_file = layers
    layer: dict[str, Setting] = {**job_file, **given}
    name = value(given, "name") or batch.option("job-name") or Path(batch.word).stem
    kept = ("notify", "hang_seconds", "restart", "chain", "mail_user", "mail_events", "env")
    origins = {key: layer[key].origin if key in layer else Origin("default") for key in KEYS}
    job = Job(
        name=re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60] or "job",
        environment=environment,
        batch=batch.word,
        arguments=tuple(value(layer, "arguments") or ()),
        resources=_resources(batch),
        sbatch=batch.flags,
        hang_seconds=0,
        save_seconds=0,
        origins=origins,
    )
    return replace(job, **{key: layer[key].value for key in kept if key in layer})


def _resources(batch: Batch) -> Resources:
    def number(name: str) -> int:
        found = re.search(r"(\d+)\D*$", batch.option(name).partition("-")[0])
        return int(found[1]) if found else 0

    nodes = max(1, number("nodes"))
    tasks = number("ntasks-per-node") or -(-number("ntasks") // nodes) or 1
    gres = re.search(r"\bgpu(?::[^:,]+)?:(\d+)", batch.option("gres"))
    gpus = number("gpus-per-node") or (int(gres[1]) if gres else 0) or -(-number("gpus") // nodes)
    minutes = None
    with suppress(RunnerError):
        minutes = time_limit_minutes(batch.option("time"), "time")
    return Resources(
        nodes=nodes,
        gpus_per_node=gpus or number("gpus-per-task") * tasks,
        tasks_per_node=1,  # each script starts its processes in its own way
        time_minutes=minutes,
        partition=batch.option("partition") or None,
        account=batch.option("account") or None,
    )


def files(batch: Batch, job: Job, environ: Mapping[str, str], restarts: str) -> dict[str, str]:
    """The files of the run folder that submit the script, and that payload/batch.sh reads."""
    found = {f"{KEPT}/{batch.name}": batch.text, SUBMIT: _submit(batch, job)}
    values = {
        "gpus": str(job.gpus),
        "hang_seconds": str(job.hang_seconds),
        "export_env": batch.option("export"),
        "bash_env": environ.get("BASH_ENV", ""),
        "restart_words": restarts,
    }
    if not batch.reads_bash_env:
        head = [line for line in _head(batch.text) if not line.startswith("#!")]
        found[f"wrapper/{batch.name}"] = "\n".join(("#!/bin/bash", *head, ""))
        interpreter, _, option = batch.text.partition("\n")[0].removeprefix("#!").strip().partition(" ")
        values |= {"interpreter": interpreter, "interpreter_option": option.strip(), "script_name": batch.name}
    found[SETTINGS] = "".join(f"{name}={quoted(text)}\n" for name, text in values.items() if text)
    return found


def _submit(batch: Batch, job: Job) -> str:
    """The script that submits the user's script; it has no absolute run path."""
    name = quoted(batch.name)
    exports = "".join(f"export {key}={quoted(text)}\n" for key, text in job.env.items())
    path = f'"$run"/{KEPT}/{name}'
    if batch.reads_bash_env:
        choice = f'script={quoted(batch.word)}\ncmp -s "$script" {path} || script={path} # it has changed since\n'
    else:
        choice = f'script="$run"/wrapper/{name} # the interpreter of the script does not read BASH_ENV\n'
    words = " ".join(map(quoted, job.arguments))
    flags = " ".join(map(quoted, ("--parsable", *batch.flags)))
    return (
        "#!/bin/bash\n# Submits the script as an attempt of this run: bash RUN/submit.sh [FLAGS of sbatch]\n"
        'run=$(cd -P "${BASH_SOURCE[0]%/*}" && pwd) || exit\n'
        f"[ . -ef {quoted(str(batch.folder))} ] || cd {quoted(str(batch.folder))} || exit\n"
        f'{choice}{exports}export {_INHERITS}="$run"/payload/batch.sh\n'
        f'exec sbatch {flags} "$@" "$script"{" " + words if words else ""}\n'
    )


def command(batch: Batch, job: Job) -> str:
    """The sbatch command, for the user."""
    return shlex.join(("sbatch", *batch.flags, batch.word, *job.arguments))
