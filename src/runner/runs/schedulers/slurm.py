"""Slurm: the batch script, submission, status and cancellation. slurm_commands.py has the commands."""

from __future__ import annotations

import os
import re
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runner import quoting
from runner.environments.environment import Attachment
from runner.errors import RunnerError
from runner.machine import files, process
from runner.machine.report import Report
from runner.runs.job import Job
from runner.runs.schedulers import slurm_commands
from runner.runs.schedulers.flags import CPUS, merge, option, refuse, refuse_of_site
from runner.runs.schedulers.scheduler import ACTIVE, Forecast, JobStatus, from_exit_code
from runner.runs.schedulers.template import excluded_nodes, joined, render
from runner.site import Site

if TYPE_CHECKING:
    from runner.runs.run import Dependencies, Run

PROGRAMS: tuple[str, ...] = ("sbatch",)
BY_HAND = "sbatch job.sbatch"
STATE_SOURCE = "Slurm"
PAUSES = (2.0, 15.0)
_ESTIMATE_SECONDS = _CONFIG_SECONDS = 10.0
_SUBMIT_SECONDS = 180.0  # sbatch itself waits for a controller that is busy or restarts
_BAD_NODE_SECONDS = 86_400
_ANSWER_SECONDS = (
    30.0  # a busy controller may answer slowly, but one that is down must not block for minutes
)


def script(job: Job, attachment: Attachment, site: Site) -> str:
    """The batch script; `cd RUN && sbatch job.sbatch` submits it."""
    refuse((*site.sbatch, *job.sbatch), "sbatch")
    taken = {option(word, "srun")[0]: "the environment" for word in attachment.flags}
    if job.keeps_nodes:
        taken |= dict.fromkeys(("nodelist", "exclude", "relative"), "spare_nodes or min_nodes")
    refuse((*site.srun, *job.srun), "srun", taken)
    directives = merge(_directives(job, site), site.sbatch, job.sbatch, "sbatch")
    refuse_of_site((*directives, *site.srun, *job.srun), site.refused, site.name)
    return render(
        job, attachment, site, directives=directives, step=_step(job, attachment, site, directives)
    )


def _directives(job: Job, site: Site) -> tuple[str, ...]:
    resources = job.resources
    return (
        f"--job-name={job.name}",
        f"--nodes={job.nodes_held}",
        *(("--no-kill",) if job.keeps_nodes else ()),
        f"--ntasks-per-node={job.tasks_per_node}",
        f"--cpus-per-task={job.cpus_per_step_task}",
        *slurm_commands.gpu_request(resources.gpus_per_node, site),
        *slurm_commands.limits(resources),
        "--output=job.log",
        "--open-mode=append",
        # without [restart], the cluster's default
        *(
            ("--requeue" if site.restart_by == "requeue" else "--no-requeue",)
            if job.restart
            else ()
        ),
        # B: signal only the batch shell, because a signal to the step would end every process without a handler
        *((f"--signal=B:USR2@{job.save_seconds}",) if job.save_seconds else ()),
        *((f"--mail-user={job.mail_user}",) if job.mail_user else ()),
        *((f"--mail-type={','.join(job.mail_events).upper()}",) if job.mail_events else ()),
    )


def _step(
    job: Job, attachment: Attachment, site: Site, directives: Sequence[str]
) -> tuple[str, ...]:
    """The srun command with its flags, quoted, as lines."""
    by_task = any(option(word, "sbatch")[0] == "cpus-per-task" for word in directives)
    nodes: tuple[str, ...] = (f"--nodes={job.resources.nodes}", f"--ntasks={job.tasks}")
    if job.keeps_nodes:  # place_ranks (payload/nodes.sh) sets the variables for each attempt
        nodes = (
            "--nodes=${RUNNER_NODES}",
            "--ntasks=${RUNNER_TASKS}",
            "--nodelist=${RUNNER_NODELIST}",
        )
    own = (
        *nodes,
        f"--ntasks-per-node={job.tasks_per_node}",
        # repeated, because not every Slurm passes it on to srun; --cpus-per-gpu excludes it, and is always passed on
        *(("--cpus-per-task=${SLURM_CPUS_PER_TASK}",) if by_task else ()),
        "--distribution=block",
        "--kill-on-bad-exit=1",
        "--export=ALL",
    )
    given = merge((), site.srun, job.srun, "srun")  # the user's flags take precedence
    names = {option(word, "srun")[0] for word in given}
    names |= CPUS if names & CPUS else set()
    ours = [quoting.live(word) for word in own if option(word, "srun")[0] not in names]
    theirs = [quoting.literal(word, f"the srun flag {word[:60]!r}") for word in given]
    engine = [quoting.live(word) for word in attachment.flags]
    return (*joined(("srun", *ours)), *theirs, *engine)


