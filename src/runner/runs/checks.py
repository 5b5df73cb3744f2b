"""Checks of a job before anything is written: each error names the value, the reason and the fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from runner.environments.engines import engine_of
from runner.environments.environment import Environment
from runner.errors import RunnerError, unknown
from runner.expansion import expand
from runner.quoting import WORD_BYTES
from runner.runs.hub import CACHE_MOUNT
from runner.runs.image import RUN_MOUNT
from runner.runs.job import MEMORY, Job
from runner.site import Origin, Site

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# the launcher or the batch script sets these for every task: other values would break the world size, or use another
# job's port
_LAUNCHERS_OWN = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}
# variables that a shell sets, protects or needs: bash as sh, dash and busybox each reject or change some of them
_SHELLS_OWN = {
    "_",
    "IFS",
    "PWD",
    "OLDPWD",
    "OPTIND",
    "OPTARG",
    "OPTERR",
    "PPID",
    "UID",
    "EUID",
    "GROUPS",
    "LINENO",
    "RANDOM",
    "SRANDOM",
    "SECONDS",
    "EPOCHSECONDS",
    "EPOCHREALTIME",
    "SHLVL",
    "FUNCNAME",
    "DIRSTACK",
    "PIPESTATUS",
    "SHELLOPTS",
    "HISTCMD",
    "COMP_WORDBREAKS",
    "POSIXLY_CORRECT",
}

NOTIFY_EVENTS = ("start", "first_step", "requeue", "failure", "end")
MAIL_EVENTS = (
    "NONE",
    "BEGIN",
    "END",
    "FAIL",
    "REQUEUE",
    "ALL",
    "INVALID_DEPEND",
    "STAGE_OUT",
    "TIME_LIMIT",
    "TIME_LIMIT_90",
    "TIME_LIMIT_80",
    "TIME_LIMIT_50",
    "ARRAY_TASKS",
)


SAVE_SIGNALS = ("TERM", "USR1", "none")

OnHost = Callable[[str], Path | None]
"""the file on this machine for a path in the container; None if this machine cannot see it"""


def check(job: Job, site: Site) -> None:
    """Raise RunnerError for the first value of the job that does not work on this site."""
    if not NAME.fullmatch(job.name):
        raise RunnerError(
            f"cannot use the job name {job.name!r}",
            "the run folder is named after the job: a name has at most 60 letters, digits, `.`, `_` and `-`",
            "choose another name that begins with a letter or a digit",
        )
    _check_numbers(job)
    _check_site(job, site)
    if job.keeps_nodes:
        _check_spares(job)
    if job.origins["chain"].source != "default":
        _check_chain(job.chain, site)
    for name, value in job.env.items():
        check_variable(name, value)
    for what in ("host_setup", "setup", "task_prolog", "task_epilog"):
        _check_shell_text(getattr(job, what), what)
    for event in job.mail_events:
        if event.upper() not in MAIL_EVENTS:
            raise unknown("mail event", event, MAIL_EVENTS)
    for event in job.notify:
        if event not in NOTIFY_EVENTS:
            raise unknown("notify event", event, NOTIFY_EVENTS)
    for name in job.save_signal:
        if name not in SAVE_SIGNALS:
            raise unknown("save_signal", name, SAVE_SIGNALS, place=job.origins["save_signal"].place)
    if job.mail_events and not job.mail_user:
        raise RunnerError(
            "cannot send mail without an address",
            "[mail] has events, but no user",
            'user = "you@example.org"',
        )
    if job.script is not None and not job.script.endswith((".py", ".sh")):
        raise RunnerError(
            f"cannot run the script {job.script!r}",
            "a script must be a .py or a .sh file",
            f"run it as a command: -- {job.script}",
        )


def _where(origin: Origin | None) -> str:
    return f" ({origin})" if origin is not None else ""


def _check_numbers(job: Job) -> None:
    resources = job.resources
    least = {
        "nodes": 1,
        "gpus_per_node": 0,
        "tasks_per_node": 1,
        "cpus_per_task": 1,
        "spare_nodes": 0,
        "min_nodes": 1,
        "segment": 1,
    }
    for key, minimum in least.items():
        value = getattr(resources, key)
        if value is not None and value < minimum:
            raise RunnerError(
                f"{key} cannot be {value}{_where(job.origins.get(key))}",
                f"it must be at least {minimum}",
                f"use {minimum} or a larger number",
            )
    every = job.save_every
    refused = {
        "save_seconds": (
            not 0 <= job.save_seconds <= 65535,
            "it must be 0 to 65535 seconds, Slurm's range for --signal",
            "use 120 for a signal two minutes before the time limit, or 0 for no signal",
        ),
        "hang_seconds": (
            job.hang_seconds < 0,
            "it must be a number of seconds, 0 or more",
            "use 0 to turn off hang detection, or 3600 to end a job after an hour without progress",
        ),
        "save_every": (
            every != "auto" and (type(every) is not int or every < 0),
            'it must be "auto" or a number of seconds',
            'use "auto", or 600 to save every ten minutes',
        ),
    }
    for key, (is_refused, why, fix) in refused.items():
        if is_refused:
            raise RunnerError(
                f"{key} cannot be {getattr(job, key)!r}{_where(job.origins.get(key))}", why, fix
            )
    if resources.memory is not None and not MEMORY.fullmatch(resources.memory):
        raise RunnerError(
            f"cannot read the memory {resources.memory!r}{_where(job.origins.get('memory'))}",
            "the memory per node must be a number, usually with a unit: K, M, G or T",
            '"450G"',
        )
    for key in ("partition", "account"):
        if getattr(resources, key) == "":
            raise RunnerError(
                f"the {key} is empty", "it must be a name", f"give a name, or leave out {key}"
            )


def _check_spares(job: Job) -> None:
    """Raise RunnerError for spare nodes, or a smallest number of nodes, that a restart could not use."""
    resources, restart = job.resources, job.restart
    key = "spare_nodes" if resources.spare_nodes else "min_nodes"
    what = f"{key} = {getattr(resources, key)} cannot be used{_where(job.origins.get(key))}"
    least = resources.min_nodes or 1
    if least > resources.nodes:
        raise RunnerError(
            f"min_nodes = {least} is larger than nodes = {resources.nodes}{_where(job.origins.get('min_nodes'))}",
            "min_nodes is the smallest number of nodes with which the job may continue after it has lost nodes",
            f"use 1 to {resources.nodes}, or leave out min_nodes",
        )
    if job.nodes_held == 1:
        raise RunnerError(
            what, "a job on one node has no other node to continue on", f"leave out {key}"
        )
    if restart is None or not restart.node_failure:
        raise RunnerError(
            what,
            "[restart] does not allow a restart after a node failure",
            "add node_failure = 3 to [restart] in the job file, "
            "or use --restart node_failure=3"
            + (f" --restart time_limit={job.chain - 1}" if job.chain else "")
            + ", which replaces [restart]",
        )
    if restart.in_place is False:
        raise RunnerError(
            what,
            "in_place = false gives the nodes back before each restart",
            "leave out in_place, or use in_place = true",
        )


def _check_site(job: Job, site: Site) -> None:
    if site.is_local:
        if job.nodes_held > 1:
            key, fix = (
                ("nodes", "--nodes 1") if job.resources.nodes > 1 else ("spare_nodes", "--spare 0")
            )
            raise RunnerError(
                f"the job requests {job.nodes_held} nodes{_where(job.origins.get(key))},"
                f" but the site {site.name!r} has only one node",
                "without a scheduler, a job runs on this machine only",
                f"{fix}, or another --site",
            )
        flags = [name for name in ("sbatch", "srun") if job.origins[name].source == "command line"]
        if flags:
            raise RunnerError(
                f"the site {site.name!r} has no sbatch and no srun to pass flags to",
                f"you gave {' '.join(word for name in flags for word in getattr(job, name))}",
                "leave out --sbatch and --srun, or choose another --site",
            )
        return
    cpus = job.resources.cpus_per_task * job.resources.tasks_per_node
    most = (site.cpus_per_gpu or 0) * job.resources.gpus_per_node
    each = most // job.resources.tasks_per_node
    if most and cpus > most:
        raise RunnerError(
            f"the job requests {cpus} CPUs per node, but its GPUs allow only {most}",
            f"the site {site.name!r} allows {site.cpus_per_gpu} CPUs for each GPU",
            f"--cpus-per-task {each}, or request more GPUs"
            if each
            else "use fewer tasks per node, or request more GPUs",
        )
    if lacks_account(job, site):
        raise RunnerError(
            f"the site {site.name!r} requires an account",
            "its Slurm refuses jobs without an account",
            _account_fix(site),
        )


def lacks_account(job: Job, site: Site) -> bool:
    """Whether the site requires an account, and neither the job, the user's environment nor the site sets one."""
    return site.lacks_account(job.resources.account, job.sbatch)


