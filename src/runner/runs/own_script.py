"""A user's own batch script as the program of a run: `runner launch PATH`, or `batch` in a job file.

sbatch gets the user's file itself, from the user's folder. payload/batch.sh records the attempts.
"""

from __future__ import annotations

import os
import re
import shlex
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.bash import here_document_lines
from runner.environments.environment import Environment
from runner.errors import RunnerError
from runner.project import Project
from runner.quoting import literal as quoted
from runner.runs.job import KEYS, Job, Layer, Resources, Restart, Setting, time_limit_minutes, value
from runner.runs.resolve import setting_of
from runner.runs.schedulers.flags import REFUSED
from runner.runs.schedulers.options import SBATCH, split
from runner.runs.schedulers.slurm_commands import SUBMIT, WITHHELD, gpu_request, time_limit_text
from runner.runs.schedulers.template import restart_words
from runner.site import Origin, Site

_BASH = re.compile(r"#! *(?:/\S*/bash|/usr/bin/env(?: +-S)? +bash) *(.*?) *")
# the options of bash with which it still reads BASH_ENV, and prints nothing for it
_OPTIONS = re.compile(r"-[abefhklmruxBCEHPT]+|--login|--noprofile|--norc|")


@dataclass(frozen=True)
class Batch:
    """A batch script, and how it is submitted."""

    word: str
    """the script's path, as sbatch gets it"""
    folder: Path
    """where sbatch runs"""
    text: str
    """the script's bytes, decoded with surrogateescape"""
    options: Layer
    """the effective options of sbatch: long name -> value and origin; of a heterogeneous job: of its first component"""
    others: tuple[Layer, ...] = ()
    """the options of the other components of a heterogeneous job"""
    flags: tuple[str, ...] = ()
    """the flags of sbatch: from the command line and the job file, and what the site adds"""
    in_snapshot: str | None = None
    """with --from-snapshot: the folder in RUN/code where sbatch runs; `word` is relative to it then"""

    @property
    def name(self) -> str:
        return Path(self.word).name

    @property
    def kept(self) -> str:
        """The copy of the script, relative to the run folder."""
        return f"script/{self.name}"

    @property
    def in_container(self) -> bool:
        """Whether the script itself runs in a container, and not only its steps."""
        return not {"container", "container-image", "environment"}.isdisjoint(self.options)

    @property
    def reads_bash_env(self) -> bool:
        """Whether the script's interpreter reads BASH_ENV. Otherwise, sbatch gets a wrapper."""
        found = _BASH.fullmatch(self.text.partition("\n")[0])
        return self.in_container or (found is not None and _OPTIONS.fullmatch(found[1]) is not None)

    def option(self, name: str) -> str:
        """The value of an option; empty if it is not set."""
        return str(value(self.options, name) or "")

    @property
    def path(self) -> Path:
        """The script."""
        return self.folder / Path(self.word).expanduser()

    @property
    def exports_all(self) -> bool:
        """Whether the job gets all variables, and not only those that --export names."""
        return (
            not self.option("export")
            or re.match(r"ALL(,|$)", self.option("export"), re.IGNORECASE) is not None
        )

    @property
    def array_tasks(self) -> tuple[int, ...]:
        """The task numbers of an array (`1-10:3,15%2`); empty for a single job."""
        found: list[int] = []
        for part in self.option("array").partition("%")[0].split(","):
            if each := re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part.strip()):
                found += range(int(each[1]), int(each[2] or each[1]) + 1, int(each[3] or 1))
        return tuple(dict.fromkeys(found))


