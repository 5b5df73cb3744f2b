"""Combine image, environment and job into the plan of a run.

`prepare` only reads and decides; `submit.submit` then writes the run folder and starts the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from runner.detection import find_site
from runner.environments.engines import attach, choose, engine_of, with_site
from runner.environments.environment import (
    Environment,
    default_environment,
    emit_edf,
    load_environment,
)
from runner.errors import RunnerError, unknown
from runner.machine import process
from runner.machine.report import Report
from runner.project import Project
from runner.runs import after, hub, resolve, snapshot, trainer
from runner.runs.budget import budget_of
from runner.runs.checks import check_mounts, lacks_account, no_account, path_on_host
from runner.runs.image import (
    CODE_MOUNT,
    LaunchImage,
    check_architecture,
    find_image,
    missing_image,
    run_environment,
)
from runner.runs.job import Job, Layer, Setting, command_line, load_job_file, value
from runner.runs.plan import EDF, NOTIFY, SCRIPT, RenderedPlan, Request, RunPlan
from runner.runs.program import (
    SUFFIXES,
    Program,
    find_script,
    program_of_command,
    program_of_script,
    script_names,
)
from runner.runs.save_signal import with_save_signal
from runner.runs.schedulers.scheduler import scheduler_of
from runner.site import Origin, Site

Requests = Callable[[Sequence[str]], Request]
"""a function that reads the words of a `runner launch`"""
MakeImage = Callable[[Environment, LaunchImage, Site], None]
"""a function that builds and imports the image of an environment (`--build`)"""


def prepare(
    request: Request,
    project: Project,
    environ: Mapping[str, str],
    report: Report,
    make_image: MakeImage | None = None,
) -> RunPlan:
    """The plan of a run. Raises RunnerError if it cannot be launched. A dry run only warns about missing files."""
    site, why = find_site(request.site, environ)
    report.detail(f"site {site.name} ({why})")
    scheduler = scheduler_of(site.scheduler)
    process.need(() if request.dry_run else scheduler.PROGRAMS)
    job_file, program = find_program(request, project)
    if "batch" in job_file:
        from runner.runs import own_script  # slow, and most launches have none

        return _complete(own_script.plan_of(request, job_file, site, project, environ), project)
    environment = find_environment(
        request.env or value(job_file, "environment"), project, environ, site, report
    )
    environment = request.furnished(environment)
    engine, engine_why = (request.engine, "--engine") if request.engine else choose(site)
    report.detail(f"engine {engine} ({engine_why})")
    report.say(f"environment {environment.name}, site {site.name}, engine {engine}")
    uses_container = engine_of(engine).uses_container
    if environment.image and not uses_container:
        report.warn(f"running without a container: the image {environment.image!r} is not used")
        environment = replace(environment, image="")  # so the image need not exist on this machine
    about_mounts: list[str] = []
    with _noted(about_mounts, request.dry_run):
        about_mounts += check_mounts(environment, environ, here=site.is_local and uses_container)
    waits = after.find(request.after, request.after_any, site, environ, project)
    job = after.with_folder(_job(request, job_file, program, environment, site), waits)
    runs = None
    with suppress(RunnerError):  # the path may contain a variable that is defined only on the site
        runs = site.runs(environ, project)
        if not site.is_local:  # there, nothing limits the time
            job = resolve.with_measured(job, runs)
    job = with_save_signal(
        resolve.with_save_every(job, program, site, runs), program, project, site
    )
    if job.check_arguments:
        job = _checked_arguments(
            job, site, environ, program.main, report, strict=not (request.dry_run or waits.runs)
        )
    # what the user gave is checked first: to make an image may take an hour
    image = find_image(environment, site, environ, engine, strict=not request.dry_run)
    if image.missing and make_image is not None:
        make_image(environment, image, site)
        image = find_image(environment, site, environ, engine)
    notes = [*image.notes]
    with _noted(notes, request.dry_run):
        if image.missing:
            raise missing_image(image, environment, environ)
    with _noted(notes, request.dry_run):
        check_architecture(image, site)
    notes += about_mounts
    choose_offline = partial(
        hub.choose_offline,
        environment=environment,
        project=project,
        site=site,
        environ=environ,
        strict=not request.dry_run,
    )
    undecided = job
    job, hub_notes = choose_offline(job)
    asked = snapshot.begin(
        program.main, program.outside, program.shipped
    )  # git runs while the script is rendered
    environment = run_environment(environment, image, (CODE_MOUNT, *after.mounts(waits)))
    attachment = attach(environment, site, engine)
    script = scheduler.script(job, attachment, site)
    notes += (*hub_notes, *attachment.notes, *job.notes, *program.notes)
    job = replace(job, environment=environment)
    taken = replace(asked(), needed=program.script or "")
    plan = RenderedPlan(
        site=site,
        environment=environment,
        image=image,
        engine=engine,
        attachment=attachment,
        job=job,
        program=program,
        snapshot=taken,
        script=script,
        files={SCRIPT: script},
        notes=(*notes,),
        hub_notes=hub_notes,
        waits=waits,
        choose_offline=lambda each: choose_offline(
            replace(each, env=undecided.env, hub_in_cache=undecided.hub_in_cache)
        ),
    )
    return _complete(plan, project)


@contextmanager
def _noted(notes: list[str], dry_run: bool) -> Iterator[None]:
    """In a dry run, add an error to the notes instead of raising it."""
    try:
        yield
    except RunnerError as error:
        if not dry_run:
            raise
        notes.append(f"{error.what}: {error.why.splitlines()[0]}")


def _complete(plan: RunPlan, project: Project) -> RunPlan:
    """The plan with the files of every run folder, and with the notes about the snapshot."""
    job, environment = plan.job, plan.environment
    files = {
        EDF: emit_edf(environment, f"{environment.name}: what the containers of this run see"),
        **plan.attachment.files,
        **plan.payload(),
        **after.files(plan.waits),
        NOTIFY: " ".join(job.notify) + "\n",
        trainer.FILE: trainer.render(
            job.trainer, project, plan.words, job.origins["trainer"].place
        ),
        **plan.files,
    }
    left_out = [
        f"left out of the code snapshot: {name} ({why})" for name, why in plan.snapshot.left_out
    ]
    if len(left_out) > 10:
        left_out[10:] = [f"left out of the code snapshot: {len(left_out) - 10} more files"]
    notes = (*plan.notes, *plan.snapshot.notes, *left_out)
    return replace(plan, files=files, notes=notes, budget=budget_of(project, plan.site))


ACCOUNT = "ACCOUNT"
"""the placeholder in a dry run without an account"""


def _job(
    request: Request, job_file: Layer, program: Program, environment: Environment, site: Site
) -> Job:
    """The job. In a dry run, a missing account is replaced by a placeholder."""
    lenient = replace(site, account_required=site.account_required and not request.dry_run)
    job = resolve.resolve((_given(request, job_file, program), job_file), environment, lenient)
    if not lacks_account(job, site):
        return job
    account = replace(job.resources, account=ACCOUNT)
    return replace(job, resources=account, notes=(*job.notes, no_account(site)))


def _checked_arguments(
    job: Job,
    site: Site,
    environ: Mapping[str, str],
    code: Path | None,
    report: Report,
    *,
    strict: bool,
) -> Job:
    """The job, with complete arguments if it asks for that. With `strict`, raises RunnerError for missing files.

    Not strict for a dry run, and after a run that may create the files.
    """
    from runner.runs import megatron  # few jobs need it

    if job.check_arguments != megatron.NAME:
        raise unknown("value of check_arguments", job.check_arguments, (megatron.NAME,))
    job, reason = megatron.complete(job, site, environ)
    report.say(reason)
    environment = with_site(job.environment, site)
    notes = [*job.notes]
    with _noted(notes, not strict):
        megatron.check_files(job, lambda path: path_on_host(path, environment, environ, code))
    return replace(job, notes=(*notes,))


def find_program(request: Request, project: Project) -> tuple[Layer, Program]:
    """The layer of the job file (of JOB, or beside SCRIPT; may be empty) and the program."""
    nothing, word = Program(None, (), None), request.script
    if word is not None:
        named = "/" not in word and not word.endswith(SUFFIXES)
        if (
            request.job is None
            and named
            and word not in script_names(project)
            and word in project.names("jobs")
        ):
            return find_program(replace(request, job=word, script=None), project)
        script = find_script(word, project)
        path = (
            _job_path(request.job, project)
            if request.job is not None
            else script.with_suffix(".toml")
        )
        if request.job is None and not (named and path.is_file()):
            return {}, program_of_script(script, project)
        return load_job_file(path), program_of_script(script, project)
    if request.job is None:
        if not request.words:
            raise RunnerError(
                "nothing to launch",
                "the command line has no job, no --script and no command after `--`",
                "runner launch --env ENV --script SCRIPT [-- ARGS…], or runner launch --env ENV -- COMMAND…",
                exit_code=2,
            )
        return {}, program_of_command(request.words, project)
    if _is_batch(request.job, project):
        return {"batch": Setting(request.job, Origin("command line"))}, nothing
    path = _job_path(request.job, project)
    job_file = load_job_file(path)
    if "batch" in job_file:
        beside = _script_of(job_file, path, project, "batch")
        return {**job_file, "batch": job_file["batch"]._replace(value=str(beside))}, nothing
    if "script" in job_file:
        return job_file, program_of_script(_script_of(job_file, path, project), project)
    command = value(job_file, "command") or ()
    in_image = value(job_file, "program_in_image")
    return job_file, nothing._replace(command=command) if in_image else program_of_command(
        command, project
    )


def _is_batch(word: str, project: Project) -> bool:
    """Whether the word is a file other than a job file, and not the name of a job."""
    if word.endswith(".toml") or word in project.names("jobs"):
        return False
    path = project.start / Path(word).expanduser()
    return path.is_file() or ("/" in word and path.exists())


def _job_path(name: str, project: Project) -> Path:
    try:
        return project.find("jobs", name)
    except RunnerError as error:
        if name in script_names(project):
            error.fix = f"{name} is a script: runner launch --env ENV --script {name}"
        elif (
            error.fix.startswith(("did you mean", "to use the file"))
            or "/" in name
            or name.startswith(".")
        ):
            raise
        elif process.which(name) is not None:
            error.fix = f"to run the command {name}: runner launch … -- {name}"
        else:
            error.fix = f"use one of these names, or the path of a batch script; {project.start / name} is not a file"
        raise


def _script_of(job_file: Layer, path: Path, project: Project, key: str = "script") -> Path:
    """The script that a job file names, relative to the project or else to the job file."""
    word, origin = job_file[key]
    for folder in (path.parent.parent, *project.roots, path.parent):
        if (folder / word).is_file():
            return Path(folder / word)
    if key == "script" and word in script_names(project):
        return find_script(word, project)
    raise RunnerError(
        f"{origin.place}: there is no script {word!r}",
        f"neither {path.parent.parent} nor {path.parent} contains it, and it is not one of runner's own scripts",
        "correct the path, which is relative to the project",
    )


def _given(request: Request, job_file: Layer, program: Program) -> Layer:
    """The layer of the command line, with the program and its arguments unless they come from the job file."""
    if request.job is not None and request.script is None:
        moved = "script" in job_file and program.script != job_file["script"].value
        script = command_line(
            {"script": program.script if moved else None, "arguments": request.words}
        )
        return {"name": job_file["name"], **request.given, **script}
    if program.script is not None:
        return {
            **request.given,
            **command_line({"script": program.script, "arguments": request.words}),
        }
    return {**request.given, **command_line({"command": program.command})}


def find_environment(
    name: str | None, project: Project, environ: Mapping[str, str], site: Site, report: Report
) -> Environment:
    """The environment by name, or the default: from runner.toml, or else `ngc-ds` (`cpu` on the site local)."""
    default, why = default_environment(project, site)
    if name is not None:
        default, why = name, ""
    environment = load_environment(default, project, environ)
    where = environment.path or "built in"
    report.detail(f"environment {environment.name} ({where}{'; ' + why if why else ''})")
    return environment
