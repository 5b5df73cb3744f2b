"""Faults of what a job stands on: its ranks, memory, disk, clock; and people who start things twice."""

from __future__ import annotations

import os
import signal

from tests.faults.case import Case, Outcome

OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId={job}.0. Some of the step tasks have been OOM Killed.\n"


def rank_killed(case: Case) -> Outcome:
    case.start()
    os.kill(case.pid_of(case.chance.randrange(2)), signal.SIGKILL)
    return case.outcome()


def rank_hung(case: Case) -> Outcome:
    """Stopped: no progress for 5 s, stacks, the end, another attempt."""
    case.hang_seconds = 5
    case.start()
    rank = case.chance.randrange(2)
    os.kill(case.pid_of(rank), signal.SIGSTOP)
    outcome = case.outcome()
    other = case.run / f"attempts/1/stacks/rank-{1 - rank}.txt"
    assert "in agree" in other.read_text(), f"no stacks of rank {1 - rank}"
    return outcome


def oom(case: Case) -> Outcome:
    """Simulated: what the kernel does, and what slurmd has been seen to write."""
    job_id = case.start()
    os.kill(case.pid_of(1), signal.SIGKILL)
    with (case.run / "job.log").open("a") as log:
        log.write(OOM.format(job=job_id))
    return case.outcome()