def no_account(site: Site) -> str:
    """The note of a dry run for `lacks_account`."""
    return f"site {site.name} requires an account: {_account_fix(site)}"


def _account_fix(site: Site) -> str:
    once = f"runner init --site {site.name} --account NAME"
    return f"--account NAME, or once for all jobs: {once} (if you have the site file: write `account` into it)"


def _check_chain(links: int, site: Site) -> None:
    if links < 2:
        raise RunnerError(
            f"--chain {links} is too small",
            "a chain needs at least 2 jobs",
            "--chain 5, or leave out --chain",
        )
    if site.is_local:
        raise RunnerError(
            f"the site {site.name!r} has no queue for a chain of jobs",
            "without a scheduler, jobs have no time limit, so a chain is not needed",
            "leave out --chain, and let [restart] in the job file restart the job",
        )


def check_variable(name: str, value: str) -> None:
    """Raise RunnerError for a variable that a shell cannot set, or that runner or the launcher sets for each task."""
    if not _VARIABLE.fullmatch(name):
        raise RunnerError(
            f"cannot set the variable {name!r}",
            "a name consists of letters, digits and `_`, and does not begin with a digit",
            "rename the variable",
        )
    if name.upper().startswith("RUNNER_") and name not in _LAUNCHERS_OWN:
        raise RunnerError(
            f"cannot set the variable {name}",
            "names that begin with RUNNER_ belong to runner",
            "use another name; to set one for runner itself, export it before the launch",
        )
    if name in _LAUNCHERS_OWN:
        raise RunnerError(
            f"cannot set the variable {name}",
            "runner or the launcher sets or unsets it for each task",
            "leave out the variable; nodes, tasks_per_node and launcher determine the ranks",
        )
    if name in _SHELLS_OWN or name.startswith("BASH"):
        raise RunnerError(
            f"cannot set the variable {name}", "shells reserve that name", "use another name"
        )
    _check_shell_text(value, f"the variable {name}")
    if len(f"{name}={value}".encode()) > WORD_BYTES:
        raise RunnerError(
            f"the variable {name} is too long: {len(value.encode())} bytes",
            f"Linux limits a variable to {WORD_BYTES} bytes, name and value together",
            "write the value to a file, and set the variable to the file's name",
        )


