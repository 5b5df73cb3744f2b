"""Slurm's commands: functions that build a command, and functions that parse its output.

Tested with Slurm 22.05; the text formats are the same up to 25.11. Neither sacct nor JSON output, whose structure
changes between versions, is needed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.environments.environment import Attachment
from runner.errors import RunnerError
from runner.runs.job import Resources
from runner.runs.schedulers.scheduler import ACTIVE, JobStatus
from runner.site import Site

if TYPE_CHECKING:
    from runner.runs.run import Dependencies

SUBMIT = "submit.sh"
"""the file of a run folder that submits the user's own batch script (runs/own_script.py)"""
WITHHELD = ("POSIXLY_CORRECT", "SHELLOPTS", "BASHOPTS")
"""variables with which bash would not read BASH_ENV, or would print what it reads"""
_FIELDS = ("JobArrayID", "State", "Reason", "NodeList", "TimeUsed", "TimeLeft", "exit_code")
_FORMAT = ",".join(f"{name}:|" for name in _FIELDS)
_SQUEUE = ("squeue", "--noheader", "--array")


def submit(
    run_folder: Path, flags: Sequence[str] = (), *, script: str = "job.sbatch"
) -> tuple[str, ...]:
    r"""The sbatch command, to run in the run folder. Raises RunnerError for a folder that Slurm cannot write to.

    Slurm interprets `%` and backslashes in the whole path of the output file (22.05: `%j` becomes the job id).
    """
    if set(str(run_folder)) & set("%\\"):
        raise RunnerError(
            f"Slurm cannot write its output to {str(run_folder)!r}",
            r"it reads `%` in a path as a pattern, and `\` as an escape",
            "choose a folder without these characters: export RUNNER_RUNS=FOLDER",
        )
    if (run_folder / SUBMIT).is_file():
        # the job gets the user's BASH_ENV from settings.sh; here, it would change the variables that sbatch passes on
        removed = (f"--unset={name}" for name in ("BASH_ENV", *WITHHELD))
        return ("env", *removed, "bash", str(run_folder / SUBMIT), *flags)
    return (*_outside_of_jobs(os.environ), "sbatch", "--parsable", *flags, script)


def _outside_of_jobs(environ: Mapping[str, str]) -> tuple[str, ...]:
    """A prefix that runs a command without the variables of the job that we are in; empty outside a job.

    Otherwise sbatch would pass them to the new job, whose script would mistake the outer job's array id or restart
    count for its own.
    """
    if "SLURM_JOB_ID" not in environ:
        return ()
    names = sorted(name for name in environ if name.startswith("SLURM_") and name != "SLURM_CONF")
    return ("env", *(f"--unset={name}" for name in names))


def parse_test_only(stderr: str) -> str:
    """When and where the job would start, from `sbatch: Job 5 to start at TIME using ...`; empty if it is missing."""
    found = re.search(r"to start at (\S+)(?: using .*? on (?:nodes )?(\S+))?", stderr)
    return f"{found[1]} on {found[2]}" if found and found[2] else found[1] if found else ""


def dependency_flags(waits: Dependencies) -> tuple[str, ...]:
    """The sbatch flags that make a job wait. If the job can never start, Slurm cancels it."""
    kinds = (("afterok", waits.succeeded), ("afterany", waits.ended))
    words = [":".join((kind, *(run.job_id for run in runs))) for kind, runs in kinds if runs]
    return (f"--dependency={','.join(words)}", "--kill-on-invalid-dep=yes") if words else ()


def submit_after(run_folder: Path, job_id: str) -> tuple[str, ...]:
    """The sbatch command for the next job of a chain, which starts when the one before has ended in any way.

    The argument `again` tells the batch script that this job was not started by a user (payload/restart.sh).
    """
    argv = submit(run_folder, (f"--dependency=afterany:{job_id}",))
    return argv if "bash" in argv else (*argv, "again")  # payload/batch.sh knows it from job_ids


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
    """The squeue command for all these jobs, including ended ones that Slurm still remembers.

    squeue fails for a single unknown id, but ignores unknown ids in a longer list. If the list exceeds the size of an
    argument (131,072 bytes on Linux), the command asks for all jobs of the user instead.
    """
    named = f"--jobs={','.join(job_ids)}"
    return (
        *_SQUEUE,
        "--states=all",
        named if len(named) < 120_000 else "--me",
        f"--Format={_FORMAT}",
    )