def read(word: str, path: Path) -> str:
    """The text of the script. Raises RunnerError for a file that sbatch would reject, or a Python script that does not
    look like a batch script."""
    try:
        data = path.read_bytes()
    except OSError as error:
        fix = "check the path, and the permissions of the file and its folders"
        raise RunnerError(f"cannot read {word}", error.strerror or str(error), fix) from error
    name = shlex.quote(word)
    program = name if "/" in word else f"./{name}"
    line = data.partition(b"\r\n")[0].count(b"\n") + 1
    refusals = (
        (not data.strip(), "the file is empty", "check the path"),
        (
            b"\0" in data,
            "it contains NUL bytes, so it is not a script",
            f"if it is a program: runner launch -- {program}",
        ),
        (
            data[:3] == BOM_UTF8,
            "it begins with a byte order mark (BOM)",
            f"sed -i '1s/^\\xef\\xbb\\xbf//' {name}",
        ),
        (
            data[:2] != b"#!",
            "its first line is not `#!` with an interpreter",
            "add the line: #!/bin/bash",
        ),
        (b"\r\n" in data, rf"line {line} ends in \r\n, as on Windows", f"sed -i 's/\\r$//' {name}"),
    )
    for is_so, why, fix in refusals:
        if is_so:
            raise RunnerError(f"sbatch would reject {word}", why, fix)
    text = data.decode(errors="surrogateescape")
    if path.suffix == ".py" and not re.search("^#SBATCH", text, re.MULTILINE):
        fix = f"add `#SBATCH` lines; or, to run it in an environment: runner launch --script {word}"
        raise RunnerError(
            f"{word} is not a batch script", "it is a Python script without #SBATCH lines", fix
        )
    return text


def _head(text: str) -> Iterator[str]:
    """The lines that sbatch reads: those before the first command."""
    for line in text.split("\n"):
        if line.strip() and not line.lstrip().startswith("#"):
            return
        yield line


def _options(words: Sequence[str], origin: Origin) -> dict[str, Setting]:
    """The options in words of sbatch; of the same option, sbatch takes the last."""
    found = split(words, SBATCH)[0]
    return {each.name.replace("_", "-"): Setting(each.value or "", origin) for each in found}


def of_script(text: str, name: str) -> list[dict[str, Setting]]:
    """The options of the `#SBATCH` lines, for each component of a heterogeneous job."""
    found: list[dict[str, Setting]] = [{}]
    for number, line in enumerate(_head(text), 1):
        if line.startswith("#SBATCH"):
            with suppress(ValueError):  # a quote that is not closed: sbatch itself reports it
                words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
                if words[:1] in (["hetjob"], ["packjob"]):
                    found.append({})
                else:
                    found[-1] |= _options(words, Origin(f"{name}:{number}"))
    return found


_OF_VARIABLE = {
    "ARRAY_INX": "array",
    "TIMELIMIT": "time",
    "MEM_PER_NODE": "mem",
    "REQ_SWITCH": "switches",
    "SEGMENT_SIZE": "segment",
}


def _of_environ(environ: Mapping[str, str]) -> dict[str, Setting]:
    """The options in the SBATCH_* variables."""
    names = {name: name.removeprefix("SBATCH_") for name in environ if name.startswith("SBATCH_")}
    return {
        _OF_VARIABLE.get(known, known.lower().replace("_", "-")): Setting(
            environ[name], Origin(name)
        )
        for name, known in names.items()
    }


FLAGS = {
    "nodes": "nodes",
    "tasks_per_node": "ntasks-per-node",
    "cpus_per_task": "cpus-per-task",
    "memory": "mem",
    "partition": "partition",
    "account": "account",
    "mail_user": "mail-user",
    "switches": "switches",
    "segment": "segment",
}
"""settings of runner -> the option of sbatch"""


def _flags(layer: Layer, site: Site) -> tuple[str, ...]:
    """The flags of sbatch for the settings of the command line or of a job file."""
    minutes, events = value(layer, "time_minutes"), value(layer, "mail_events")
    return (
        *(f"--{option}={value(layer, name)}" for name, option in FLAGS.items() if name in layer),
        *gpu_request(value(layer, "gpus_per_node") or 0, site),
        *((f"--time={time_limit_text(minutes)}",) if minutes else ()),
        *((f"--mail-type={','.join(events).upper()}",) if events else ()),
        *(value(layer, "sbatch") or ()),
    )