def version() -> dict[str, str]:
    """Slurm's version, from `slurm-wlm 22.05.8` or `slurm 24.05.4`."""
    words = process.run(("sbatch", "--version"), check=False, timeout_seconds=10).stdout.split()
    return {"version": words[-1]} if words else {}


# option -> the topologies that it needs, and the first Slurm with it; with others, Slurm ignores the option.
# Source: src/plugins/topology and CHANGELOG of Slurm 22.05 to 26.05
_PLACEMENT = {"switches": (("tree",), (0, 0)), "segment": (("block", "ring", "torus3d"), (24, 5))}


def check_options(options: Iterable[str], report: Report) -> None:
    """Raise RunnerError for --switches or --segment if this cluster's Slurm has no topology for it."""
    wanted = [name for name in _PLACEMENT if name in options]
    shown = (
        "".join(_scontrol_show(what) for what in ("config", "topology", "topoconf"))
        if wanted
        else ""
    )
    version = re.search(r"^SLURM_VERSION *= *((\d+)\.(\d+)\S*)", shown, re.MULTILINE)
    for name in wanted:
        kinds, since = _PLACEMENT[name]
        if version is None:
            report.warn(f"--{name} is not checked: `scontrol show config` does not answer")
        elif (int(version[2]), int(version[3])) < since:
            why = f"--{name} came with Slurm {since[0]}.{since[1]:02}, and the cluster has {version[1]}"
            raise RunnerError(
                f"this cluster's Slurm does not have --{name}",
                why,
                f"leave out --{name}, or `{name}` in the job file",
            )
        elif not slurm_commands.topologies(shown) & set(kinds):
            plugin = re.search(r"^TopologyPlugin *= *(\S+)", shown, re.MULTILINE)
            needed = " or ".join(f"topology/{kind}" for kind in kinds)
            why = f"it needs {needed}, and the cluster has {plugin[1] if plugin else 'none'}: Slurm would ignore it"
            raise RunnerError(
                f"--{name} has no effect on this cluster",
                why,
                f"leave out --{name}, or `{name}` in the job file",
            )


def _scontrol_show(what: str) -> str:
    """The output of `scontrol show`; empty if it fails, as for what an older Slurm does not know."""
    with suppress(RunnerError):
        return (
            process.run(
                ("scontrol", "show", what), check=False, timeout_seconds=_CONFIG_SECONDS
            ).stdout
            + "\n"
        )
    return ""


def start(run: Run, waits: Dependencies, report: Report) -> Run:
    """Submit the job, and return the run with it."""
    if task := run.parameters.get(
        "SLURM_ARRAY_TASK_ID"
    ):  # a task of the user's own array, launched again
        return run.with_jobs(
            f"{_sbatch(run.folder, waits, report, 'job.sbatch', f'--array={task}')}_{task}"
        )
    return run.with_jobs(_sbatch(run.folder, waits, report, "job.sbatch"))


def start_sweep(
    folder: Path, runs: Sequence[Run], waits: Dependencies, at_once: int | None, report: Report
) -> tuple[Run, ...]:
    """Submit the runs as tasks of one array job. Its script limits how many run `at_once`."""
    if _place(folder) is not None and _place(runs[0].folder) is None:
        return _one_by_one(runs, waits, at_once, report)
    job_id = _sbatch(folder, waits, report, "array.sbatch")
    report.detail(f"array job {job_id}")
    return tuple(
        run.with_jobs(f"{job_id}_{run.parameters.get('SLURM_ARRAY_TASK_ID', n)}")
        for n, run in enumerate(runs)
    )


def _one_by_one(
    runs: Sequence[Run], waits: Dependencies, at_once: int | None, report: Report
) -> tuple[Run, ...]:
    """Submit each run of a sweep over a user's own batch script. If one is rejected, the others are cancelled."""
    started: list[Run] = []
    try:
        for run in runs:
            before = started[-at_once:][:1] if at_once and len(started) >= at_once else ()
            started.append(start(run, waits._replace(ended=(*waits.ended, *before)), report))
    except BaseException:
        if started:
            _cancel([run.job_id for run in started])
        raise
    return tuple(started)


