"""Slurm's commands: pure pairs of a command's words and the reading of what it prints.

Tested on Slurm 22.05; the text formats are the same up to 25.11. No sacct is needed, and no JSON, whose shape changes
between versions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.environments.attachment import Attachment
from runner.errors import RunnerError
from runner.runs.job import Resources, time_limit_text
from runner.runs.schedulers.scheduler import ACTIVE, JobStatus
from runner.site import Site

if TYPE_CHECKING:
    from runner.runs.after import Dependencies

_FIELDS = ("JobArrayID", "State", "Reason", "NodeList", "TimeUsed", "TimeLeft", "exit_code")


def submit(run_folder: Path, flags: Sequence[str] = (), *, script: str = "job.sbatch") -> tuple[str, ...]:
    r"""The sbatch command, to be run in the run folder. Raises RunnerError for a folder that Slurm cannot write to.

    Slurm reads `%` and backslashes in the path of the output, the folder included (22.05: `%j` becomes the job id).
    """
    if set(str(run_folder)) & set("%\\"):
        raise RunnerError(
            f"Slurm cannot write its output to {str(run_folder)!r}",
            r"Slurm reads `%` and `\` in a path as patterns",
            "choose a folder without these characters: export RUNNER_RUNS=FOLDER",
        )
    return (*_outside_of_jobs(os.environ), "sbatch", "--parsable", *flags, script)


def test_only(script: str = "job.sbatch") -> tuple[str, ...]:
    """The sbatch command, to be run in the run folder, that submits nothing and tells when the job would start."""
    return (*_outside_of_jobs(os.environ), "sbatch", "--test-only", script)


def _outside_of_jobs(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The words that start a command without the variables of the job that this runs in; none outside of a job.

    sbatch would hand them on to the new job, whose scripts would take an outer job's array or restarts for its own.
    """
    if "SLURM_JOB_ID" not in environ:
        return ()
    names = sorted(name for name in environ if name.startswith("SLURM_") and name != "SLURM_CONF")
    return ("env", *(f"--unset={name}" for name in names))


def parse_test_only(stderr: str) -> str:
    """When and where the job would start, in `sbatch: Job 5 to start at TIME using ...`; empty where it is not said."""
    found = re.search(r"to start at (\S+)(?: using .*? on (?:nodes )?(\S+))?", stderr)
    return f"{found[1]} on {found[2]}" if found and found[2] else found[1] if found else ""


def dependency_flags(waits: Dependencies) -> tuple[str, ...]:
    """The sbatch flags that make a job wait; it is cancelled, not left in the queue, where it can never start."""
    kinds = (("afterok", waits.succeeded), ("afterany", waits.ended))
    words = [":".join((kind, *(run.job_id for run in runs))) for kind, runs in kinds if runs]
    return (f"--dependency={','.join(words)}", "--kill-on-invalid-dep=yes") if words else ()


def submit_after(run_folder: Path, job_id: str) -> tuple[str, ...]:
    """The sbatch command of a chain's next job: it begins when the one before has ended, however that was.

    The word `again` tells the batch script that no person started this job (payload/restart.sh).
    """
    return (*submit(run_folder, (f"--dependency=afterany:{job_id}",)), "again")


def parse_submit(stdout: str) -> str:
    """Return the job id from `sbatch --parsable` (`ID` or `ID;CLUSTER`). Raises RunnerError otherwise."""
    lines = stdout.strip().splitlines()
    found = re.fullmatch(r"(\d+)(?:;\S*)?", lines[-1].strip()) if lines else None
    if not found:
        raise RunnerError(
            "cannot read the job id that sbatch printed",
            f"sbatch printed {stdout.strip()!r}",
            "check with squeue --me before you try again: the job may have been submitted",
        )
    return found[1]


def status(job_ids: Sequence[str]) -> tuple[str, ...]:
    """The one squeue question about all these jobs, ended ones included while Slurm remembers them.

    A list with one unknown id is refused as a whole only where it has a single id; others are passed over.
    A list that is too long for one word (131,072 bytes on Linux) is not told: all jobs of the user are asked about.
    """
    wanted = ",".join(f"{name}:|" for name in _FIELDS)
    named = f"--jobs={','.join(job_ids)}"
    return (
        "squeue",
        "--noheader",
        "--array",
        "--states=all",
        named if len(named) < 120_000 else "--me",
        f"--Format={wanted}",
    )


