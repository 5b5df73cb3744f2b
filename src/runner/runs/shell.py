"""A prompt, or one command, in the environment of a job's tasks: same image, same mounts, same variables.

For an environment, the shell runs on its own node, in the user's current folder. For a run, it runs in the run's code
snapshot, and inside the run's allocation while the run is active.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from runner.detection import find_site
from runner.environments.edf import Mount
from runner.environments.engines import attach, choose, engine_of
from runner.environments.environment import Attachment, Environment, emit_edf, load_environment
from runner.errors import RunnerError
from runner.expansion import expand
from runner.images.sarus_store import need_sarusctl
from runner.machine import folders, process
from runner.machine.report import Quiet, Report
from runner.project import Project, is_shared_place
from runner.runs.checks import check_mounts
from runner.runs.hub import shared_cache
from runner.runs.image import check_architecture, find_image, missing_image, run_environment
from runner.runs.job import Layer, command_line
from runner.runs.launch import MakeImage, find_environment
from runner.runs.plan import EDF
from runner.runs.resolve import resolve
from runner.runs.run import RECORD, Run, find_run
from runner.runs.schedulers import slurm_commands
from runner.runs.secrets import refuse_in
from runner.runs.status import ask, goes_on
from runner.site import LOCAL, Site
from runner.site_files import load_site

FOLDER = "{RUNNER_RUN}"
"""the placeholder, in the command, for the shell's own folder, which has the same path inside and outside"""


@dataclass(frozen=True)
class ShellRequest:
    """What the user requested."""

    where: str | None
    """an environment or a run; None: the default environment"""
    command: tuple[str, ...] = ()
    """empty: a prompt"""
    site: str | None = None
    engine: str | None = None
    given: Layer = field(default_factory=dict)
    """the resources and flags from the command line"""
    terminal: bool = False
    """whether stdin and stdout are a terminal"""
    without_scheduler: bool = False
    """run on this machine, even if the site has a scheduler"""
    files: Mapping[str, str] = field(default_factory=dict)
    """files to write into the folder of the shell, which the command knows as FOLDER"""