def start_chain(run: Run, links: int) -> Run:
    """Submit the jobs that follow the first one. Each is recorded at once: the first job may end at any time.

    If one is rejected, the others are cancelled. The run stays, because its first job may have started.
    """
    from runner.runs.run import CANCELLED, LATER_JOBS, STOP, save  # a dry run does not need it

    try:
        for _ in range(links - 1):
            argv = slurm_commands.submit_after(run.folder, run.job_id)
            job_id = _submitted(run.folder, argv, "job.sbatch")
            run = run.with_jobs(*run.job_ids, job_id)
            files.write(run.folder / LATER_JOBS, "".join(f"{each}\n" for each in run.job_ids[1:]))
    except BaseException as error:
        files.write(run.folder / STOP, "its chain could not be submitted\n")
        save(replace(run, state=CANCELLED))
        outcome = "is cancelled"
        if not _cancel(run.job_ids):
            outcome = f"may still run (scancel {' '.join(run.job_ids)})"
        if isinstance(error, RunnerError):
            number = len(run.job_ids) + 1
            error.what = f"{run.name} {outcome}: job {number} of {links}: {error.what}"
        raise
    return run


def _cancel(job_ids: Sequence[str]) -> bool:
    """Whether scancel could cancel the jobs. It raises nothing: the error that made it necessary is the one to see."""
    with suppress(RunnerError):
        return process.run(("scancel", *job_ids), check=False, timeout_seconds=120).exit_code == 0
    return False


def _sbatch(folder: Path, waits: Dependencies, report: Report, script: str, *more: str) -> str:
    """Submit a script in a folder, and return the job id."""
    _tell_start(folder, script, report)
    excluded: tuple[str, ...] = ()
    if _place(folder) is not None:
        own = _excluded_by_user(folder / script)
        excluded = exclude_flags(folder.parent, os.environ, report, own)
    flags = (*excluded, *slurm_commands.dependency_flags(waits), *more)
    return _submitted(folder, slurm_commands.submit(folder, flags, script=script), script)


def without_overriding(text: str) -> tuple[str, ...]:
    """A prefix that runs sbatch without the SBATCH_* variables that would override an option of a batch script.

    A dry run shows the script, and the script relies on its own options, such as --open-mode.
    """
    if not any(name.startswith("SBATCH_") for name in os.environ):
        return ()
    from runner.runs.schedulers import directives  # most launches do not need it

    names = directives.overriding(text, os.environ)
    return ("env", *(f"--unset={name}" for name in names)) if names else ()


def _removed(folder: Path, script: str) -> tuple[str, ...]:
    """`without_overriding` for a script in a folder; empty for a user's own batch script."""
    return without_overriding(files.text_of(folder / script)) if _place(folder) else ()


def _place(folder: Path) -> Path | None:
    """The folder in which sbatch runs; None for a user's own batch script, which starts in the current folder."""
    return None if (folder / slurm_commands.SUBMIT).is_file() else folder


def _tell_start(folder: Path, script: str, report: Report) -> None:
    """Report when the job would start. Errors are ignored, because the submission itself will report them."""
    try:
        argv = slurm_commands.submit(folder, ("--test-only",), script=script)
        argv = (*_removed(folder, script), *argv)
        done = process.run(argv, cwd=_place(folder), check=False, timeout_seconds=_ESTIMATE_SECONDS)
    except RunnerError as error:  # a busy controller
        report.detail(f"sbatch --test-only: {error.why}")
        return
    start = slurm_commands.parse_test_only(done.stderr)
    if start:
        report.say(f"estimated start: {start}")
    elif done.exit_code != 0:
        report.warn("sbatch --test-only: " + (done.stderr.strip() or "no answer").splitlines()[-1])


_NO_ANSWER = re.compile(
    r"unable to contact|configuration source|timed out|Zero Bytes|connect", re.IGNORECASE
)


def ask(argv: Sequence[str], folder: Path, script: str | None = None) -> Forecast:
    """What Slurm says about an `sbatch --test-only` command, which submits nothing. `script`: its stdin."""
    # as in a submission (slurm_commands.submit): bash would run BASH_ENV in the wrapper of sbatch that some sites have
    removed = (f"--unset={name}" for name in ("BASH_ENV", *slurm_commands.WITHHELD))
    argv = ("env", *removed, *argv)
    try:
        done = process.run(
            argv, cwd=folder, text_input=script, check=False, timeout_seconds=_ESTIMATE_SECONDS
        )
    except RunnerError as error:
        return Forecast(None, why=error.why)
    said = (done.stderr.strip() or "it printed no message").removeprefix("allocation failure: ")
    if start := slurm_commands.parse_test_only(done.stderr):
        return Forecast(True, start)
    if done.exit_code:
        return Forecast(None if _NO_ANSWER.search(said) else False, why=said)
    return Forecast(True)