# options of sbatch and settings of runner that cannot apply: why, and what to use instead
_REFUSED_OPTIONS = {
    name: REFUSED["sbatch"][name] for name in ("wrap", "wait", "test-only", "clusters")
}
_REFUSED_SETTINGS = {
    **dict.fromkeys(
        ("environment", "engine"), ("the script itself chooses its containers", "leave it out")
    ),
    **dict.fromkeys(
        ("launcher", "srun"), ("the script itself starts its programs", "leave it out")
    ),
    **dict.fromkeys(
        ("spare_nodes", "min_nodes"),
        ("the script itself chooses the nodes of its programs", "leave it out"),
    ),
    "save_every": (
        "the script itself starts the training",
        "set how often to save in the arguments of the training",
    ),
}
_SHORT_NAMES = {"environment": "env", "spare_nodes": "spare"}
_UNUSED_SETTINGS = (
    "setup",
    "task_prolog",
    "task_epilog",
    "preflight",
    "save_seconds",
    "save_signal",
)


def load(
    word: str, layers: Sequence[Layer], project: Project, environ: Mapping[str, str], site: Site
) -> Batch:
    """The script with its options. Raises RunnerError for an option or a setting that a run cannot have."""
    text = read(word, project.start / Path(word).expanduser())
    given, job_file = layers
    own, file = _flags(given, site), _flags(job_file, site)
    if "name" in given:
        own = (f"--job-name={value(given, 'name')}", *own)
    first, *others = of_script(text, word)
    options = first | _of_environ(environ)
    options |= _options(file, job_file["batch"].origin) | _options(own, Origin("command line"))
    added: list[str] = []
    for name in ("account", "partition"):
        if getattr(site, name) and name not in options:
            added.append(f"--{name}={getattr(site, name)}")
            options |= _options(added[-1:], site.origins.get(name, Origin(f"site {site.name}")))
    if restart_of(layers) and site.restart_by == "requeue" and "no-requeue" not in options:
        # without append, a requeue empties the output file
        flags = ["--requeue", *(() if "open-mode" in options else ("--open-mode=append",))]
        added += flags
        options |= _options(flags, Origin("[restart]"))
    for refused, some in ((_REFUSED_OPTIONS, (options,)), (_REFUSED_SETTINGS, layers)):
        for name, layer in ((name, layer) for name in refused for layer in some if name in layer):
            flag = name if layer is job_file else f"--{_SHORT_NAMES.get(name, name)}"
            what = f"{layer[name].origin}: {flag} cannot apply to a batch script"
            raise RunnerError(what, *refused[name])
    if str(value(options, "export")).upper() == "NIL":
        what = f"{options['export'].origin}: --export=NIL cannot apply to a batch script"
        why = "runner must pass the job a variable that names the run folder, which --export=NIL forbids"
        raise RunnerError(what, why, "use --export=NONE, to which runner adds its own variables")
    return Batch(word, project.start, text, options, tuple(others), (*added, *file, *own))


def in_snapshot(batch: Batch, main: Path | None, files: Collection[str]) -> tuple[Batch, str]:
    """(the script, submitted from the same folder of the snapshot of `main`; its name in the snapshot)."""
    path, root = batch.path.resolve(), (main or Path()).resolve()
    why = (
        ""
        if main and path.is_relative_to(root)
        else f"it is not in {main or 'a project or a git repository'}"
    )
    if not why and path.relative_to(root).as_posix() not in files:
        why = "the snapshot does not contain the script: git ignores it, or it is not in a folder for code"
    if why:
        raise RunnerError(
            f"cannot run {batch.word} from a snapshot", why, "leave out --from-snapshot"
        )
    folder = batch.folder.resolve() if batch.folder.resolve().is_relative_to(root) else root
    word = os.path.relpath(path, folder)
    inside = replace(
        batch, word=word if "/" in word else f"./{word}", in_snapshot=str(folder.relative_to(root))
    )
    return inside, path.relative_to(root).as_posix()


def restart_of(layers: Sequence[Layer]) -> Restart | None:
    """The restart policy that the user requested; a chain has one by itself."""
    chain = setting_of("chain", layers).value
    return setting_of("restart", layers).value or (Restart(time_limit=chain - 1) if chain else None)


