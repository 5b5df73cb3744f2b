"""A user's own batch script as the program of a run: `runner launch PATH`, or `batch` in a job file.

sbatch gets the user's file itself, from the user's folder. payload/batch.sh records the attempts.
"""

from __future__ import annotations

import os
import re
import shlex
from codecs import BOM_UTF8
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.bash import here_document_lines
from runner.environments.environment import Attachment, Environment
from runner.errors import RunnerError
from runner.machine.report import Report
from runner.project import Project, is_shared_place
from runner.quoting import literal as quoted
from runner.runs import after, payload, snapshot
from runner.runs.checks import check as check_job
from runner.runs.checks import lacks_account, no_account
from runner.runs.git import work_tree
from runner.runs.image import LaunchImage
from runner.runs.job import KEYS, Job, Layer, Restart, Setting, command_line, value
from runner.runs.plan import Request, Row, RunPlan, Trial
from runner.runs.program import Program
from runner.runs.resolve import DEFAULT, setting_of
from runner.runs.schedulers import directives
from runner.runs.schedulers.flags import REFUSED
from runner.runs.schedulers.slurm_commands import SUBMIT, WITHHELD
from runner.runs.schedulers.template import restart_words
from runner.runs.secrets import refuse_in
from runner.runs.snapshot import Snapshot
from runner.site import Origin, Site

_BASH = re.compile(r"#! *(?:/\S*/bash|/usr/bin/env(?: +-S)? +bash) *(.*?) *")
# the options of bash with which it still reads BASH_ENV, and prints nothing for it
_OPTIONS = re.compile(r"-[abefhklmruxBCEHPT]+|--login|--noprofile|--norc|")


@dataclass(frozen=True)
class OwnScript:
    """A user's own batch script, and how it is submitted."""

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
        """The task numbers of an array; empty for a single job."""
        return directives.array_tasks(self.option("array"))


@dataclass(frozen=True, kw_only=True)
class OwnScriptPlan(RunPlan):
    """The plan of a run of a user's own batch script."""

    own: OwnScript

    rows_title = "options and settings"

    @property
    def own_script(self) -> str:
        return str(self.own.folder / self.own.word)

    @property
    def array_tasks(self) -> tuple[int, ...]:
        return self.own.array_tasks

    @property
    def in_snapshot(self) -> bool:
        return self.own.in_snapshot is not None

    @property
    def tried(self) -> bool:
        # a missing account is a note already, and a folder of a snapshot does not exist yet
        return not self.in_snapshot and not lacks_account(self.job, self.site)

    @property
    def words(self) -> tuple[str, ...]:
        return (*super().words, *self.script.split())

    def payload(self) -> Mapping[str, str]:
        return payload.files(own_script=True)

    def by_hand(self, runs: str) -> tuple[str, ...]:
        command = shlex.join(command_of(self.own, self.job))
        inside = self.own.in_snapshot
        folder = self.own.folder if inside is None else f"RUN/code/{inside}"
        return (f"would run: cd {folder} && {command}",)

    def rows(self) -> Iterator[Row]:
        for name, (text, origin) in self.own.options.items():
            yield Row(f"--{name}", text, str(origin))
        job = self.job
        limits = (
            job.restart.words.items() if job.restart and job.origins["restart"] != DEFAULT else ()
        )
        for cause, limit in limits:
            yield Row(f"restart.{cause}", str(limit), str(job.origins["restart"]))
        for name in ("hang_seconds", "chain"):
            if job.origins[name] != DEFAULT:
                yield Row(name, str(getattr(job, name)), str(job.origins[name]))

    def options(self) -> Iterable[str]:
        return self.own.options

    def trial(self) -> Trial:
        return Trial(command_of(self.own, self.job, "--test-only"), self.own.folder)

    def with_values(self, job: Job, values: Mapping[str, str]) -> RunPlan:
        job = replace(job, env={**job.env, **values})
        return replace(self, job=job, files={**self.files, SUBMIT: submission(self.own, job)})

    def array_script(self, name: str, count: int, at_once: int | None) -> str:
        return "# A sweep over a batch script. Each run is a job of its own, which N/submit.sh submits.\n"

    def without_secrets(self, report: Report) -> RunPlan:
        """The plan without copies of files that contain a known secret: the script runs where it is."""
        try:
            refuse_in({self.own.kept: self.own.text})
            snapshot.summed(self.snapshot)
        except RunnerError as error:
            if self.in_snapshot or not self.own.reads_bash_env:  # it runs from a copy
                raise
            report.warn(f"copying neither the code nor the script to the run folder: {error.what}")
            files = {name: text for name, text in self.files.items() if name != self.own.kept}
            return replace(self, snapshot=Snapshot((), None), files=files)
        return self


