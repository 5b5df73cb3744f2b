"""Submission: check the free space, write the run folder and its lock, and start the job."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from runner.doctor import storage
from runner.environments.engines import engine_of
from runner.errors import RunnerError
from runner.images.squashfs_file import with_sha256
from runner.machine import files, folders, secrets, sessions
from runner.machine.report import Report
from runner.runs import after, budget, checks, lock, snapshot
from runner.runs.plan import RunPlan
from runner.runs.run import Dependencies, Run, save
from runner.runs.schedulers.scheduler import scheduler_of
from runner.runs.secrets import hide_words, refuse_in, write_record
from runner.runs.snapshot import Snapshot

_LEAST_BYTES, _LEAST_FILES = 64 << 20, 1000


def check_room(folder: Path) -> tuple[str, ...]:
    """Warnings about a quota that is nearly used up. Raises RunnerError if the file system of the runs is full."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    with suppress(OSError):  # the file system does not tell
        room = os.statvfs(there)
        free = room.f_bavail * room.f_frsize
        why = ""
        if free < _LEAST_BYTES:
            why = (
                f"only {free >> 20} MiB is free, and a run needs at least {_LEAST_BYTES >> 20} MiB"
            )
        elif room.f_files > 0 and room.f_favail < _LEAST_FILES:
            why = f"only {room.f_favail} inodes are free, and a run needs at least {_LEAST_FILES}"
        if why:
            raise RunnerError(
                f"there is not enough space for a run in {folder}",
                f"{why}, so the job may be unable to save checkpoints",
                "free some space (runner gc --runs --older 30d, or delete old checkpoints),"
                " or use another folder: export RUNNER_RUNS=FOLDER",
            )
    with suppress(RunnerError):  # the quota is not known
        found = storage.quota_of_folder(there)
        if found and found.nearly_used_up:
            return (
                f"your quota is nearly used up, so the job may fail to save: {found.text}"
                " (to free space: runner gc --runs --older 30d)",
            )
    return ()


def submit(
    plan: RunPlan, runs: Path, command_line: Sequence[str], report: Report, tags: Sequence[str] = ()
) -> Run:
    """Create the run folder, start the job, and return the run. On any failure or Ctrl-C, the folder is removed."""
    budget.check(plan.budget, runs, plan.most_gpu_hours)
    plan = checked(plan, runs, report)
    waits = after.still_pending(plan.waits)
    run = made(plan, runs, command_line, report, tags)
    return start(run, waits, plan.job.chain, report)


def start(run: Run, waits: Dependencies, links: int, report: Report) -> Run:
    """Start the job of a complete run folder, or the chain of `links` jobs.

    If the first job is rejected, the folder is removed; if a later one is, the run is cancelled.
    """
    with ExitStack() as undo, sessions.uninterrupted():
        undo.callback(folders.remove, run.folder)
        scheduler = scheduler_of(run.scheduler)
        run = scheduler.start(run, waits, report)
        undo.pop_all()
        save(run)
        return scheduler.start_chain(run, links)


def checked(plan: RunPlan, runs: Path, report: Report) -> RunPlan:
    """The plan, completed with facts that a dry run does not need. Raises RunnerError for an unsuitable run folder."""
    checks.check_run_folder(runs, plan.site, plan.engine)
    for note in check_room(runs):
        report.warn(note)
    secrets.check()
    scheduler_of(plan.site.scheduler).check_options(plan.options(), report)
    plan = plan.without_secrets(report)
    taken, image = snapshot.summed(plan.snapshot), plan.image
    _tell_left_out(plan.snapshot, taken, report)
    if (squashfs := image.squashfs) is not None and not squashfs.sha256:
        size = f"{squashfs.size_bytes / 1e9:.1f} GB"
        report.say(
            f"computing the SHA-256 of {squashfs.path.name} ({size}) for the run's lock file (once per image)"
        )
        with files.explained(f"read {squashfs.path}"):
            image = image._replace(squashfs=with_sha256(squashfs))
    return replace(plan, image=image, snapshot=taken)


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
    """A run that is ready to start, with its complete folder. On any failure, the folder is removed."""
    folder = folders.take_numbered(runs, plan.job.name)
    with ExitStack() as undo:
        undo.callback(folders.remove, folder)
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
            slurm=scheduler_of(plan.site.scheduler).version(),
            nodes=plan.job.resources.nodes,
            processes_per_node=plan.job.resources.tasks_per_node,
            restarts=plan.job.restart is not None,
            gpu_hours=plan.job.restart.gpu_hours if plan.job.restart else 0,
            most_gpu_hours=plan.most_gpu_hours,
            tags=tuple(tags),
            sweep=sweep,
            parameters=parameters or {},
            after=tuple(run.name for run in plan.waits.runs),
        )
        save(run)
        _write(plan, run, report)
        undo.pop_all()
    return run


def _write(plan: RunPlan, run: Run, report: Report) -> None:
    """Write all files that the job needs into the run folder, and the lock."""
    refuse_in(plan.files)
    folders.fill(run.folder, plan.files)
    # without a container, the job may change RUN/code
    own = not engine_of(plan.engine).uses_container and plan.in_snapshot
    taken = snapshot.store_files(plan.snapshot, run.folder, shared=not own)
    _tell_left_out(plan.snapshot, taken, report)
    plan = replace(plan, snapshot=taken)
    snapshot.check_diff(run.folder)
    write_record(run.folder / "lock.toml", lock.lock_text(lock.tables(plan, run)))
