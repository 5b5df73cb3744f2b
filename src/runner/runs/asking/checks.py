"""What a job may say, checked before anything is made: each refusal names the value, the reason and what to do."""

from __future__ import annotations

import re

from runner.errors import RunnerError, unknown
from runner.runs.job import Job, Overrides
from runner.runs.schedulers.quoting import WORD_BYTES
from runner.site import Origin, Site

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MEMORY = re.compile(r"\d+[KMGT]?")

# set for every task by the launcher or by us: another value would break the world size or meet another job's port
_LAUNCHERS_OWN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
# variables that a shell sets, protects or lives by: bash-as-sh, dash and busybox each refuse or change some of them
_SHELLS_OWN = {"_", "IFS", "PWD", "OLDPWD", "OPTIND", "OPTARG", "OPTERR", "PPID", "UID", "EUID", "GROUPS", "LINENO",
               "RANDOM", "SRANDOM", "SECONDS", "EPOCHSECONDS", "EPOCHREALTIME", "SHLVL", "FUNCNAME", "DIRSTACK",
               "PIPESTATUS", "SHELLOPTS", "HISTCMD", "COMP_WORDBREAKS", "POSIXLY_CORRECT"}  # fmt: skip

NOTIFY_EVENTS = ("start", "first_step", "requeue", "failure", "end")
MAIL_EVENTS = ("NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT", "TIME_LIMIT",
               "TIME_LIMIT_90", "TIME_LIMIT_80", "TIME_LIMIT_50", "ARRAY_TASKS")  # fmt: skip


def check(job: Job, site: Site, overrides: Overrides) -> None:
    """Raise RunnerError for the first thing about the job that cannot be, on this site."""
    _check_name(job.name)
    _check_numbers(job)
    _check_site(job, site, overrides)
    if overrides.chain is not None:
        _check_chain(overrides.chain, site)
    for name, value in job.env.items():
        check_variable(name, value)
    for what in ("setup", "task_prolog", "task_epilog"):
        _check_shell_text(getattr(job, what), what)
    for event in job.mail_events:
        if event.upper() not in MAIL_EVENTS:
            raise unknown("mail event", event, MAIL_EVENTS)
    for event in job.notify:
        if event not in NOTIFY_EVENTS:
            raise unknown("event of notify", event, NOTIFY_EVENTS)
    if job.mail_events and not job.mail_user:
        raise RunnerError("mail events without an address", "[mail] has events but no user", 'user = "you@example.org"')
    if job.script is not None and not job.script.endswith((".py", ".sh")):
        raise RunnerError(
            f"cannot run the script {job.script!r}",
            "a script is a .py or a .sh file",
            f"run it as a command: -- {job.script}",
        )


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise RunnerError(
            f"cannot use the job name {name!r}",
            "it becomes the name of the run folder, which is mounted into containers: letters, digits, `.`, `_` and "
            "`-`, beginning with a letter or digit, 60 at most",
            "choose such a name",
        )


def _where(origin: Origin | None) -> str:
    return f" ({origin})" if origin is not None else ""


def _check_numbers(job: Job) -> None:
    resources = job.resources
    least = {"nodes": 1, "gpus_per_node": 0, "tasks_per_node": 1, "cpus_per_task": 1}
    for key, minimum in least.items():
        value = getattr(resources, key)
        if value < minimum:
            raise RunnerError(
                f"{key} is {value}{_where(job.origins.get(key))}", f"it must be at least {minimum}", "give a number"
            )
    if job.save_seconds < 0 or job.save_seconds > 65535:
        raise RunnerError(
            f"save_seconds is {job.save_seconds}{_where(job.origins.get('save_seconds'))}",
            "Slurm gives a warning 0 to 65535 seconds before the time limit",
            "0 for no warning, 120 for two minutes",
        )
    if job.hang_seconds < 0:
        raise RunnerError(
            f"hang_seconds is {job.hang_seconds}{_where(job.origins.get('hang_seconds'))}",
            "it is a time without progress, in seconds",
            "0 for never, 3600 for an hour",
        )
    if resources.memory is not None and not _MEMORY.fullmatch(resources.memory):
        raise RunnerError(
            f"cannot read the memory {resources.memory!r}{_where(job.origins.get('memory'))}",
            "it is a number with K, M, G or T, per node",
            '"450G"',
        )
    for key in ("partition", "account"):
        if getattr(resources, key) == "":
            raise RunnerError(f"the {key} is empty", "an empty name is no name", f"leave out {key}, or name one")


