"""From a job file and a command line to a Job: each value from the first that has one, and noted from where."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from runner.environments.environment import Environment
from runner.errors import RunnerError, unknown
from runner.runs.checks import check
from runner.runs.job import (
    HANG_SECONDS,
    LAUNCHERS,
    SAVE_SECONDS,
    Job,
    JobFile,
    Overrides,
    Resources,
    Restart,
    time_limit_minutes,
)
from runner.runs.metrics import newest_records
from runner.site import Origin, Site

T = TypeVar("T")


class _Chooser:
    """Takes each value from the first that has one: command line, job file, site, default; and notes which."""

    def __init__(self, job_file: JobFile | None) -> None:
        self.job_file = job_file
        self.origins: dict[str, Origin] = {}

    def choose(
        self, key: str, given: T | None, written: T | None, *keys: str, site: Site | None = None, default: T
    ) -> T:
        """`given` by the command line, `written` in the job file at `keys`, a value of the site named `key`."""
        if given is not None and given != ():
            self.origins[key] = Origin("command line")
            return given
        if written is not None and written not in ((), ""):
            assert self.job_file is not None
            self.origins[key] = Origin("job file", "", self.job_file.document.place(*keys))
            return written
        of_site = getattr(site, key, None) if site is not None else None
        if site is not None and of_site is not None:
            self.origins[key] = site.origins.get(key, Origin(f"site {site.name}"))
            chosen: T = of_site
            return chosen
        self.origins.setdefault(key, Origin("default"))
        return default


def make_job(job_file: JobFile | None, overrides: Overrides, environment: Environment, site: Site) -> Job:
    """The job that a job file and the command line describe on a site. Raises RunnerError for what cannot be."""
    chooser = _Chooser(job_file)
    script, command = _program(job_file, overrides, chooser)
    launcher = _launcher(job_file, overrides, site, script, chooser)
    resources = _resources_of(job_file, overrides, site, launcher, chooser)
    written = job_file
    job = Job(
        name=_name(job_file, overrides, script, command),
        environment=environment,
        script=script,
        command=command,
        arguments=(*(written.arguments if written else ()), *overrides.arguments),
        launcher=launcher,
        resources=resources,
        env={**(written.env if written else {}), **overrides.env},
        setup=written.setup if written else "",
        task_prolog=written.task_prolog if written else "",
        task_epilog=written.task_epilog if written else "",
        notify=Job.notify if written is None or written.notify is None else written.notify,
        mail_user=written.mail_user if written else "",
        mail_events=written.mail_events if written else (),
        sbatch=(*(written.sbatch if written else ()), *overrides.sbatch),
        srun=(*(written.srun if written else ()), *overrides.srun),
        save_seconds=chooser.choose(
            "save_seconds", None, written.save_seconds if written else None, "save_seconds", default=SAVE_SECONDS
        ),
        hang_seconds=chooser.choose(
            "hang_seconds", None, written.hang_seconds if written else None, "hang_seconds", default=HANG_SECONDS
        ),
        preflight=chooser.choose(
            "preflight",
            overrides.preflight,
            written.preflight if written else None,
            "preflight",
            default=resources.gpus_per_node > 0 and site.scheduler == "slurm",
        ),
        restart=_restart_of(written, overrides),
        chain=overrides.chain or 0,
        origins=chooser.origins,
        notes=_notes(chooser, site, resources),
    )
    check(job, site, overrides)
    return job


def _restart_of(written: JobFile | None, overrides: Overrides) -> Restart | None:
    """The policy of restarts. A chain is one by itself: each of its jobs goes on where the time of another is over."""
    if written is not None and written.restart is not None:
        return written.restart
    return Restart(time_limit=overrides.chain - 1) if overrides.chain else None


def _notes(chooser: _Chooser, site: Site, resources: Resources) -> tuple[str, ...]:
    """What the job asks for because nobody has said better."""
    if site.scheduler != "slurm":
        return ()
    gpus = f"no GPUs are asked for: neither the job nor the site {site.name} says how many (--gpus-per-node N)"
    cpus = (
        f"one CPU is asked for per process: nobody says how many a node of {site.name} has"
        f" (--cpus-per-task N, or once: runner init --site {site.name})"
    )
    unknown_cpus = resources.gpus_per_node > 0 and not (site.cpus_per_node or site.cpus_per_gpu)
    default = {key for key in ("gpus_per_node", "cpus_per_task") if chooser.origins[key].source == "default"}
    return (
        *((gpus,) if "gpus_per_node" in default else ()),
        *((cpus,) if "cpus_per_task" in default and unknown_cpus else ()),
    )


def _program(job_file: JobFile | None, overrides: Overrides, chooser: _Chooser) -> tuple[str | None, tuple[str, ...]]:
    """The script, or the command: those of the command line replace either of the job file."""
    if overrides.script is not None and overrides.command:
        raise RunnerError("both a script and a command are given", "a job starts one program", "leave out one of them")
    if overrides.script is not None or overrides.command:
        chooser.origins["script" if overrides.script else "command"] = Origin("command line")
        return overrides.script, overrides.command
    if job_file is None or (job_file.script is None and not job_file.command):
        what = f"{job_file.document.path} names neither" if job_file else "neither a job, a script nor a command"
        raise RunnerError("nothing to run", what, 'give --script NAME, or -- COMMAND; or script = "jobs/x.py" there')
    key = "script" if job_file.script is not None else "command"
    chooser.origins[key] = Origin("job file", "", job_file.document.place(key))
    return job_file.script, job_file.command


def _name(job_file: JobFile | None, overrides: Overrides, script: str | None, command: tuple[str, ...]) -> str:
    """The name given; else the job file's, the script's or the program's, made into a name."""
    if overrides.name is not None:
        return overrides.name
    if job_file is not None and overrides.script is None and not overrides.command:
        return job_file.name
    word = (script or command[0]).rstrip("/").rsplit("/", 1)[-1].removesuffix(".py").removesuffix(".sh")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", word).strip("-.")[:60] or "job"


