"""A job file, jobs/NAME.toml: what a user writes down once about a job. Every key may be absent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from runner.errors import RunnerError
from runner.located_toml import Document, read_toml, refuse_unknown_keys, string_table, strings, typed
from runner.runs.job import Restart
from runner.runs.schedulers import time_limit

KEYS = ("summary", "script", "command", "environment", "launcher", "arguments", "setup", "task_prolog", "task_epilog",
        "save_seconds", "hang_seconds", "preflight", "resources", "restart", "env", "mail", "notify",
        "slurm")  # fmt: skip
RESOURCES = (
    *("nodes", "gpus_per_node", "tasks_per_node", "cpu_tasks_per_node", "cpus_per_task"),
    *("memory", "time", "partition", "account"),
)


@dataclass(frozen=True)
class JobFile:
    """What a job file says; None or empty where it says nothing. Its name is the file's."""

    name: str
    document: Document
    script: str | None = None
    """path of a .py or .sh file, relative to the project"""
    command: tuple[str, ...] = ()
    environment: str | None = None
    launcher: str | None = None
    arguments: tuple[str, ...] = ()
    setup: str = ""
    task_prolog: str = ""
    task_epilog: str = ""
    save_seconds: int | None = None
    hang_seconds: int | None = None
    preflight: bool | None = None
    resources: Mapping[str, int | str] = field(default_factory=dict)
    """by the field of Resources that it sets: `time` of the file is `time_minutes` here"""
    restart: Restart | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    notify: tuple[str, ...] | None = None
    """events of which the webhook is told; None: the usual ones"""
    mail_user: str = ""
    mail_events: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()


def load_job_file(path: Path) -> JobFile:
    """The job file at `path`. Raises RunnerError that names line and key of what is wrong."""
    return job_of(read_toml(path))


def job_of(document: Document) -> JobFile:
    """What the text of a job file says. Raises RunnerError that names line and key of what is wrong."""
    refuse_unknown_keys(document, (), KEYS, "job")
    refuse_unknown_keys(document, ("resources",), RESOURCES, "job")
    refuse_unknown_keys(document, ("mail",), ("user", "events"), "job")
    refuse_unknown_keys(document, ("slurm",), ("sbatch", "srun"), "job")
    script, command = typed(document, ("script",), str), strings(document, ("command",))
    if script is not None and command:
        raise RunnerError(
            f"{document.place('command')}: both script and command are given",
            "a job starts one program",
            "keep script for a .py or .sh file of the project, command for anything else",
        )
    return JobFile(
        name=document.path.stem,
        document=document,
        script=script,
        command=command,
        environment=typed(document, ("environment",), str),
        launcher=typed(document, ("launcher",), str),
        arguments=strings(document, ("arguments",)),
        setup=typed(document, ("setup",), str, ""),
        task_prolog=typed(document, ("task_prolog",), str, ""),
        task_epilog=typed(document, ("task_epilog",), str, ""),
        save_seconds=typed(document, ("save_seconds",), int),
        hang_seconds=typed(document, ("hang_seconds",), int),
        preflight=typed(document, ("preflight",), bool),
        resources=_resources(document),
        restart=_restart(document),
        env=string_table(document, ("env",)),
        notify=strings(document, ("notify",)) if "notify" in document.data else None,
        mail_user=typed(document, ("mail", "user"), str, ""),
        mail_events=strings(document, ("mail", "events")),
        sbatch=strings(document, ("slurm", "sbatch")),
        srun=strings(document, ("slurm", "srun")),
    )


def _resources(document: Document) -> dict[str, int | str]:
    typed(document, ("resources",), dict)
    found: dict[str, int | str] = {}
    for key in ("nodes", "gpus_per_node", "tasks_per_node", "cpu_tasks_per_node", "cpus_per_task"):
        count = typed(document, ("resources", key), int)
        if count is not None:
            found[key] = count
    for key in ("memory", "partition", "account"):
        word = typed(document, ("resources", key), str)
        if word is not None:
            found[key] = word
    limit = typed(document, ("resources", "time"), str)
    if limit is not None:
        found["time_minutes"] = time_limit.minutes(limit, str(document.place("resources", "time")))
    return found


def _restart(document: Document) -> Restart | None:
    """The policy of [restart]; None without that table. Raises RunnerError for a number below 0."""
    if typed(document, ("restart",), dict) is None:
        return None
    names = tuple(item.name for item in fields(Restart))
    refuse_unknown_keys(document, ("restart",), names, "job")
    found = {name: count for name in names if (count := typed(document, ("restart", name), int)) is not None}
    for name, count in found.items():
        least = 1 if name == "without_checkpoint" else 0
        if count < least:
            raise RunnerError(
                f"{document.place('restart', name)}: {name} is {count}",
                f"it counts, and is {least} at least",
                f"{name} = {least}",
            )
    return Restart(**found)