@dataclass(frozen=True)
class Call:
    """A program to run on this terminal."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """added to our environment"""
    cwd: Path

    @property
    def text(self) -> str:
        """The call as a line of bash."""
        values = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.env.items())
        return f"cd {shlex.quote(str(self.cwd))} && {values} {shlex.join(self.argv)}"


@dataclass(frozen=True)
class _Place:
    """Where the shell opens."""

    site: Site
    environment: Environment
    folder: Path
    """the value of RUNNER_RUN"""
    job_id: str = ""
    """the running job whose allocation is used; empty: none"""
    run: Run | None = None


@contextmanager
def prepared(
    request: ShellRequest,
    project: Project,
    environ: Mapping[str, str],
    report: Report,
    *,
    dry_run: bool = False,
    make_image: MakeImage | None = None,
) -> Iterator[Call]:
    """The call that opens the shell. The files that it needs exist only inside the `with` block."""
    site, why = find_site(request.site, environ)
    if request.without_scheduler:
        site = replace(site, scheduler=LOCAL)
    run = named_run(request.where, site.runs(environ, project), project)
    if run is not None and request.without_scheduler:
        why = "a run's shell opens where the run's job is, or in a new allocation"
        raise RunnerError(
            f"--here cannot open {run.name}",
            why,
            "leave out --here, or name an environment",
            exit_code=2,
        )
    if run is not None:
        yield _call(
            _place_of_run(run, request.engine, environ, report),
            request,
            environ,
            report,
            write=not dry_run,
        )
        return
    report.detail(f"site {site.name} ({why})")
    environment = find_environment(request.where, project, environ, site, report)
    request = replace(request, engine=request.engine or choose(site)[0])
    engine = request.engine or ""
    facts = engine_of(engine)
    if request.without_scheduler and facts.srun_option and not facts.run_edf:
        why = f"the engine {engine} is an option of srun, so it works only in an allocation"
        raise RunnerError(
            "cannot open a container on this machine", why, "leave out --here", exit_code=2
        )
    image = find_image(environment, site, environ, engine, strict=not dry_run)
    if image.missing and make_image is not None and not dry_run:
        make_image(environment, image, site)
        image = find_image(environment, site, environ, engine)
    if image.missing and not dry_run:
        raise missing_image(image, environment, environ)
    say = (
        report.detail if request.files else report.say
    )  # with `files`, `prefetch` has already printed it
    say(f"environment {environment.name}, site {site.name}")
    about_mounts = say if facts.uses_container else Quiet().say
    environment = run_environment(in_live_folder(environment, project, about_mounts), image)
    runs = site.runs(environ, project)
    if dry_run:
        folder = runs / ".shell-NNNN"
        yield _call(_Place(site, environment, folder), request, environ, report, write=False)
        return
    check_architecture(image, site)
    for note in check_mounts(environment, environ, here=site.is_local):
        report.warn(note)
    folder = folders.take_numbered(runs, ".shell")
    try:
        yield _call(_Place(site, environment, folder), request, environ, report, write=True)
    finally:
        folders.remove(folder)


def named_run(word: str | None, runs: Path, project: Project) -> Run | None:
    """The run that a word names; None if it names an environment."""
    if word is None:
        return None
    named = word == "last" or word.isdigit() or word.startswith("local-")
    # an environment may have a name like a run's: NAME-2026
    named = named or (
        bool(re.fullmatch(r"[A-Za-z0-9._-]+-\d{4}", word)) and word not in project.names("edf")
    )
    if (
        named
        or (runs / word / RECORD).is_file()
        or ("/" in word and (Path(word).expanduser() / RECORD).is_file())
    ):
        return find_run(word, runs)
    return None


def in_live_folder(
    environment: Environment, project: Project, say: Callable[[str], None]
) -> Environment:
    """The environment with the user's project folder mounted at the same path, and as working directory."""
    root = project.root or project.start
    if is_shared_place(root):
        say(
            f"{root} is not mounted, because it is your home folder, a temporary folder or the root folder: "
            "the working directory is that of the EDF, or else of the image"
        )
        return environment
    say(f"your folder {root} is mounted; your changes to its files are kept")
    return replace(
        environment,
        workdir=str(project.start),
        mounts=(*environment.mounts, Mount(str(root), str(root))),
    )


def _place_of_run(
    run: Run, engine: str | None, environ: Mapping[str, str], report: Report
) -> _Place:
    """The place for a run: its emitted EDF, its snapshot, and its allocation while it runs.

    `engine`: the one that the user requested; None: the run's.
    """
    edf = run.folder / EDF
    if not edf.is_file():
        raise RunnerError(
            f"cannot open a shell in {run.name}",
            f"{edf} no longer exists",
            "use an environment: runner shell ENV",
        )
    alone = Project(None, run.folder, run.folder)
    environment = replace(load_environment(str(edf), alone, environ), name=run.environment)
    status = ask([run])[0]
    if status.state == "UNKNOWN" and goes_on(status):
        why = f"runner cannot tell whether the run is still running: {status.reason}"
        raise RunnerError(f"cannot open a shell in {run.name}", why, "run the same command again")
    inside = not run.is_local and status.state == "RUNNING"
    name = engine or run.engine
    contained = not name or engine_of(name).uses_container
    if inside and contained:
        report.say(
            f"{run.name} is running on {status.nodes}: "
            "opening a new container from the same image inside its allocation"
        )
    elif inside:
        report.say(
            f"{run.name} is running on {status.nodes}: "
            "opening a shell inside its allocation, outside any container"
        )
    elif not run.is_local and status.active:
        report.say(
            f"{run.name} is not running ({status.state}): requesting a separate allocation for this shell"
        )
    elif not run.is_local:
        what = "new container from the same image" if contained else "shell outside any container"
        report.say(f"{run.name} is {status.state}: requesting an allocation for a {what}")
    elif not contained:
        report.say(
            f"opening a shell in the code snapshot of {run.name}, on this machine, outside any container"
        )
    else:
        report.say(
            f"opening a new container from the image of {run.name}, in the run's code snapshot"
        )
    return _Place(
        load_site(run.site), environment, run.folder, status.job_id if inside else "", run
    )


