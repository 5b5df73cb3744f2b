"""Faults that Slurm makes: limits, preemption, people with scontrol, daemons and nodes that go away."""

from __future__ import annotations

from runner.runs.schedulers import slurm_commands as scheduler
from tests.faults.case import ENDED, Case, Outcome
from tests.runs.scripts import SLURM, shell_job, write_run


def time_limit(case: Case) -> Outcome:
    """Slurm's own limit: it looks twice a minute, warns, and would end the job 15 s later at the earliest."""
    job_id = case.start()
    case.lab.run(("scontrol", "update", f"JobId={job_id}", "EndTime=now+45"))
    return case.outcome()


def time_limit_ignored(case: Case) -> Outcome:
    """A training that does not listen: Slurm ends it at the limit."""
    (case.folder / "deaf").touch()
    job_id = case.start()
    case.lab.run(("scontrol", "update", f"JobId={job_id}", "EndTime=now+1"))
    return case.outcome()


def preemption(case: Case, *flags: str) -> Outcome:
    """A job of a higher partition takes all nodes for 3 s."""
    case.start(*flags)
    high = write_run(case.folder / "runs" / "high-1", shell_job("sleep 3", nodes=3), site=SLURM)
    case.lab.run(scheduler.submit(high, ("--exclusive", "--partition=high")), cwd=high)
    return case.outcome()


def preemption_cancel(case: Case) -> Outcome:
    """Where the partition has PreemptMode=CANCEL, Slurm forgets the job: the batch script brings it back."""
    return preemption(case, "--partition=cancelled")


def scancel(case: Case) -> Outcome:
    """By mistake. It stays ended; the same file submitted again goes on."""
    job_id = case.start()
    case.lab.run(("scancel", job_id))
    case.lab.wait_for(job_id, ENDED, 60)
    case.pause(3)
    assert not case.active(), "what a person has cancelled has begun again by itself"
    case.by_hand = True
    case.submit()
    return case.outcome()


def requeue(case: Case) -> Outcome:
    """By an admin."""
    job_id = case.start()
    case.lab.run(("scontrol", "requeue", job_id))
    return case.outcome()


def slurmd_killed(case: Case) -> Outcome:
    """Of the batch script's node, whose processes live on; Slurm gives the node up, and later its slurmd is back."""
    case.start()
    node = case.node(0)
    case.lab.stop_node(node)
    case.until((case.run / "attempts" / "2" / "started").exists, 240, "another attempt")
    case.lab.start_node(node)
    return case.outcome()


def slurmd_restarted(case: Case) -> Outcome:
    """Killed, and back after 2 s: the job is not to notice."""
    case.start()
    node = case.node(0)
    case.lab.stop_node(node)
    case.pause(2)
    case.lab.start_node(node)
    return case.outcome()


def node_lost(case: Case) -> Outcome:
    """A crash: nothing of the node is left, and nobody tells Slurm."""
    case.start()
    case.kill_node(case.node(case.chance.randrange(2)))
    return case.outcome()


def node_down(case: Case) -> Outcome:
    """Set so by an admin."""
    case.start()
    node = case.node(case.chance.randrange(2))
    case.set_down(node)
    return case.outcome()


def slurmctld_while_running(case: Case) -> Outcome:
    """Killed, and back after 3 s, with its state."""
    case.start()
    case.lab.stop_controller()
    case.pause(3)
    case.lab.start_controller()
    return case.outcome()
