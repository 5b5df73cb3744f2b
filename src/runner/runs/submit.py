"""Submission: room on the file system, the run folder and its lock, sbatch or a local process."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from runner.doctor import storage
from runner.errors import RunnerError
from runner.images.squashfs_file import with_sha256
from runner.machine import files, folders, process, secrets, sessions
from runner.machine.report import Report
from runner.runs import after, checks, lock, snapshot
from runner.runs.after import Dependencies
from runner.runs.checks import LaunchImage
from runner.runs.launch import SCRIPT, RunPlan
from runner.runs.run import LATER_JOBS, SUBMITTED, WAITS, Run, save
from runner.runs.schedulers import slurm, template
from runner.runs.secrets import hide_words, refuse_in, write_record
from runner.runs.snapshot import Snapshot

_LEAST_BYTES, _LEAST_FILES = 64 << 20, 1000


def check_room(folder: Path) -> tuple[str, ...]:
    """Warnings of a quota that is nearly used up. Raises RunnerError where the file system of the runs is full."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    _check_file_system(folder, there)
    with suppress(RunnerError):  # no quota is known
        found = storage.quota_of_folder(there)
        if found and found.nearly_used_up:
            return (
                f"your quota is nearly used up, so the job may fail to save: {found.text} (to free space: runner gc)",
            )
    return ()


def _check_file_system(folder: Path, there: Path) -> None:
    try:
        room = os.statvfs(there)
    except OSError:
        return
    free, full = room.f_bavail * room.f_frsize, room.f_files > 0 and room.f_favail < _LEAST_FILES
    if free < _LEAST_BYTES or full:
        raise RunnerError(
            f"there is not enough space for a run in {folder}",
            f"only {free >> 20} MiB and {room.f_favail} files are free, so the job could not save",
            "free some space (runner gc, old checkpoints), or use another folder: export RUNNER_RUNS=FOLDER",
        )


FOLDER = "bad-nodes"
_SECONDS = 86_400
_ANSWER_SECONDS = 10.0


