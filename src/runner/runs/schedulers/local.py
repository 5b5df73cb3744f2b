"""No scheduler: the same batch script under plain bash, on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.environments.attachment import Attachment
from runner.runs.job import Job
from runner.runs.schedulers import template
from runner.site import Site


def script(job: Job, attachment: Attachment, site: Site) -> str:
    """The batch script; `cd RUN && bash job.sbatch` runs it. payload/processes.sh does srun's part."""
    return template.render(job, attachment, site, directives=(), step=(f"bash payload/processes.sh {job.tasks}",))


def submit(run_folder: Path, flags: Sequence[str] = ()) -> tuple[str, ...]:
    """The command that runs the batch script, in the run folder."""
    return ("bash", "job.sbatch")


def shell(attachment: Attachment, command: Sequence[str]) -> tuple[str, ...]:
    """The words that run a command in the environment; `${NAME}` in them is still to be expanded."""
    return (*attachment.prefix, *command)