def job_of(batch: Batch, layers: Sequence[Layer], environment: Environment) -> Job:
    """The job. Its resources are what the options say, as far as they are numbers."""
    layer = {**layers[1], **layers[0]}
    name = value(layer, "name") or batch.option("job-name") or Path(batch.word).stem
    found = {key: setting_of(key, layers) for key in KEYS}
    used: dict[str, Any] = {
        key: found[key].value for key in ("arguments", "env", "notify", "chain", "trainer")
    }
    return Job(
        name=re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60] or "job",
        environment=environment,
        batch=batch.word,
        resources=_resources(batch),
        other_gpus=sum(each.nodes * each.gpus_per_node for each in map(_requested, batch.others)),
        sbatch=batch.flags,
        save_seconds=0,
        hang_seconds=value(layer, "hang_seconds") or 0,
        restart=restart_of(layers),
        origins={key: setting.origin for key, setting in found.items()},
        **used,
    )


def _resources(batch: Batch) -> Resources:
    """What the job requests, as far as it is known. Its time is that of the longest component."""
    found = _requested(batch.options)
    times = [found.time_minutes, *(_requested(other).time_minutes for other in batch.others)]
    known = [minutes for minutes in times if minutes]
    return replace(found, time_minutes=max(known) if len(known) == len(times) else None)