def exclude_flags(runs: Path, environ: Mapping[str, str], report: Report) -> tuple[str, ...]:
    """The flag of sbatch that leaves them out; none where there are none, or where Slurm does not say who it is."""
    folder = Path(environ.get("RUNNER_CACHE") or runs / ".cache") / FOLDER
    listed = {path.name: found for path in _files(folder) if (found := read_bad_nodes(path, time.time()))}
    if not listed:
        return ()
    try:
        shown = process.run(("scontrol", "show", "config"), check=False, timeout_seconds=_ANSWER_SECONDS).stdout
        cluster = re.search(r"^ClusterName\s*=\s*(\S+)", shown, re.MULTILINE)
        bad = listed.get(cluster[1], {}) if cluster else {}
        # a name that the cluster no longer has would make sbatch refuse the job
        argv = ("sinfo", "--noheader", "--Node", "--format=%N")
        known = set(process.run(argv, check=False, timeout_seconds=_ANSWER_SECONDS).stdout.split()) if bad else set()
    except RunnerError:
        return ()
    bad = {name: reason for name, reason in bad.items() if name in known}
    for name, reason in bad.items():
        report.say(f"excluding node {name}: {reason} (reported within the last day in {folder})")
    return (f"--exclude={','.join(bad)}",) if bad else ()


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def read_bad_nodes(path: Path, now: float) -> dict[str, str]:
    """Node -> why it is not to be used, from the lines of a list that are not too old."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in lines:
        name, _, rest = line.partition(" ")
        seconds, _, reason = rest.partition(" ")
        if name and seconds.isdigit() and now - int(seconds) < _SECONDS:
            found[name] = reason
    return found


_ESTIMATE_SECONDS = 10.0
_SUBMIT_SECONDS = 180.0  # a controller that is busy, or restarts, is waited for by sbatch itself


def submit(plan: RunPlan, runs: Path, command_line: Sequence[str], report: Report, tags: Sequence[str] = ()) -> Run:
    """Make the run folder and start the job; returns the run. On any failure, Ctrl-C too, the folder is removed."""
    plan = checked(plan, runs, report)
    waits = after.still_pending(plan.waits)
    run = made(plan, runs, command_line, report, tags)
    submitted = False
    try:
        with sessions.uninterrupted():
            run = start(run, waits, report)
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
    checks.check_run_folder(runs, plan.site, plan.engine)
    for note in check_room(runs):
        report.warn(note)
    secrets.check()
    taken = snapshot.summed(plan.snapshot)
    _tell_left_out(plan.snapshot, taken, report)
    return replace(plan, image=_with_sha256(plan.image, report), snapshot=taken)


def _tell_left_out(before: Snapshot, taken: Snapshot, report: Report) -> None:
    for name, why in taken.left_out[len(before.left_out) :]:
        report.warn(f"left out of the code snapshot: {name} ({why})")


def made(
    plan: RunPlan,
    runs: Path,
    command_line: Sequence[str],
    report: Report,
    tags: Sequence[str] = (),
    *,
    sweep: str = "",
    parameters: Mapping[str, str] | None = None,
) -> Run:
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
    size = f"{squashfs.size_bytes / 1e9:.1f} GB"
    report.say(f"computing the SHA-256 of {squashfs.path.name} ({size}) for the run's lock file (once per image)")
    try:
        return image._replace(squashfs=with_sha256(squashfs))
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
    taken = snapshot.store_files(plan.snapshot, run.folder, shared=plan.engine != "host")
    _tell_left_out(plan.snapshot, taken, report)
    plan = replace(plan, snapshot=taken)
    snapshot.check_diff(run.folder)
    write_record(run.folder / "lock.toml", lock.lock_text(lock.tables(plan, run)))


def start(run: Run, waits: Dependencies, report: Report) -> Run:
    """The run with its job, which is submitted, or started on this machine."""
    if run.scheduler == "local":
        return start_local(run, waits)
    return replace(run, job_ids=(sbatch(run.folder, waits, report),), state=SUBMITTED)


def with_chain(run: Run, links: int) -> Run:
    """The run with the jobs that follow the first one. They are written down one by one: the first may end any time."""
    for _ in range(links - 1):
        job_id = submitted(run.folder, slurm.submit_after(run.folder, run.job_id))
        run = replace(run, job_ids=(*run.job_ids, job_id))
        files.write(run.folder / LATER_JOBS, "".join(f"{each}\n" for each in run.job_ids[1:]))
    return run


def sbatch(folder: Path, waits: Dependencies, report: Report, script: str = SCRIPT) -> str:
    """The job id of a script in a folder, submitted."""
    _tell_start(folder, script, report)
    excluded = exclude_flags(folder.parent, os.environ, report)
    flags = (*excluded, *after.slurm_flags(waits))
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
    """The job id that sbatch printed."""
    done = process.run(argv, cwd=folder, check=False, timeout_seconds=_SUBMIT_SECONDS, own_session=True)
    if done.exit_code != 0:
        raise refused(done.stderr.strip() or done.stdout.strip() or f"exit code {done.exit_code}, no message")
    return slurm.parse_submit(done.stdout)


def refused(words: str) -> RunnerError:
    """The error for a submission that sbatch refused, with its own words and what they usually mean."""
    hints = (
        ("account", "--account NAME; `sacctmgr show associations user=$USER` lists your accounts"),
        ("partition", "--partition NAME; `sinfo` lists the partitions"),
        ("time limit", "--time LIMIT, or another --partition; `sinfo -o '%P %l'` shows the limits"),
        (
            "node configuration",
            "fewer --nodes, --gpus-per-node or --cpus-per-task; `sinfo -Ne` shows what the nodes have",
        ),
        ("node count", "fewer --nodes; `sinfo` shows how many nodes there are"),
        ("memory", "less --memory"),
        ("unable to contact", "try again, or ask the admins: the controller does not answer"),
        ("unrecognized option", "check --sbatch=… and the site's flags: this version of Slurm does not have that flag"),
        ("job array", "sweep over fewer combinations; `scontrol show config` prints MaxArraySize"),
        ("qos", "--sbatch=--qos=NAME"),
    )
    fix = next(
        (hint for word, hint in hints if word in words.lower()),
        "fix what sbatch complains about; --dry-run prints the script",
    )
    return RunnerError("sbatch refuses the job", words, fix)


def start_local(run: Run, waits: Dependencies) -> Run:
    """The run with the process that runs its script on this machine, in a session of its own."""
    argv: tuple[str, ...] = template.SUBMIT
    if waits.runs:
        files.write(run.folder / WAITS, " ".join(each.name for each in waits.runs) + "\n")
        argv = ("bash", "payload/after.sh", *after.local_words(waits))
    pid = process.detached(argv, run.log, cwd=run.folder)
    return replace(
        run, job_ids=(f"local-{pid}",), state=SUBMITTED, host=os.uname().nodename, process=sessions.identity(pid)
    )