def parse_status(stdout: str) -> Mapping[str, JobStatus]:
    """Parse the output of `status`: job id -> status."""
    found: dict[str, JobStatus] = {}
    for line in stdout.splitlines():
        values = [value.strip() for value in line.split("|")]
        if len(values) < len(_FIELDS) or not re.fullmatch(r"\d+(_\d+|\+\d+)?", values[0]):
            continue
        job_id, state, reason, nodes, elapsed, left, code = values[: len(_FIELDS)]
        ended = state not in ACTIVE
        # the batch script of a heterogeneous job runs in its first component, JOB+0
        found[job_id.removesuffix("+0")] = JobStatus(
            state,
            _words(reason),
            _exit_code(code) if ended else None,
            _words(nodes),
            elapsed,
            "" if ended else left,
        )
    return found


def _words(text: str) -> str:
    return "" if text in ("None", "(null)", "n/a", "N/A") else text


def _exit_code(text: str) -> int | None:
    """Convert `CODE:SIGNAL`, or a status of wait(2), to an exit code; 128 + N for signal N."""
    code, colon, number = text.partition(":")
    if not code.isdigit() or (colon and not number.isdigit()):
        return None
    if colon:
        return 128 + int(number) if int(number) else int(code)
    status = int(code)
    return 128 + (status & 0x7F) if status & 0x7F else status >> 8 & 0xFF


def work_folders() -> tuple[str, ...]:
    """The squeue command for the working folders of the user's active jobs."""
    return (*_SQUEUE, "--me", f"--Format={_FORMAT},WorkDir:4096")


def parse_work_folders(stdout: str) -> Mapping[str, tuple[str, JobStatus]]:
    """Parse the output of `work_folders`: folder -> (job id, status)."""
    found: dict[str, tuple[str, JobStatus]] = {}
    for line in stdout.splitlines():
        folder = line.split("|", len(_FIELDS))[-1].strip()
        for job_id, status in parse_status(line).items():
            found[folder] = (job_id, status)
    return found


def gpu_request(gpus: int, site: Site) -> tuple[str, ...]:
    """The flag of sbatch and srun that requests GPUs; empty if the site has none."""
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
    """The srun command that runs a command in the environment. `${NAME}` in the engine's words is not expanded yet.

    With a job id, it runs inside that job's allocation, beside the job's steps; otherwise, in a new allocation.
    Raises RunnerError for a word that srun would interpret itself.
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
            *limits(resources),
        )
    own = ("srun", *place, *(("--pty",) if pty else ()), "--export=ALL")
    return (*own, *attachment.flags, *attachment.prefix, *command)


def limits(resources: Resources) -> tuple[str, ...]:
    """The flags of sbatch and srun for memory, time, partition, account and topology, as far as they are set."""
    time = time_limit_text(resources.time_minutes) if resources.time_minutes else None
    given = {
        "mem": resources.memory,
        "time": time,
        "partition": resources.partition,
        "account": resources.account,
        "switches": resources.switches,
        "segment": resources.segment,
    }
    return tuple(f"--{name}={value}" for name, value in given.items() if value)


_RECORDS = {"tree": "SwitchName", "block": "BlockName", "ring": "RingName", "torus3d": "TorusName"}


def topologies(shown: str) -> set[str]:
    """The kinds of topology in the output of `scontrol show config`, `topology` and, since 25.05, `topoconf`.

    With topology.yaml, each partition can have another one, and TopologyPlugin need not name any of them.
    """
    found = {
        kind: rf"^(TopologyPlugin *= *topology/{kind}$|{name}=|[ -]+{kind}:)"
        for kind, name in _RECORDS.items()
    }
    return {kind for kind, pattern in found.items() if re.search(pattern, shown, re.MULTILINE)}


def time_limit_text(total: int) -> str:
    """Convert minutes to `HH:MM:00`, or to `D-HH:MM:00` if it is at least one day."""
    days, rest = divmod(total, 24 * 60)
    clock = f"{rest // 60:02}:{rest % 60:02}:00"
    return f"{days}-{clock}" if days else clock
