"""What a dry run tells beside the script: the submission, where each value comes from, which code the job sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from runner.errors import RunnerError
from runner.project import Project
from runner.runs.checking.estimate import estimate
from runner.runs.launch import SCRIPT, RunPlan

_FILES_SHOWN = 12


def explain(plan: RunPlan, environ: Mapping[str, str], project: Project) -> Iterator[str]:
    """The lines for stderr."""
    try:
        runs = str(plan.site.runs(environ, project))
    except RunnerError:  # a variable that is defined on the site, and not here
        runs = str(plan.site.run_folder)
    yield f"would run: {_command_line(plan, runs)}"
    yield f"image: {plan.image.reference or 'none: the programs of this machine'}"
    if (cost := estimate(plan.job)) is not None:
        yield f"cost: {cost.text}"
    yield "values, and where each comes from:"
    yield from _columns(tuple((name, value, _short(source, project)) for name, value, source in _values(plan)))
    yield from _code(plan)


def _short(source: str, project: Project) -> str:
    """The source with paths relative to the project, and `shipped:` for the files that come with runner."""
    if project.root is not None:
        source = source.replace(f"{project.root}/", "")
    return source.replace(f"{project.shipped}/", "shipped:")


def _values(plan: RunPlan) -> Iterator[tuple[str, str, str]]:
    """(name, value, source) of everything that the script was made of."""
    job = plan.job
    chosen: dict[str, object] = {
        "script": job.script,
        "command": " ".join(job.command) or None,
        "launcher": job.launcher,
        **asdict(job.resources),
        "save_seconds": job.save_seconds,
        "hang_seconds": job.hang_seconds,
        **({f"restart.{key}": value for key, value in asdict(job.restart).items()} if job.restart else {}),
        "chain": job.chain or None,
    }
    for name, value in chosen.items():
        if value is not None:
            yield name, str(value), str(job.origins.get(name, ""))
    environment = plan.environment
    for name, origin in environment.origins.items():
        yield name, _of_environment(plan, name), str(origin)
    for name in ("scheduler", "gpu_request", "restart_by", "image_folder", "run_folder", "modules", "sbatch", "srun"):
        value = getattr(plan.site, name)
        if value:
            shown = " ".join(value) if isinstance(value, tuple) else str(value)
            yield f"site {name}", shown, str(plan.site.origins.get(name, plan.site.name))


def _of_environment(plan: RunPlan, name: str) -> str:
    environment = plan.environment
    kind, _, key = name.partition(".")
    if kind == "mounts":
        return environment.mounts[int(key)].text() if key.isdigit() else ""
    if kind in ("env", "annotations"):
        return str(getattr(environment, kind).get(key, ""))
    value = getattr(environment, kind, "")
    return "" if value is None else str(value)


def _columns(rows: tuple[tuple[str, str, str], ...]) -> Iterator[str]:
    first = max((len(name) for name, _, _ in rows), default=0)
    second = min(48, max((len(value) for _, value, _ in rows), default=0))
    for name, value, source in rows:
        yield f"  {name:<{first}}  {value:<{second}}  {source}".rstrip()


def _code(plan: RunPlan) -> Iterator[str]:
    taken = plan.snapshot
    size = f"{taken.size_bytes / 1e6:.1f} MB" if taken.size_bytes >= 100_000 else f"{taken.size_bytes} bytes"
    where = f" of {plan.program.main}" if plan.program.main else ""
    yield f"code snapshot{where}: {len(taken.files)} files, {size}"
    if taken.git is not None:
        state = "clean"
        if taken.git.dirty:
            state = f"{len(taken.git.modified)} modified and {len(taken.git.untracked)} untracked files"
        yield f"  commit {taken.git.commit or '(none yet)'}, {state}"
    changed = taken.git.modified + taken.git.untracked if taken.git else ()
    listed = sorted(taken.files, key=lambda name: (name != plan.job.script, name not in changed, name))
    for name in listed[:_FILES_SHOWN]:
        mark = " (untracked)" if taken.git and name in taken.git.untracked else " (modified)" if name in changed else ""
        yield f"  {name}{mark}"
    if len(listed) > _FILES_SHOWN:
        yield f"  and {len(listed) - _FILES_SHOWN} more"


def _command_line(plan: RunPlan, runs: str) -> str:
    """The submission by hand."""
    folder = f"{runs}/{plan.job.name}-NNNN"
    if plan.site.scheduler == "slurm":
        return f"cd {folder} && sbatch {SCRIPT}"
    return f"cd {folder} && bash {SCRIPT} >> job.log 2>&1"