def plan_of(
    request: Request, job_file: Layer, site: Site, project: Project, environ: Mapping[str, str]
) -> OwnScriptPlan:
    """The plan of a run of the user's own batch script."""
    if site.is_local:
        word = value(job_file, "batch")
        raise RunnerError(
            f"cannot launch {word} on the site {site.name!r}",
            "a batch script needs Slurm",
            f"to run it in an environment: runner launch --script {word}"
            if word.endswith(".py")
            else "choose another --site, or run the script with bash, without runner",
        )
    given = {**request.given, **command_line({"arguments": request.words})}
    chosen = {
        name: word
        for name, word in (("environment", request.env), ("engine", request.engine))
        if word
    }
    given |= {name: Setting(word, Origin("command line")) for name, word in chosen.items()}
    script = load(value(job_file, "batch"), (given, job_file), project, environ, site)
    environment = Environment("batch script", None, "")
    job = job_of(script, (given, job_file), environment)
    check_job(
        replace(job, env={}),
        replace(site, account_required=site.account_required and not request.dry_run),
    )
    notes = (
        *notes_of(script, (given, job_file)),
        *((no_account(site),) if lacks_account(job, site) else ()),
    )
    waits = after.find(request.after, request.after_any, site, environ, project)
    if waits.runs and "dependency" in script.options:
        what = f"{script.options['dependency'].origin}: --after does not work with --dependency"
        raise RunnerError(
            what,
            "--after sets --dependency too",
            "leave out --dependency; or leave out --after, and add the job id of that run to --dependency",
        )
    job = after.with_folder(job, waits)
    main, taken, trouble = _snapshot(script, project, strict=request.from_snapshot)
    if request.from_snapshot:
        script, needed = in_snapshot(script, main, taken.files)
        taken = replace(taken, needed=needed)
        trouble += snapshot.secrets_left_out(
            taken, (main or Path()).resolve(), script.path.resolve().parent
        )
    return OwnScriptPlan(
        site=site,
        environment=environment,
        image=LaunchImage(""),
        engine="host",
        attachment=Attachment(),
        job=job,
        program=Program(None, (), main),
        snapshot=taken,
        script=script.text,
        files=files_of(script, job, environ, site),
        notes=(*notes, *trouble),
        waits=waits,
        own=script,
    )


def _snapshot(
    script: OwnScript, project: Project, *, strict: bool
) -> tuple[Path | None, Snapshot, list[str]]:
    """(the project or git work tree of the script, its snapshot, notes). Without `strict`, errors become notes."""
    tree = work_tree(script.path.absolute().parent)
    main = project.root or (tree if tree is not None and not is_shared_place(tree) else None)
    try:
        return main, snapshot.plan(main), []
    except RunnerError as error:
        if strict:
            raise
        return None, Snapshot((), None), [f"no code snapshot: {error.what}"]