def _check_site(job: Job, site: Site, overrides: Overrides) -> None:
    if site.scheduler == "local":
        if job.resources.nodes > 1:
            raise RunnerError(
                f"the site {site.name!r} has one node, and the job asks for {job.resources.nodes}"
                + _where(job.origins.get("nodes")),
                "without a scheduler a job runs on this machine alone",
                "--nodes 1, or another --site",
            )
        if overrides.sbatch or overrides.srun:
            raise RunnerError(
                f"the site {site.name!r} has no sbatch and no srun to pass flags to",
                f"given: {' '.join((*overrides.sbatch, *overrides.srun))}",
                "leave out --sbatch and --srun, or name another --site",
            )
        return
    cpus = job.resources.cpus_per_task * job.resources.tasks_per_node
    most = (site.cpus_per_gpu or 0) * job.resources.gpus_per_node
    if most and cpus > most:
        raise RunnerError(
            f"the job asks for {cpus} CPUs and {job.resources.gpus_per_node} GPUs per node",
            f"the site {site.name!r} gives {site.cpus_per_gpu} CPUs with each GPU: {most}",
            f"--cpus-per-task {max(1, most // job.resources.tasks_per_node)}, or more GPUs",
        )
    if lacks_account(job, site):
        raise RunnerError(
            f"the site {site.name!r} needs an account",
            "jobs without one are refused there",
            f"--account NAME, or for all jobs: runner init --site {site.name} --account NAME",
        )


def lacks_account(job: Job, site: Site) -> bool:
    """Whether the site refuses the job because nobody has named an account."""
    return site.account_required and job.resources.account is None and not _has_account(job)


def _check_chain(links: int, site: Site) -> None:
    if links < 2:
        raise RunnerError(f"a chain of {links} jobs", "it takes two to make one", "--chain 5, or leave it out")
    if site.scheduler != "slurm":
        raise RunnerError(
            f"the site {site.name!r} has no queue for a chain of jobs",
            "without a scheduler nothing ends a job when its time is over",
            "leave out --chain; [restart] in the job file starts it anew by itself",
        )


def _has_account(job: Job) -> bool:
    return any(word.startswith(("--account=", "-A")) for word in job.sbatch)


def check_variable(name: str, value: str) -> None:
    """Raise RunnerError for a variable that no shell can set, or that another part sets for each task."""
    if not _VARIABLE.fullmatch(name):
        raise RunnerError(
            f"cannot set the variable {name!r}",
            "a name has letters, digits and `_`, and does not begin with a digit",
            "rename it",
        )
    if name in _LAUNCHERS_OWN or name.upper().startswith("RUNNER_"):
        raise RunnerError(
            f"cannot set the variable {name}",
            "the batch script sets it for each task",
            "leave it out; tasks_per_node, nodes and launcher decide about ranks",
        )
    if name in _SHELLS_OWN or name.startswith("BASH"):
        raise RunnerError(f"cannot set the variable {name}", "shells keep it for themselves", "use another name")
    _check_shell_text(value, f"the variable {name}")
    if len(f"{name}={value}".encode()) > WORD_BYTES:
        raise RunnerError(
            f"the variable {name} is {len(value.encode())} bytes long",
            f"Linux gives a program at most {WORD_BYTES} bytes of name and value",
            "write it to a file, and set the variable to the file's name",
        )


def _check_shell_text(text: str, what: str) -> None:
    if "\0" in text:
        raise RunnerError(f"{what} has a NUL character", "neither shells nor variables can hold one", "leave it out")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RunnerError(
            f"{what} is not UTF-8 text: {text[:60]!r}", "the batch script is written in UTF-8", "write it as UTF-8"
        ) from error