def _launcher(job_file: JobFile | None, overrides: Overrides, site: Site, script: str | None, chooser: _Chooser) -> str:
    """The launcher's name. The site's default is meant for Python scripts; anything else runs as it is."""
    python = script is not None and script.endswith(".py")
    written = job_file.launcher if job_file else None
    if overrides.command or (overrides.script is not None and job_file is not None and job_file.script is None):
        written = None  # the file's launcher was meant for the file's own program
    launcher = chooser.choose(
        "launcher", overrides.launcher, written, "launcher", site=site if python else None, default="none"
    )
    if launcher not in LAUNCHERS:
        error = unknown("launcher", launcher, LAUNCHERS)
        place = chooser.origins["launcher"].place
        raise RunnerError(f"{place}: {error.what}" if place else error.what, error.why, error.fix)
    return launcher


def _cpus(site: Site, gpus: int) -> int:
    """The CPUs of a node that a job with that many GPUs may have; 0: not known."""
    if site.cpus_per_gpu and gpus:
        return min(site.cpus_per_gpu * gpus, site.cpus_per_node or site.cpus_per_gpu * gpus)
    return site.cpus_per_node or 0


def _memory(site: Site, gpus: int, chooser: _Chooser) -> str | None:
    """The memory to ask for where the site ties it to the GPUs."""
    found = re.fullmatch(r"(\d+)([KMGT]?)", site.memory_per_gpu or "")
    if not found or not gpus:
        return None
    chooser.origins["memory"] = site.origins.get("memory_per_gpu", Origin(f"site {site.name}"))
    return f"{int(found[1]) * gpus}{found[2]}"


def _resources_of(
    job_file: JobFile | None, overrides: Overrides, site: Site, launcher: str, chooser: _Chooser
) -> Resources:
    written = job_file.resources if job_file else {}

    def number(key: str, default: int, of_site: Site | None = None, place: str = "") -> int:
        value = written.get(place or key)
        given: int | None = getattr(overrides, key)
        found = int(value) if value is not None else None
        return chooser.choose(key, given, found, "resources", place or key, site=of_site, default=default)

    def word(key: str) -> str | None:
        value = written.get(key)
        given: str | None = getattr(overrides, key)
        found = str(value) if value is not None else None
        return chooser.choose(key, given, found, "resources", key, site=site, default=None)

    gpus = number("gpus_per_node", 0, site)
    # a job that is to run with and without GPUs says only for the latter how many processes it wants
    without_gpus = gpus == 0 and "tasks_per_node" not in written and "cpu_tasks_per_node" in written
    tasks = number(
        "tasks_per_node",
        1 if launcher == "none" else max(1, gpus),
        place="cpu_tasks_per_node" if without_gpus else "",
    )
    cpus = _cpus(site, gpus) // max(1, tasks)
    limit = overrides.time and time_limit_minutes(overrides.time, "--time")
    minutes = written.get("time_minutes")
    return Resources(
        nodes=number("nodes", 1),
        gpus_per_node=gpus,
        tasks_per_node=tasks,
        cpus_per_task=number("cpus_per_task", max(1, cpus)),
        memory=word("memory") or _memory(site, gpus, chooser),
        time_minutes=chooser.choose(
            "time_minutes", limit or None, int(minutes) if minutes else None, "resources", "time",
            site=site, default=None,
        ),
        partition=word("partition"),
        account=word("account"),
    )  # fmt: skip


KEY = "checkpoint_seconds"
"""of an entry of metrics.jsonl: how long that save took"""
_RUNS = 10  # the newest of the job; older ones may have had another model
_TAIL_BYTES = 1 << 20
_FACTOR, _EXTRA_SECONDS = 2, 30  # a file system has bad hours; the step that is under way ends first
_MOST = 65535  # sbatch(1), --signal


def with_measured(job: Job, runs: Path) -> Job:
    """The job, warned earlier where a save of one of its earlier runs took longer than `save_seconds` leaves."""
    if not job.save_seconds:
        return job
    seconds, run = max(_measured(job.name, runs), default=(0.0, ""))
    needed = min(math.ceil(_FACTOR * seconds + _EXTRA_SECONDS), _MOST)
    if not run or needed <= job.save_seconds:
        return job
    origin = Origin(f"measured: a save of {run} took {seconds:.0f} s")
    note = f"the job is told to save {needed} s before its limit, not {job.save_seconds}: it took {run} {seconds:.0f} s"
    return replace(job, save_seconds=needed, origins={**job.origins, "save_seconds": origin}, notes=(*job.notes, note))


def _measured(name: str, runs: Path) -> Iterator[tuple[float, str]]:
    """The longest save of each of the newest runs of a job, with the run's name."""
    folders = [path for path in runs.glob(f"{name}-*") if path.name[len(name) + 1 :].isdigit()]
    folders.sort(key=lambda path: int(path.name[len(name) + 1 :]))
    for folder in folders[-_RUNS:]:
        taken = [entry.get(KEY) for entry in newest_records(folder / "metrics.jsonl", _TAIL_BYTES)]
        longest = max((float(each) for each in taken if isinstance(each, int | float)), default=0.0)
        if longest > 0:
            yield longest, folder.name