def _requested(options: Layer) -> Resources:
    """What the options request, as far as they are numbers. Of a range of nodes, the largest number."""

    def text(name: str) -> str:
        return str(value(options, name) or "")

    def number(name: str) -> int:
        found = re.search(r"(\d+)\D*$", text(name))
        return int(found[1]) if found else 0

    nodes = max(1, number("nodes"))
    gres = _gpus_of_gres(text("gres"))
    tasks = number("ntasks-per-node") or -(-number("ntasks") // nodes) or 1
    gpus = number("gpus-per-node") or gres or -(-number("gpus") // nodes)
    found = Resources(
        nodes, gpus or number("gpus-per-task") * tasks, account=text("account") or None
    )
    with suppress(RunnerError):
        return replace(found, time_minutes=time_limit_minutes(text("time"), "time"))
    return found


def _gpus_of_gres(gres: str) -> int:
    """The GPUs in `--gres`: `gpu` and `gpu:a100` are one, `gpu:4` and `gpu:a100:4` four. Source: sbatch(1) 25.11."""
    found = (
        re.fullmatch(r"(?:gres[:/])?gpu(?::[^:\d][^:]*)?(?::(\d+))?", part.strip())
        for part in gres.split(",")
    )
    return sum(int(each[1] or 1) for each in found if each)


def files(batch: Batch, job: Job, environ: Mapping[str, str], site: Site) -> dict[str, str]:
    """The files of the run folder that submit the script, and that payload/batch.sh reads."""
    found = {batch.kept: batch.text, SUBMIT: submission(batch, job)}
    # whether Slurm exports the user's own BASH_ENV, or takes it from a login shell on the node
    exported = batch.exports_all or "BASH_ENV" in batch.option("export").split(",")
    withheld = [f"{name}={environ[name]}" for name in _withheld(batch, environ)]
    by_submission = replace(site, restart_by="submit") if "no-requeue" in batch.options else site
    exclude = batch.option("exclude")
    restarted = replace(job, sbatch=(f"--exclude={exclude}",) if exclude else ())
    values = {
        "gpus": str(job.gpus),
        "hang_seconds": str(job.hang_seconds),
        "export_env": batch.option("export"),
        "bash_env": environ.get("BASH_ENV", "") if exported else "",
        "bash_env_of_login": "" if exported else "yes",
        "is_array": "yes" if batch.array_tasks else "",
        "restart_words": restart_words(restarted, by_submission),
    }
    if not batch.reads_bash_env:
        first, *head = _head(batch.text)
        found[f"wrapper/{batch.name}"] = "\n".join(("#!/bin/bash", *head, ""))
        interpreter, _, option = first.removeprefix("#!").strip().partition(" ")
        values |= {
            "interpreter": interpreter,
            "interpreter_option": option.strip(),
            "kept": batch.kept,
        }
    lines = [f"{name}={quoted(text)}\n" for name, text in values.items() if text]
    lines += [f"withheld=({' '.join(map(quoted, withheld))})\n"] if withheld else []
    return {**found, "settings.sh": "".join(lines)}


def _withheld(batch: Batch, environ: Mapping[str, str]) -> list[str]:
    """The variables that sbatch must not see. payload/batch.sh sets them again for the script."""
    listed = batch.option("export").split(",")
    return [name for name in WITHHELD if name in environ and (batch.exports_all or name in listed)]


def _words(batch: Batch, job: Job) -> tuple[str, ...]:
    """The flags of sbatch. Without ALL in --export, the variables that we add must be named."""
    if batch.exports_all:
        return batch.flags
    listed = [] if batch.option("export").upper() == "NONE" else [batch.option("export")]
    return (*batch.flags, f"--export={','.join((*listed, *job.env, 'BASH_ENV'))}")


def command(batch: Batch, job: Job, *more: str) -> tuple[str, ...]:
    """The sbatch command as the user would type it, in the script's folder; `more` flags come first."""
    return ("sbatch", *more, *_words(batch, job), batch.word, *job.arguments)


def submission(batch: Batch, job: Job) -> str:
    """The script that submits the user's script; it has no absolute run path."""
    for name in job.env:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            why = "the script gets the value in a variable, and this is not a valid name for a variable"
            raise RunnerError(
                f"cannot set the variable {name!r}",
                why,
                f"rename the variable, or use {{{name}}} in the arguments",
            )
    kept, folder, script = (
        f'"$run"/{quoted(batch.kept)}',
        quoted(str(batch.folder)),
        quoted(batch.word),
    )
    place = [
        f"[ . -ef {folder} ] || builtin cd {folder} || exit",
        f"script={script}",
        f'[ ! -e {kept} ] || command cmp -s "$script" {kept} || script={kept} # it has changed since the launch',
    ]
    if batch.in_snapshot is not None:
        inside = f'"$run"/code/{quoted(batch.in_snapshot)}'  # the snapshot has no empty folders
        place = [f"command mkdir -p {inside} && builtin cd {inside} || exit", f"script={script}"]
    if not batch.reads_bash_env:
        place.append(
            f'script="$run"/wrapper/{quoted(batch.name)} # the interpreter does not read BASH_ENV'
        )
    flags, words = (
        " ".join(map(quoted, some)) for some in (("--parsable", *_words(batch, job)), job.arguments)
    )
    lines = (
        "#!/bin/bash",
        "# Submits the script as an attempt of this run: bash RUN/submit.sh [FLAGS of sbatch]",
        'run=$(CDPATH="" builtin cd -P "$(command dirname "${BASH_SOURCE[0]}")" && builtin pwd) || exit',
        *place,
        *(f"export {name}={quoted(text)}" for name, text in job.env.items()),
        'export BASH_ENV="$run"/payload/batch.sh',
        f'exec sbatch {flags} "$@" "$script" {words}'.rstrip(),
    )
    return "\n".join((*lines, ""))


def notes(batch: Batch, layers: Sequence[Layer]) -> tuple[str, ...]:
    """What the user should know about this script."""
    found = [
        f"{name} does not apply to a batch script"
        for name in _UNUSED_SETTINGS
        if any(name in each for each in layers)
    ]
    head = len(list(_head(batch.text)))
    inside = here_document_lines(batch.text)  # the directives of other scripts
    lines = enumerate(batch.text.split("\n"), 1)
    late = [n for n, line in lines if n > head and n not in inside and line.startswith("#SBATCH")]
    if late:
        found.append(
            f"{batch.word}:{late[0]}: sbatch ignores #SBATCH lines after the first command (line {head + 1})"
        )
    if batch.in_container:
        found.append(
            "the script itself runs in a container, which needs bash and the run folder to record attempts"
        )
    if not batch.reads_bash_env:
        found.append(
            "the interpreter is not bash, so sbatch gets a wrapper: Command= and $0 differ from plain sbatch"
        )
    return tuple(found)
