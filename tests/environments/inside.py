"""Run a command inside of an environment by an engine, the way a batch script would, and see what it sees."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from runner.environments.engines import attach
from runner.environments.environment import Attachment, Environment, load_environment
from runner.expansion import expand
from runner.project import Project
from runner.site_files import load_site
from tests.lab.slurm import SlurmLab


def environment_of(folder: Path, text: str, environ: Mapping[str, str] | None = None) -> Environment:
    """The environment of an EDF text."""
    path = folder / "it.toml"
    path.write_text(text)
    return load_environment(str(path), Project(None, folder, folder), environ or {})


def prepared(environment: Environment, engine: str, run_folder: Path) -> Attachment:
    """The attachment, its files written to the run folder."""
    attachment = attach(environment, load_site("local"), engine)
    for name, text in attachment.files.items():
        path = run_folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return attachment


def run_inside(
    environment: Environment,
    engine: str,
    run_folder: Path,
    *command: str,
    environ: Mapping[str, str] | None = None,
    slurm: SlurmLab | None = None,
    become: tuple[str, ...] = (),
    cwd: Path | None = None,
    timeout: float = 60,
    stdin: bytes | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """What the command printed, as bytes. `environ` is laid over ours; `slurm` is a cluster to run it on."""
    attachment = prepared(environment, engine, run_folder)
    variables = {**(slurm.environ if slurm else os.environ), **(environ or {}), "RUNNER_RUN": str(run_folder)}
    for name, value in attachment.exports.items():
        variables[name] = expand(value, variables, name)
    words = [expand(word, variables, "a word") for word in (*attachment.flags, *attachment.prefix)]
    start = ("srun",) if slurm else ()
    return subprocess.run(
        (*become, *start, *words, *command),
        env=variables,
        cwd=cwd or run_folder,
        capture_output=True,
        timeout=timeout,
        input=stdin,
        check=False,
    )


def variables_inside(printed: bytes) -> dict[str, str]:
    """The variables that `env -0` printed."""
    return dict(entry.split("=", 1) for entry in printed.decode().split("\0") if "=" in entry)
