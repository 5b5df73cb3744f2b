"""How long before the time limit a job is told to save: longer than its saves have taken before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from runner.runs.job import Job
from runner.runs.state.metrics_file import newest
from runner.site import Origin

KEY = "checkpoint_seconds"
"""of an entry of metrics.jsonl: how long that save took"""
_RUNS = 10  # the newest of the job; older ones may have had another model
_TAIL_BYTES = 1 << 20
_FACTOR, _EXTRA_SECONDS = 2, 30  # a file system has bad hours; the step that is under way ends first
_MOST = 65535  # sbatch(1), --signal


def with_measured(job: Job, runs: Path) -> Job:
    """The job, warned earlier where a save of one of its earlier runs took longer than `save_seconds` leaves."""
    if not job.save_seconds:
        return job
    seconds, run = max(_measured(job.name, runs), default=(0.0, ""))
    needed = min(math.ceil(_FACTOR * seconds + _EXTRA_SECONDS), _MOST)
    if not run or needed <= job.save_seconds:
        return job
    origin = Origin(f"measured: a save of {run} took {seconds:.0f} s")
    note = f"the job is told to save {needed} s before its limit, not {job.save_seconds}: it took {run} {seconds:.0f} s"
    return replace(job, save_seconds=needed, origins={**job.origins, "save_seconds": origin}, notes=(*job.notes, note))


def _measured(name: str, runs: Path) -> Iterator[tuple[float, str]]:
    """The longest save of each of the newest runs of a job, with the run's name."""
    folders = [path for path in runs.glob(f"{name}-*") if path.name[len(name) + 1 :].isdigit()]
    folders.sort(key=lambda path: int(path.name[len(name) + 1 :]))
    for folder in folders[-_RUNS:]:
        taken = [entry.get(KEY) for entry in newest(folder / "metrics.jsonl", _TAIL_BYTES)]
        longest = max((float(each) for each in taken if isinstance(each, int | float)), default=0.0)
        if longest > 0:
            yield longest, folder.name
