"""`launch --after RUN`: a run that starts when other runs have ended, and can read their folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runner.environments.edf import Mount
from runner.errors import RunnerError
from runner.project import Project
from runner.runs.job import Job
from runner.runs.run import Dependencies, find_runs
from runner.site import Site

PLACE = "{after}"
"""the placeholder, in the user's command, for the folder of the run to wait for"""
FILE = "after"
"""a file of the run folder. It contains the path of that folder, which payload/attempt.sh exports as RUNNER_AFTER"""
MOUNT = Mount("${RUNNER_AFTER}", "${RUNNER_AFTER}", ("ro",))


def mounts(waits: Dependencies) -> tuple[Mount, ...]:
    """The mounts for the job's containers: the folder of the first run, read-only."""
    return (MOUNT,) if waits.runs else ()


def files(waits: Dependencies) -> Mapping[str, str]:
    """Files of the run folder."""
    return {FILE: f"{waits.runs[0].folder}\n"} if waits.runs else {}


def with_folder(job: Job, waits: Dependencies) -> Job:
    """The job with `{after}` in its command replaced. Raises RunnerError if there is not exactly one run."""
    words = (*job.command, *job.arguments)
    if not any(PLACE in word for word in words):
        return job
    if len(waits.runs) != 1:
        raise RunnerError(
            f"cannot fill in {PLACE}: {len(waits.runs) or 'no'} runs are named",
            f"{PLACE} stands for the folder of the run to wait for, so name one run with --after or --after-any",
            f"name one run, or write the path of the folder instead of {PLACE}",
        )
    return job.filled(PLACE, str(waits.runs[0].folder))


def find(
    succeeded: Sequence[str],
    ended: Sequence[str],
    site: Site,
    environ: Mapping[str, str],
    project: Project,
) -> Dependencies:
    """Find the runs that the user named. Raises RunnerError for a run of another cluster."""
    if not succeeded and not ended:
        return Dependencies()
    runs = site.runs(environ, project)
    waits = Dependencies(
        *(
            tuple(run for word in words for run in find_runs(word, runs))
            for words in (succeeded, ended)
        )
    )
    for run in waits.runs:
        if run.scheduler != site.scheduler:
            raise RunnerError(
                f"cannot wait for {run.name}",
                f"{run.name} uses the scheduler {run.scheduler}, but this job uses {site.scheduler}",
                f"--site {run.site}, or launch without --after when {run.name} has ended",
            )
    return waits


def still_pending(waits: Dependencies) -> Dependencies:
    """The runs that have not ended yet. Raises RunnerError if a run of `succeeded` has failed."""
    if not waits.runs:
        return waits
    from runner.runs.status import ask

    found = {status.run.name: status for status in ask(waits.runs)}
    for run in waits.succeeded:
        status = found[run.name]
        if status.state == "PREPARING":
            raise RunnerError(
                f"the run {run.name}, given with --after, has not been submitted yet",
                "it is being launched, or its launch was interrupted",
                f"runner status {run.name}, then launch again",
            )
        if not status.may_be_active and status.state != "COMPLETED":
            code = "" if status.exit_code is None else f", exit code {status.exit_code}"
            raise RunnerError(
                f"the run {run.name}, given with --after, ended as {status.state}{code}",
                f"with --after, a run starts only if {run.name} ends by itself with exit code 0",
                f"runner why {run.name}; to start in any case: --after-any {run.name}",
            )
    kinds = ([found[run.name] for run in runs] for runs in (waits.succeeded, waits.ended))
    return Dependencies(
        *(tuple(status.run for status in some if status.may_be_active) for some in kinds)
    )