def _call(
    place: _Place, request: ShellRequest, environ: Mapping[str, str], report: Report, *, write: bool
) -> Call:
    """The program call for a place. With `write`, also write the engine's files into its folder."""
    engine = request.engine or (place.run.engine if place.run else "") or choose(place.site)[0]
    attachment = attach(place.environment, place.site, engine)
    for note in attachment.notes:
        report.warn(note)
    files = {EDF: emit_edf(place.environment), **attachment.files, **request.files}
    if write:
        refuse_in(files)
        # in a run folder, write only files that do not exist yet
        folders.fill(
            place.folder,
            {name: text for name, text in files.items() if not (place.folder / name).exists()},
        )
    words = tuple(word.replace(FOLDER, str(place.folder)) for word in request.command)
    name = place.run.name if place.run else place.environment.name
    command = (*_like_a_task(place), *(words or prompt(request.terminal, name)))
    cache = shared_cache(place.folder, environ)
    if write:
        folders.make(cache)
    own = {"RUNNER_RUN": str(place.folder), "RUNNER_CACHE": str(cache)}
    if place.environment.image:
        own["PYTHONNOUSERSITE"] = "1"
    variables = {**environ, **own}
    for name, value in attachment.exports.items():
        own[name] = variables[name] = expand(value, variables, name)
    prefix = tuple(expand(word, variables, "a word of the engine") for word in attachment.prefix)
    run_edf = engine_of(engine).run_edf
    if place.site.is_local and run_edf:
        need_sarusctl()
        report.say(
            "sarusctl run does not pass this shell's variables on, except those of the environment"
        )
        inside = ("env", *(f"{name}={value}" for name, value in own.items()))
        # after --, because sarusctl would take the command's options as its own
        return Call(
            (*run_edf, str(place.folder / EDF), "--", *inside, *prefix, *command),
            own,
            place.folder,
        )
    if place.site.is_local:
        return Call((*prefix, *command), own, place.folder)
    flags = tuple(expand(word, variables, "a flag of the engine") for word in attachment.flags)
    argv = _srun(place, replace(attachment, flags=flags, prefix=prefix), command, request)
    return Call(argv, own, place.folder)


def _like_a_task(place: _Place) -> tuple[str, ...]:
    """A prefix that runs a command like a task of the run: in its folder, with the variables of its newest attempt."""
    if place.run is None:
        return ()
    variables = place.run.newest.environment if place.run.newest else None
    steps = []
    if variables is not None:
        steps.append(f". {shlex.quote(str(variables))}")
    if place.environment.workdir is None:
        steps.append(f"cd {shlex.quote(str(place.run.code))}")
    return ("/bin/sh", "-c", " && ".join([*steps, 'exec "$@"']), "sh")


def _srun(
    place: _Place, attachment: Attachment, command: tuple[str, ...], request: ShellRequest
) -> tuple[str, ...]:
    process.need(("srun",))
    given = {**request.given, **command_line({"command": command, "tasks_per_node": 1})}
    job = resolve((given,), place.environment, place.site)
    argv = slurm_commands.shell(
        attachment,
        command,
        place.job_id or None,
        pty=request.terminal,
        resources=job.resources,
        site=place.site,
    )
    return (argv[0], *place.site.srun, *job.srun, *argv[1:])


def prompt(terminal: bool, name: str) -> tuple[str, ...]:
    """The command for an interactive shell whose prompt begins with (NAME): the image's bash, or its sh."""
    if not terminal:
        return ("sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash; exec sh")
    mark = f"({re.sub(r'[^A-Za-z0-9._-]', '_', name)}) "
    # bash's startup files set PS1, so the name is added before each prompt
    command = f"""PROMPT_COMMAND='PS1="{mark}${{PS1#"{mark}"}}"' PS1='{mark}$ '; export PROMPT_COMMAND PS1
command -v bash >/dev/null 2>&1 && exec bash -i; exec sh -i"""
    return ("sh", "-c", command)