def read(word: str, path: Path) -> str:
    """The text of the script. Raises RunnerError for a file that sbatch would reject, or a Python script that does not
    look like a batch script."""
    try:
        data = path.read_bytes()
    except OSError as error:
        fix = "check the path, and the permissions of the file and its folders"
        raise RunnerError(f"cannot read {word}", error.strerror or str(error), fix) from error
    text = data.decode(errors="surrogateescape")
    if path.suffix == ".py" and not re.search("^#SBATCH", text, re.MULTILINE):
        fix = f"add `#SBATCH` lines; or, to run it in an environment: runner launch --script {word}"
        raise RunnerError(
            f"{word} is not a batch script", "it is a Python script without #SBATCH lines", fix
        )
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
    return text


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
) -> OwnScript:
    """The script with its options. Raises RunnerError for an option or a setting that a run cannot have."""
    text = read(word, project.start / Path(word).expanduser())
    given, job_file = layers
    own, file = (directives.of_settings(layer, site) for layer in layers)
    if "name" in given:
        own = (f"--job-name={value(given, 'name')}", *own)
    first, *others = directives.of_script(text, word)
    options = first | directives.of_environ(environ)
    options |= directives.of_words(file, job_file["batch"].origin) | directives.of_words(
        own, Origin("command line")
    )
    added: list[str] = []
    for name in ("account", "partition"):
        if getattr(site, name) and name not in options:
            added.append(f"--{name}={getattr(site, name)}")
            options |= directives.of_words(
                added[-1:], site.origins.get(name, Origin(f"site {site.name}"))
            )
    if restart_of(layers) and site.restart_by == "requeue" and "no-requeue" not in options:
        # without append, a requeue empties the output file
        flags = ["--requeue", *(() if "open-mode" in options else ("--open-mode=append",))]
        added += flags
        chosen = setting_of("restart", layers)
        origin = (chosen if chosen.value else setting_of("chain", layers)).origin
        options |= directives.of_words(flags, origin)
    for refused, some in ((_REFUSED_OPTIONS, (options,)), (_REFUSED_SETTINGS, layers)):
        for name, layer in ((name, layer) for name in refused for layer in some if name in layer):
            flag = name if layer is job_file else f"--{_SHORT_NAMES.get(name, name)}"
            what = f"{layer[name].origin}: {flag} cannot be used with your own batch script"
            raise RunnerError(what, *refused[name])
    if str(value(options, "export")).upper() == "NIL":
        what = f"{options['export'].origin}: --export=NIL cannot be used with your own batch script"
        why = "runner must pass the job a variable that names the run folder, which --export=NIL forbids"
        raise RunnerError(what, why, "use --export=NONE, to which runner adds its own variables")
    return OwnScript(word, project.start, text, options, tuple(others), (*added, *file, *own))


def in_snapshot(
    script: OwnScript, main: Path | None, files: Collection[str]
) -> tuple[OwnScript, str]:
    """(the script, submitted from the same folder of the snapshot of `main`; its name in the snapshot)."""
    path, root = script.path.resolve(), (main or Path()).resolve()
    why = (
        ""
        if main and path.is_relative_to(root)
        else f"it is not in {main or 'a project or a git repository'}"
    )
    if not why and path.relative_to(root).as_posix() not in files:
        why = "the snapshot leaves it out: git ignores it, it is large, or it is in an untracked folder such as data/"
    if why:
        raise RunnerError(
            f"cannot run {script.word} from a snapshot", why, "leave out --from-snapshot"
        )
    folder = script.folder.resolve() if script.folder.resolve().is_relative_to(root) else root
    word = os.path.relpath(path, folder)
    inside = replace(
        script, word=word if "/" in word else f"./{word}", in_snapshot=str(folder.relative_to(root))
    )
    return inside, path.relative_to(root).as_posix()


def restart_of(layers: Sequence[Layer]) -> Restart | None:
    """The restart policy that the user requested; a chain has one by itself."""
    chain = setting_of("chain", layers).value
    return setting_of("restart", layers).value or (Restart(time_limit=chain - 1) if chain else None)


def job_of(script: OwnScript, layers: Sequence[Layer], environment: Environment) -> Job:
    """The job. Its resources are what the options say, as far as they are numbers."""
    layer = {**layers[1], **layers[0]}
    name = value(layer, "name") or script.option("job-name") or Path(script.word).stem
    found = {key: setting_of(key, layers) for key in KEYS}
    used: dict[str, Any] = {
        key: found[key].value for key in ("arguments", "env", "notify", "chain", "trainer")
    }
    return Job(
        name=re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60] or "job",
        environment=environment,
        batch=script.word,
        resources=directives.resources(script.options, script.others),
        other_gpus=sum(
            each.nodes * each.gpus_per_node for each in map(directives.requested, script.others)
        ),
        sbatch=script.flags,
        save_seconds=0,
        hang_seconds=value(layer, "hang_seconds") or 0,
        restart=restart_of(layers),
        origins={key: setting.origin for key, setting in found.items()},
        **used,
    )