def _check_shell_text(text: str, what: str) -> None:
    if "\0" in text:
        raise RunnerError(
            f"{what} contains a NUL character",
            "neither shells nor variables can contain NUL",
            "leave out that character",
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RunnerError(
            f"{what} is not UTF-8 text: {text[:60]!r}",
            "runner writes the batch script as UTF-8, so all text in it must be valid UTF-8",
            "convert the text to UTF-8",
        ) from error


def check_mounts(
    environment: Environment, environ: Mapping[str, str], *, here: bool = False
) -> tuple[str, ...]:
    """Warnings about mounts that cannot be checked on this machine. Raises RunnerError for a missing source.

    `here`: the job runs on this machine, so every mount can be checked.
    """
    notes: list[str] = []
    for mount in environment.mounts:
        if mount in (RUN_MOUNT, CACHE_MOUNT):
            continue
        try:
            source = Path(expand(mount.source, environ, "a mount"))
        except RunnerError as error:
            notes.append(f"the mount {mount.text()} is not checked: {error.what}")
            continue
        if not source.is_absolute():
            notes.append(
                f"the mount {mount.text()} is not checked: its source is relative to the run folder"
            )
            continue
        if source.exists():
            continue
        ancestor = next(parent for parent in source.parents if parent.exists())
        if ancestor == Path("/") and not here:
            notes.append(
                f"the mount source {source} is not on this machine: it must exist on the nodes"
            )
            continue
        missing = source.relative_to(ancestor).parts[0]
        origin = environment.origins.get("mounts." + str(environment.mounts.index(mount)))
        raise RunnerError(
            f"the mount source {source} does not exist" + (f" ({origin})" if origin else ""),
            f"the environment {environment.name!r} mounts it, but {ancestor} has no {missing}",
            f"create that path, or correct the mount in {environment.path or 'the environment'}",
        )
    return tuple(notes)


def path_on_host(
    path: str, environment: Environment, environ: Mapping[str, str], code: Path | None
) -> Path | None:
    """The file on this machine for a path in the container; None if this machine cannot see it.

    Relative paths are those of the code snapshot, which is made from the folder `code`.
    """
    if not path.startswith("/"):
        return None if code is None or "{" in path else code / path
    mounts = [
        mount
        for mount in environment.mounts
        if f"{path}/".startswith(f"{mount.target.rstrip('/')}/")
    ]
    if not mounts and environment.image:
        return None  # a file of the image
    try:
        mount = max(mounts, key=lambda each: len(each.target), default=None)
        here = (
            Path(expand(mount.source, environ, "a mount") + path[len(mount.target) :])
            if mount
            else Path(path)
        )
    except RunnerError:
        return None  # a variable that is defined only in the job
    if not here.is_absolute():
        return None  # below the run folder
    known = next(parent for parent in here.parents if parent.exists())
    return None if known == Path("/") else here


def check_run_folder(folder: Path, site: Site, engine: str) -> None:
    """Raise RunnerError for a path that Slurm or a container engine would misinterpret.

    Source: sbatch(1), "filename pattern"; the mount syntax SOURCE:TARGET of all engines, pyxis' comma between mounts.
    """
    reasons: dict[str, str] = {}
    if not site.is_local:
        reasons |= {
            "%": "which begins a pattern such as %j in Slurm",
            "\\": "which Slurm reads as an escape",
        }
    if engine_of(engine).uses_container:
        reasons |= {
            ":": "which separates the source and the target of a mount",
            ",": "which separates mounts",
        }
    found = [
        f"{character!r}, {why}" for character, why in reasons.items() if character in str(folder)
    ]
    if not str(folder).isprintable():
        found.append("a line break or another character that cannot be printed")
    if found:
        raise RunnerError(
            f"cannot use the runs folder {str(folder)!r}",
            f"the path contains {found[0]}",
            "choose another folder: export RUNNER_RUNS=/path/to/runs",
        )