def parse_status(stdout: str) -> Mapping[str, JobStatus]:
    """Job id -> status, from what `status` asked for."""
    found: dict[str, JobStatus] = {}
    for line in stdout.splitlines():
        values = [value.strip() for value in line.split("|")]
        if len(values) < len(_FIELDS) or not re.fullmatch(r"\d+(_\d+)?", values[0]):
            continue
        job_id, state, reason, nodes, elapsed, left, code = values[: len(_FIELDS)]
        ended = state not in ACTIVE
        found[job_id] = JobStatus(
            state, _words(reason), _exit_code(code) if ended else None, _words(nodes), elapsed, "" if ended else left
        )
    return found


def _words(text: str) -> str:
    return "" if text in ("None", "(null)", "n/a", "N/A") else text


def _exit_code(text: str) -> int | None:
    """The exit code in `CODE:SIGNAL`, or in a number as wait(2) gives it; 128 + N for signal N."""
    code, colon, number = text.partition(":")
    if not code.isdigit() or (colon and not number.isdigit()):
        return None
    if colon:
        return 128 + int(number) if int(number) else int(code)
    status = int(code)
    return 128 + (status & 0x7F) if status & 0x7F else status >> 8 & 0xFF


def work_folders() -> tuple[str, ...]:
    """The question where the user's jobs that are not over work."""
    return (
        "squeue",
        "--me",
        "--array",
        "--noheader",
        f"--Format={','.join(f'{name}:|' for name in _FIELDS)},WorkDir:4096",
    )


def parse_work_folders(stdout: str) -> Mapping[str, tuple[str, JobStatus]]:
    """Folder -> a job that works there and its status, from what `work_folders` asked for."""
    found: dict[str, tuple[str, JobStatus]] = {}
    for line in stdout.splitlines():
        folder = line.split("|", len(_FIELDS))[-1].strip()
        for job_id, status in parse_status(line).items():
            found[folder] = (job_id, status)
    return found


def cancel(job_ids: Sequence[str]) -> tuple[str, ...]:
    """The command that ends jobs."""
    return ("scancel", *job_ids)


def gpu_request(gpus: int, site: Site) -> tuple[str, ...]:
    """The flag of sbatch and srun that requests GPUs; none where the site has none."""
    if gpus == 0 or site.gpu_request == "none":
        return ()
    return (f"--gres=gpu:{gpus}",) if site.gpu_request == "gres" else (f"--gpus-per-node={gpus}",)


def shell(
    attachment: Attachment,
    command: Sequence[str],
    job_id: str | None = None,
    *,
    pty: bool = True,
    resources: Resources | None = None,
    site: Site | None = None,
) -> tuple[str, ...]:
    """The srun that runs a command in the environment; `${NAME}` in the engine's words is still to be expanded.

    With a job id inside that job's allocation, beside what runs there; else in an allocation of its own.
    Raises RunnerError for a word that srun would take for its own.
    """
    if ":" in command:
        raise RunnerError(
            "cannot pass the argument ':' to a command that srun starts",
            "srun reads a bare colon as the separator between parts of a heterogeneous step",
            "put the command into a script, or into a shell: -- sh -c 'COMMAND :'",
        )
    resources = resources or Resources()
    if job_id is not None:
        place: tuple[str, ...] = (f"--jobid={job_id}", "--overlap", "--nodes=1", "--ntasks=1")
    else:
        place = (
            "--nodes=1",
            "--ntasks=1",
            f"--cpus-per-task={resources.cpus_per_task * resources.tasks_per_node}",
            *(gpu_request(resources.gpus_per_node, site) if site else ()),
            *((f"--mem={resources.memory}",) if resources.memory else ()),
            *((f"--time={time_limit_text(resources.time_minutes)}",) if resources.time_minutes else ()),
            *((f"--partition={resources.partition}",) if resources.partition else ()),
            *((f"--account={resources.account}",) if resources.account else ()),
        )
    return (
        "srun",
        *place,
        *(("--pty",) if pty else ()),
        "--export=ALL",
        *attachment.flags,
        *attachment.prefix,
        *command,
    )