def files_of(script: OwnScript, job: Job, environ: Mapping[str, str], site: Site) -> dict[str, str]:
    """The files of the run folder that submit the script, and that payload/batch.sh reads."""
    found = {script.kept: script.text, SUBMIT: submission(script, job)}
    # whether Slurm exports the user's own BASH_ENV, or takes it from a login shell on the node
    exported = script.exports_all or "BASH_ENV" in script.option("export").split(",")
    withheld = [f"{name}={environ[name]}" for name in _withheld(script, environ)]
    by_submission = replace(site, restart_by="submit") if "no-requeue" in script.options else site
    exclude = script.option("exclude")
    restarted = replace(job, sbatch=(f"--exclude={exclude}",) if exclude else ())
    values = {
        "gpus": str(job.gpus),
        "hang_seconds": str(job.hang_seconds),
        "export_env": script.option("export"),
        "bash_env": environ.get("BASH_ENV", "") if exported else "",
        "bash_env_of_login": "" if exported else "yes",
        "is_array": "yes" if script.array_tasks else "",
        "restart_words": restart_words(restarted, by_submission),
    }
    if not script.reads_bash_env:
        first, *head = directives.head(script.text)
        found[f"wrapper/{script.name}"] = "\n".join(("#!/bin/bash", *head, ""))
        interpreter, _, option = first.removeprefix("#!").strip().partition(" ")
        values |= {
            "interpreter": interpreter,
            "interpreter_option": option.strip(),
            "kept": script.kept,
        }
    lines = [f"{name}={quoted(text)}\n" for name, text in values.items() if text]
    lines += [f"withheld=({' '.join(map(quoted, withheld))})\n"] if withheld else []
    return {**found, "settings.sh": "".join(lines)}


def _withheld(script: OwnScript, environ: Mapping[str, str]) -> list[str]:
    """The variables that sbatch must not see. payload/batch.sh sets them again for the script."""
    listed = script.option("export").split(",")
    return [name for name in WITHHELD if name in environ and (script.exports_all or name in listed)]


def _words(script: OwnScript, job: Job) -> tuple[str, ...]:
    """The flags of sbatch. Without ALL in --export, the variables that we add must be named."""
    if script.exports_all:
        return script.flags
    listed = [] if script.option("export").upper() == "NONE" else [script.option("export")]
    return (*script.flags, f"--export={','.join((*listed, *job.env, 'BASH_ENV'))}")


def command_of(script: OwnScript, job: Job, *more: str) -> tuple[str, ...]:
    """The sbatch command as the user would type it, in the script's folder; `more` flags come first."""
    return ("sbatch", *more, *_words(script, job), script.word, *job.arguments)


def submission(script: OwnScript, job: Job) -> str:
    """The script that submits the user's script; it has no absolute run path."""
    for name in job.env:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            why = "the script gets the value in a variable, and this is not a valid name for a variable"
            raise RunnerError(
                f"cannot set the variable {name!r}",
                why,
                f"rename it; in a sweep, you can also use {{{name}}} in the arguments",
            )
    kept, folder = f'"$run"/{quoted(script.kept)}', quoted(str(script.folder))
    place = [
        f"[ . -ef {folder} ] || builtin cd {folder} || exit",
        f"script={quoted(script.word)}",
        f'[ ! -e {kept} ] || command cmp -s "$script" {kept} || script={kept} # it has changed since the launch',
    ]
    if script.in_snapshot is not None:
        inside = f'"$run"/code/{quoted(script.in_snapshot)}'  # the snapshot has no empty folders
        place = [
            f"command mkdir -p {inside} && builtin cd {inside} || exit",
            f"script={quoted(script.word)}",
        ]
    if not script.reads_bash_env:
        place.append(
            f'script="$run"/wrapper/{quoted(script.name)} # the interpreter does not read BASH_ENV'
        )
    flags, words = (
        " ".join(map(quoted, some))
        for some in (("--parsable", *_words(script, job)), job.arguments)
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


def notes_of(script: OwnScript, layers: Sequence[Layer]) -> tuple[str, ...]:
    """What the user should know about this script."""
    found = [
        f"{name} does not apply to a batch script"
        for name in _UNUSED_SETTINGS
        if any(name in each for each in layers)
    ]
    head = len(list(directives.head(script.text)))
    inside = here_document_lines(script.text)  # the directives of other scripts
    lines = enumerate(script.text.split("\n"), 1)
    late = [n for n, line in lines if n > head and n not in inside and line.startswith("#SBATCH")]
    if late:
        found.append(
            f"{script.word}:{late[0]}: sbatch ignores #SBATCH lines after the first command (line {head + 1})"
        )
    if script.in_container:
        found.append(
            "the script itself runs in a container: to record attempts, runner needs bash and the run folder in it"
        )
    if not script.reads_bash_env:
        found.append(
            "the script's first line does not start a bash that reads BASH_ENV, so sbatch gets a wrapper: "
            "`scontrol show job` shows it as Command, and $0 is the copy in the run folder"
        )
    return tuple(found)
