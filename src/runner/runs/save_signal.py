"""The signals on which the program of a job saves, and a warning if it would not save."""

from __future__ import annotations

import re
from dataclasses import replace

from runner.project import Project
from runner.runs import trainer
from runner.runs.job import Job
from runner.runs.program import Program, program_texts
from runner.site import Origin, Site

VARIABLE = "RUNNER_SAVE_SIGNAL"
"""the variable of each task"""
_OF_RUNNER = re.compile(r"\bRUNNER_SAVE_AND_EXIT\b|\bSIGUSR2\b|^\s*from training\b", re.MULTILINE)
"""in a program that saves on USR2, or when attempts/N/save-and-exit exists"""


def with_save_signal(job: Job, program: Program, project: Project, site: Site) -> Job:
    """The job with the signals of its trainer, if its command or its script shows the trainer.

    Otherwise, the batch script takes the signals of the trainer that it recognizes in the log.
    """
    if job.save_signal or job.trainer == trainer.NONE or not job.save_seconds:
        return job
    text = program_text(job, program)
    if _OF_RUNNER.search(text):
        return job
    saving = trainer.saving(job.trainer, project, text)
    if saving is None or not saving.signals:
        return job
    place = job.origins["trainer"].place if saving.trainer == job.trainer else None
    origin = Origin(f"trainer {saving.trainer}", place=place)
    notes = job.notes
    if not site.is_local and (why := _will_not_save(job, saving, text)):
        notes += (f"the program may not save at the time limit: {why}; add {saving.add}",)
    return replace(
        job, save_signal=saving.signals, origins={**job.origins, "save_signal": origin}, notes=notes
    )


def _will_not_save(job: Job, saving: trainer.Saving, text: str) -> str:
    """Why the program does not handle the signals of its trainer; empty if it does."""
    signals = " and ".join(f"SIG{name}" for name in saving.signals)
    if saving.launchers and job.launcher not in saving.launchers:
        return f"with the launcher {job.launcher}, {saving.trainer} does not handle {signals}"
    if saving.saves and not re.search(saving.saves, text):
        return f"neither its command nor its script sets up {saving.trainer} to save on {signals}"
    return ""


def program_text(job: Job, program: Program) -> str:
    """The words of the job, and the texts of the files that they name in the snapshot."""
    words = ((job.script,) if job.script is not None else job.command) + job.arguments
    return "\n".join([" ".join(words), *program_texts(program, words).values()])
