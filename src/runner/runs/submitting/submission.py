"""From a plan to a run: its folder written whole, then handed to the scheduler. Nothing half-made stays."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from runner.errors import RunnerError
from runner.images.squashfs_file import with_sha256
from runner.machine import files, folders, process, secrets, sessions
from runner.machine.report import Report
from runner.runs import lock
from runner.runs.asking import dependencies
from runner.runs.asking.dependencies import Waits
from runner.runs.checking import bad_nodes, preflight, room
from runner.runs.checking.preflight import LaunchImage
from runner.runs.code import fingerprint, store
from runner.runs.code.snapshot import Snapshot
from runner.runs.launch import SCRIPT, RunPlan
from runner.runs.run import LATER_JOBS, SUBMITTED, WAITS, Run, save
from runner.runs.schedulers import local, slurm
from runner.runs.secrets import hide_words, refuse_in, write_record

_ESTIMATE_SECONDS = 10.0
_SUBMIT_SECONDS = 180.0  # a controller that is busy, or restarts, is waited for by sbatch itself


def submit(plan: RunPlan, runs: Path, command_line: Sequence[str], report: Report, tags: Sequence[str] = ()) -> Run:
    """Make the run folder and start the job; returns the run. On any failure, Ctrl-C too, the folder is removed."""
    plan = checked(plan, runs, report)
    waits = dependencies.open_ones(plan.waits)
    run = made(plan, runs, command_line, report, tags)
    submitted = False
    try:
        with sessions.uninterrupted():
            if run.scheduler == "local":
                run = start_local(run, waits)
            else:
                run = replace(run, job_ids=(sbatch(run.folder, waits, report),), state=SUBMITTED)
            submitted = True
            save(run)
            run = with_chain(run, plan.job.chain)
        return run
    except BaseException:
        if not submitted:
            folders.remove(run.folder)
        raise


def checked(plan: RunPlan, runs: Path, report: Report) -> RunPlan:
    """The plan with what is found out only where a run is made. Raises RunnerError for a folder that will not do."""
    preflight.check_run_folder(runs, plan.site, plan.engine)
    for note in room.check(runs):
        report.warn(note)
    secrets.check()
    taken = fingerprint.summed(plan.snapshot)
    _tell_left_out(plan.snapshot, taken, report)
    return replace(plan, image=_with_sha256(plan.image, report), snapshot=taken)


def _tell_left_out(before: Snapshot, taken: Snapshot, report: Report) -> None:
    for name, why in taken.left_out[len(before.left_out) :]:
        report.warn(f"not in the code snapshot: {name} ({why})")


def made(
    plan: RunPlan, runs: Path, command_line: Sequence[str], report: Report, tags: Sequence[str] = (), *,
    sweep: str = "", parameters: Mapping[str, str] | None = None,
) -> Run:  # fmt: skip
    """A run that is ready to start, its folder written whole. On any failure the folder is removed."""
    folder = folders.take_numbered(runs, plan.job.name)
    try:
        run = Run(
            name=folder.name,
            folder=folder,
            job=plan.job.name,
            site=plan.site.name,
            scheduler=plan.site.scheduler,
            created=datetime.now().astimezone().isoformat(),
            environment=plan.environment.name,
            engine=plan.engine,
            image=plan.image.reference,
            command_line=hide_words(command_line),
            project=str(plan.program.main or ""),
            slurm=slurm_version() if plan.site.scheduler == "slurm" else {},
            nodes=plan.job.resources.nodes,
            processes_per_node=plan.job.resources.tasks_per_node,
            restarts=plan.job.restart is not None,
            gpu_hours=plan.job.restart.gpu_hours if plan.job.restart else 0,
            tags=tuple(tags),
            sweep=sweep,
            parameters=parameters or {},
            after=tuple(run.name for run in plan.waits.runs),
        )
        save(run)
        write(plan, run, report)
        return run
    except BaseException:
        folders.remove(folder)
        raise


def _with_sha256(image: LaunchImage, report: Report) -> LaunchImage:
    """The image with the sha256 of its file, for the lock. Raises RunnerError where the file cannot be read."""
    squashfs = image.squashfs
    if squashfs is None or squashfs.sha256:
        return image
    report.say(f"computing the sha256 of {squashfs.path.name} ({squashfs.size_bytes / 1e9:.1f} GB) for the lock, once")
    try:
        return replace(image, squashfs=with_sha256(squashfs))
    except OSError as error:
        raise files.explain(error, f"read {squashfs.path}") from error


def slurm_version() -> dict[str, str]:
    """The version in `slurm-wlm 22.05.8` or `slurm 24.05.4`."""
    words = process.run(("sbatch", "--version"), check=False, timeout_seconds=10).stdout.split()
    return {"version": words[-1]} if words else {}


def write(plan: RunPlan, run: Run, report: Report) -> None:
    """Everything in the run folder that the job needs, and the lock."""
    refuse_in(plan.files)
    folders.fill(run.folder, plan.files)
    taken = store.take(plan.snapshot, run.folder, shared=plan.engine != "host")
    _tell_left_out(plan.snapshot, taken, report)
    plan = replace(plan, snapshot=taken)
    fingerprint.check_diff(run.folder)
    write_record(run.folder / "lock.toml", lock.lock_text(lock.tables(plan, run)))


def with_chain(run: Run, links: int) -> Run:
    """The run with the jobs that follow the first one. They are written down one by one: the first may end any time."""
    for _ in range(links - 1):
        job_id = submitted(run.folder, slurm.submit_after(run.folder, run.job_id))
        run = replace(run, job_ids=(*run.job_ids, job_id))
        files.write(run.folder / LATER_JOBS, "".join(f"{each}\n" for each in run.job_ids[1:]))
    return run


def sbatch(folder: Path, waits: Waits, report: Report, script: str = SCRIPT) -> str:
    """The job id of a script in a folder, submitted."""
    _tell_start(folder, script, report)
    excluded = bad_nodes.flags(folder.parent, os.environ, report)
    flags = (*excluded, *dependencies.slurm_flags(waits))
    return submitted(folder, slurm.submit(folder, flags, script=script))


def _tell_start(folder: Path, script: str, report: Report) -> None:
    """Say when the job would start. Where Slurm does not tell, the submission itself is the judge."""
    try:
        done = process.run(slurm.test_only(script), cwd=folder, check=False, timeout_seconds=_ESTIMATE_SECONDS)
    except RunnerError as error:  # a busy controller
        report.detail(f"sbatch --test-only: {error.why}")
        return
    start = slurm.parse_test_only(done.stderr)
    if start:
        report.say(f"estimated start: {start}")
    elif done.exit_code != 0:
        report.warn("sbatch --test-only: " + (done.stderr.strip() or "no answer").splitlines()[-1])


def submitted(folder: Path, argv: Sequence[str]) -> str:
    """The job id that sbatch gave."""
    done = process.run(argv, cwd=folder, check=False, timeout_seconds=_SUBMIT_SECONDS, own_session=True)
    if done.exit_code != 0:
        raise refused(done.stderr.strip() or done.stdout.strip() or f"exit code {done.exit_code}, and no word")
    return slurm.parse_submit(done.stdout)


def refused(words: str) -> RunnerError:
    """The error for a submission that sbatch refused, with its own words and what they usually mean."""
    hints = (
        ("account", "--account NAME; `sacctmgr show associations user=$USER` lists yours where it answers"),
        ("partition", "--partition NAME; `sinfo` lists them"),
        ("time limit", "--time LIMIT, or another --partition; `sinfo -o '%P %l'` shows the limits"),
        ("node configuration", "fewer --nodes, --gpus-per-node or --cpus-per-task; `sinfo -Ne` shows what nodes have"),
        ("node count", "fewer --nodes; `sinfo` shows how many there are"),
        ("memory", "less --memory"),
        ("unable to contact", "the controller does not answer: try again, or ask the admins"),
        ("unrecognized option", "this Slurm does not know that flag: look at --sbatch=… and at the site's flags"),
        ("job array", "fewer combinations: `scontrol show config` tells MaxArraySize"),
        ("qos", "--sbatch=--qos=NAME"),
    )
    fix = next(
        (hint for word, hint in hints if word in words.lower()), "mend what it names; --dry-run shows the script"
    )
    return RunnerError("sbatch refuses the job", words, fix)


def start_local(run: Run, waits: Waits) -> Run:
    """The run with the process that runs its script on this machine, in a session of its own."""
    argv = local.submit(run.folder)
    if waits.runs:
        files.write(run.folder / WAITS, " ".join(each.name for each in waits.runs) + "\n")
        argv = ("bash", "payload/after.sh", *dependencies.local_words(waits))
    pid = process.detached(argv, run.log, cwd=run.folder)
    return replace(
        run, job_ids=(f"local-{pid}",), state=SUBMITTED, host=os.uname().nodename, process=sessions.identity(pid)
    )
