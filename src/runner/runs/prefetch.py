"""`runner prefetch`: download the models, datasets and files that a job names into the job's cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from runner.detection import find_site
from runner.environments.engines import choose, engine_of
from runner.expansion import expand
from runner.machine import process, secrets
from runner.machine.report import Report
from runner.project import Project
from runner.runs import hub, shell
from runner.runs.hub import Repository
from runner.runs.job import value
from runner.runs.launch import find_environment, find_program
from runner.runs.plan import Request
from runner.runs.shell import Call, ShellRequest
from runner.site import Site

PAYLOAD = (
    "prefetch.py",
    "training/__init__.py",
    "training/errors.py",
    "training/files.py",
    "training/hub_files.py",
)
"""files of jobs/ that are mounted into the container, whether or not it sees the project"""
PYTHON = 'p=$(command -v python || command -v python3) || { echo "no Python here" >&2; exit 127; }; exec "$p" "$@"'


@dataclass(frozen=True)
class Prefetch:
    """What to download, where to, and in which environment."""

    wanted: tuple[Repository, ...]
    home: Path
    engine: str
    environment: str | None
    """the name or path of the environment"""
    env: Mapping[str, str]
    """variables of the environment and the job, such as proxies and HF_ENDPOINT"""
    site: Site


def plan(
    request: Request, project: Project, environ: Mapping[str, str], report: Report
) -> Prefetch:
    """The plan of a prefetch: what a launch with the same arguments would read from the hub."""
    site, why = find_site(request.site, environ)
    report.detail(f"site {site.name} ({why})")
    job_file, program = find_program(request, project)
    name = request.env or value(job_file, "environment")
    environment = find_environment(name, project, environ, site, report)
    # without a job and a script, the words are the command
    has_arguments = request.job is not None or program.script is not None
    words = (
        *program.command,
        *(value(job_file, "arguments") or ()),
        *(request.words if has_arguments else ()),
    )
    env = {
        **hub.hub_variables(environ),
        **site.env,
        **environment.env,
        **(value(job_file, "env") or {}),
    }
    home = hub.hub_home(env, site.runs(environ, project), environ)
    engine, engine_why = (request.engine, "--engine") if request.engine else choose(site)
    report.detail(f"engine {engine} ({engine_why})")
    report.say(f"environment {environment.name}, site {site.name}, engine {engine}")
    wanted = hub.repositories(words, hub.model_folders(project))
    return Prefetch(wanted, home, engine, name, env, site)


@contextmanager
def prepared(
    prefetch: Prefetch,
    project: Project,
    environ: Mapping[str, str],
    report: Report,
    options: tuple[str, ...],
) -> Iterator[Call]:
    """The call that downloads, with this machine's Python or in the job's environment. Raises RunnerError."""
    # not a script of the project with this name
    script = project.shipped / "jobs/prefetch.py"
    token = secrets.value_for_job("HF_TOKEN", environ)
    login = {"HF_TOKEN": token} if token else {}
    arguments = ("--home", str(prefetch.home), *options)
    for each in prefetch.wanted:
        arguments += ("--wanted", json.dumps(each._asdict()))
    if not engine_of(prefetch.engine).uses_container:
        values = {
            name: expand(value, environ, name)
            for name, value in prefetch.env.items()
            if name != "HF_HOME"
        }
        fix = "python3 -m venv hub && hub/bin/pip install huggingface_hub && PATH=$PWD/hub/bin:$PATH runner prefetch …"
        candidates = (process.which("python3"), process.which("python"), sys.executable)
        python = process.python_with("huggingface_hub", candidates, fix)
        yield Call((python, str(script), *arguments), {**login, **values}, project.start)
        return
    only_by_srun = bool(engine_of(prefetch.engine).srun_option)
    if only_by_srun:
        report.say(
            f"downloading on a compute node, because the engine {prefetch.engine} works only there"
            "; to download on this machine instead: --engine host"
        )
    request = ShellRequest(
        where=prefetch.environment,
        command=("sh", "-c", PYTHON, "sh", f"{shell.FOLDER}/prefetch.py", *arguments),
        site=prefetch.site.name,
        engine=prefetch.engine,
        without_scheduler=not only_by_srun,
        files={name: (script.parent / name).read_text(encoding="utf-8") for name in PAYLOAD},
    )
    with shell.prepared(request, project, environ, report) as call:
        yield replace(call, env={**login, **call.env})