def _submitted(folder: Path, argv: Sequence[str], script: str) -> str:
    """Run sbatch, and return the job id that it prints."""
    argv = (*_removed(folder, script), *argv)
    try:
        done = process.run(
            argv, cwd=_place(folder), check=False, timeout_seconds=_SUBMIT_SECONDS, own_session=True
        )
    except process.TimedOut as error:
        error.fix = "squeue --me shows whether the job was submitted; if it was not, launch again"
        raise
    if done.exit_code != 0:
        raise refused(
            done.stderr.strip() or done.stdout.strip() or f"exit code {done.exit_code}, no message"
        )
    return slurm_commands.parse_submit(done.stdout)


def refused(words: str) -> RunnerError:
    """The error for a rejected submission, with sbatch's message and its usual cause."""
    hints = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text("utf-8"))
    rest = "fix the setting that sbatch names; --dry-run prints the script"
    fix = next((hint for word, hint in hints.items() if word in words.lower()), rest)
    return RunnerError("sbatch rejected the job", words, fix)


def _excluded_by_user(script: Path) -> str:
    """The nodes that the script's `#SBATCH` lines exclude; empty if there are none, or if a file lists them."""
    lines = files.text_of(script).splitlines()
    flags = (line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH "))
    return excluded_nodes([flag for flag in flags if flag.startswith(("--exclude", "-x"))])


def exclude_flags(
    runs: Path, environ: Mapping[str, str], report: Report, own: str = ""
) -> tuple[str, ...]:
    """The flag of sbatch that excludes bad nodes; empty if there are none, or if the cluster's name is not known.

    `own`: the nodes that the user excludes. sbatch would take only the newer of two such flags.
    """
    folder = Path(environ.get("RUNNER_CACHE") or runs / ".cache") / "bad-nodes"
    listed = {
        path.name: found
        for path in sorted(folder.glob("*"))
        if (found := _bad_nodes(path, time.time()))
    }
    if not listed:
        return ()
    try:
        cluster = re.search(r"^ClusterName\s*=\s*(\S+)", _scontrol_show("config"), re.MULTILINE)
        bad = listed.get(cluster[1], {}) if cluster else {}
        # sbatch rejects a job that excludes a node which the cluster no longer has
        argv = ("sinfo", "--noheader", "--Node", "--format=%N")
        known = (
            set(process.run(argv, check=False, timeout_seconds=_CONFIG_SECONDS).stdout.split())
            if bad
            else set()
        )
    except RunnerError:
        return ()
    bad = {name: reason for name, reason in bad.items() if name in known}
    for name, reason in bad.items():
        report.say(f"excluding node {name}: {reason} (reported within the last day in {folder})")
    excluded = (own, *bad) if own else tuple(bad)
    return (f"--exclude={','.join(excluded)}",) if bad else ()


def _bad_nodes(path: Path, now: float) -> dict[str, str]:
    """Node -> reason to avoid it, from the recent lines of the list."""
    found: dict[str, str] = {}
    for line in files.text_of(path).splitlines():
        name, _, rest = line.partition(" ")
        seconds, _, reason = rest.partition(" ")
        if name and seconds.isdigit() and now - int(seconds) < _BAD_NODE_SECONDS:
            found[name] = reason
    return found


def statuses(runs: Sequence[Run]) -> Sequence[tuple[Run, JobStatus]]:
    """Each run with its status and its manually submitted jobs. Calls squeue at most twice for all runs."""
    queue, trouble = _queue([job_id for run in runs for job_id in run.job_ids])
    runs, queue = _with_jobs_by_hand(runs, queue)
    return [(run, status_of(run, queue, trouble)) for run in runs]


def _queue(job_ids: Sequence[str]) -> tuple[Mapping[str, JobStatus], str]:
    """(job id -> status for the jobs that squeue knows, the reason if squeue fails)."""
    shown, trouble = _squeue(slurm_commands.status(job_ids)) if job_ids else ("", "")
    return slurm_commands.parse_status(shown), trouble


def _squeue(argv: Sequence[str]) -> tuple[str, str]:
    """(the output of squeue, the reason if it fails). The user's SQUEUE_* variables would leave jobs out."""
    argv = (*process.without("SQUEUE_"), *argv)
    try:
        done = process.run(argv, check=False, timeout_seconds=_ANSWER_SECONDS)
    except RunnerError as error:
        return "", f"squeue does not answer: {error.why}"
    if done.exit_code != 0 and "Invalid job id" not in done.stderr:
        return "", f"squeue: {(done.stderr.strip() or 'no answer').splitlines()[-1]}"
    return done.stdout, ""


def _with_jobs_by_hand(
    runs: Sequence[Run], queue: Mapping[str, JobStatus]
) -> tuple[Sequence[Run], Mapping[str, JobStatus]]:
    """Add pending jobs that a user submitted in a run folder without runner to the runs and the queue.

    No file records such a job before it starts, but Slurm knows the folder from which it was submitted.
    """
    idle = [run for run in runs if not _live(run, queue)]
    jobs = _jobs_by_folder()[0] if idle else {}
    found = {
        run.name: jobs[folder] for run in idle if (folder := str(run.folder.resolve())) in jobs
    }
    with_jobs = [
        replace(run, job_ids=tuple(dict.fromkeys((*run.job_ids, found[run.name][0]))))
        if run.name in found
        else run
        for run in runs
    ]
    return with_jobs, {**queue, **dict(found.values())}


def _jobs_by_folder() -> tuple[Mapping[str, tuple[str, JobStatus]], str]:
    """(folder -> an active job of the user that was submitted there, the reason if squeue fails)."""
    shown, trouble = _squeue(slurm_commands.work_folders())
    return slurm_commands.parse_work_folders(shown), trouble


def work_folders() -> tuple[set[Path], str]:
    """(the folders from which the user's jobs were submitted, the reason if squeue fails)."""
    jobs, trouble = _jobs_by_folder()
    return {Path(folder).resolve() for folder in jobs}, trouble


def status_of(run: Run, queue: Mapping[str, JobStatus], trouble: str) -> JobStatus:
    """The status of a run, from squeue's answer about its jobs, or the reason why squeue failed."""
    from runner.runs.run import is_cancelled, is_over  # a dry run does not need it

    code = run.newest.exit_code if run.newest else None
    live = _live(run, queue)
    job_id = _job_that_counts(run, queue, live)
    known = queue.get(job_id)
    if known is not None:
        # a script that has written its exit code has finished its work, even if it is still notifying
        leaving = known.state in ("RUNNING", "COMPLETING") and bool(run.attempts) and is_over(run)
        # attempts of an array task record the task's own job id
        leaving = leaving and ("_" in job_id or run.attempts[-1].job_id == job_id)
        state = from_exit_code(run, code).state if leaving and code is not None else known.state
        if state not in ACTIVE and state != "COMPLETED" and is_cancelled(run):
            state = "CANCELLED"
        return known._replace(
            state=state,
            reason=run.cancel_reason if state == "CANCELLED" else known.reason,
            exit_code=known.exit_code if known.exit_code is not None else code,
            time_left=known.time_left if state in ACTIVE else "",
            job_id=job_id,
            live=live,
        )
    # while squeue fails, another attempt may still wait in the queue
    if code is not None and (not trouble or is_over(run) or is_cancelled(run)):
        return from_exit_code(run, code, trouble)
    if is_cancelled(run):
        return JobStatus("CANCELLED", run.cancel_reason)
    if trouble:
        return JobStatus("UNKNOWN", trouble, code)
    if run.after and not run.attempts:
        return JobStatus(
            "CANCELLED",
            f"not started: it was cancelled, or {' '.join(run.after)} did not end with exit code 0",
        )
    return JobStatus(
        "LOST", "Slurm no longer knows the job, and the job wrote no exit code (killed at a limit?)"
    )


def _live(run: Run, queue: Mapping[str, JobStatus]) -> tuple[str, ...]:
    """The jobs of a run that are pending or running."""
    return tuple(
        job_id for job_id in run.job_ids if job_id in queue and queue[job_id].state in ACTIVE
    )


def _job_that_counts(run: Run, queue: Mapping[str, JobStatus], live: Sequence[str]) -> str:
    """The job of a run that determines its status: the running one, or the next one, or the last that started."""
    if len(run.job_ids) == 1:
        return run.job_id
    running = [job_id for job_id in live if queue[job_id].state != "PENDING"]
    began = [job_id for job_id in (run.newest.job_id if run.newest else "",) if job_id in queue]
    known = [job_id for job_id in reversed(run.job_ids) if job_id in queue and not run.attempts]
    return (*running, *live, *began, *known, run.job_id)[0]


def explain_cancel(runs: Sequence[Run]) -> Iterator[str]:
    """The command that ends the jobs of these runs."""
    if job_ids := [job_id for run in runs for job_id in run.job_ids]:
        yield " ".join(("scancel", *job_ids))


def cancel(jobs: Sequence[tuple[Run, tuple[str, ...]]], report: Report) -> None:
    process.run(
        ("scancel", *(job_id for _, job_ids in jobs for job_id in job_ids)), timeout_seconds=120
    )
