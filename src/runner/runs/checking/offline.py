"""Before a launch: is what the job names on the hub here, and may the job then be kept from the network?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from runner.environments.environment import Environment
from runner.errors import RunnerError
from runner.expansion import expand
from runner.project import Project
from runner.runs.cache import hub
from runner.runs.cache.folder import shared_cache
from runner.runs.cache.hub import Wanted
from runner.runs.job import Job
from runner.site import Site

OFFLINE = "HF_HUB_OFFLINE"
TRUE = ("1", "true", "yes", "on")


def folders(project: Project) -> tuple[Path, ...]:
    """Where a relative path among a script's arguments may lie."""
    return tuple(dict.fromkeys((project.start, *((project.root,) if project.root else ()))))


def of_host(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of whoever launches that matter here: they enter every container."""
    return {name: environ[name] for name in ("HF_HOME", OFFLINE) if name in environ}


def hub_home(given: Mapping[str, str], runs: Path, environ: Mapping[str, str]) -> Path:
    """HF_HOME of a job: what its variables say, else in the cache that runs share. Raises RunnerError."""
    cache = shared_cache(runs / "run", environ)
    text = given.get("HF_HOME")
    return Path(expand(text, {**environ, "RUNNER_CACHE": str(cache)}, "HF_HOME")) if text else cache / hub.HOME


def settle(
    job: Job, environment: Environment, project: Project, site: Site, environ: Mapping[str, str], *, strict: bool = True
) -> tuple[Job, tuple[str, ...]]:
    """The job, offline where all that it names is here; and notes on what is not.

    Raises RunnerError, where `strict`, for what was prefetched and is damaged, and for a job that is offline and lacks
    something; a note otherwise.
    """
    try:
        return _settled(job, environment, project, site, environ)
    except RunnerError as error:
        if strict:
            raise
        return job, (f"{error.what}: {error.why}",)


def _settled(
    job: Job, environment: Environment, project: Project, site: Site, environ: Mapping[str, str]
) -> tuple[Job, tuple[str, ...]]:
    named = hub.wanted(job.arguments, folders(project))
    given = {**of_host(environ), **environment.env, **job.env}
    if not named:
        return job, ()
    try:
        home = hub_home(given, site.runs(environ, project), environ)
    except RunnerError as error:
        return job, (f"{error.what}: whether {named[0]} is here is not checked",)
    offline = given.get(OFFLINE, "").lower() in TRUE
    states = {each: hub.state(home, each) for each in named}
    for each, state in states.items():
        if state.fault:
            raise _error(f"the {each} is not whole in the cache", state.fault, job)
    absent = [each for each, state in states.items() if not state.ready]
    if not absent:
        return _kept_offline(job, given, named, project)
    if offline:
        lacking = [each for each in absent if not hub.in_hub_cache(home, each)]
        if lacking:
            why = f"{OFFLINE} is set, and {home} does not hold it"
            raise _error(f"the job cannot find the {lacking[0]}", why, job)
        return job, ()
    listed = ", ".join(map(str, absent))
    return job, (f"not prefetched: {listed}; the job needs network to fetch it (before: runner prefetch {job.name})",)


def _kept_offline(
    job: Job, given: Mapping[str, str], named: tuple[Wanted, ...], project: Project
) -> tuple[Job, tuple[str, ...]]:
    if OFFLINE in given:
        return job, ()
    if hub.pushes(job.arguments, folders(project)):
        return job, (
            "all that the job names is prefetched; it is not kept from the network, since it pushes to the hub",
        )
    return replace(job, env={**job.env, OFFLINE: "1"}), ()


def _error(what: str, why: str, job: Job) -> RunnerError:
    return RunnerError(what, why, f"runner prefetch {job.name}, where the hub can be reached (with the same arguments)")
