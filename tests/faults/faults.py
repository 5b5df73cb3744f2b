"""All faults by name, and what each run of one is."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.faults import by_hand, by_launch, by_slurm
from tests.faults.case import GIVEN_UP_AFTER, STEPS, Case, Outcome
from tests.lab.processes import LabError


@dataclass(frozen=True)
class Fault:
    """A row of the table."""

    act: Callable[[Case], Outcome]
    description: str
    """what happens in a run"""
    steps: int = STEPS
    config: Sequence[str] = ()
    """lines for slurm.conf"""
    cause: str = ""
    """of every attempt but the last, as it is to be written down; empty: there is one attempt; `*`: that depends"""
    uses: tuple[str, ...] = ()
    """parts of the machine, beside Slurm"""
    by_hand: bool = False
    """whether a person may have to submit the same file again"""

    def explains(self, causes: Sequence[str]) -> bool:
        """Whether the attempts have ended as they are to end."""
        return self.cause == "*" or (set(causes[:-1]) == {self.cause} - {""} and causes[-1:] == ("done",))


GIVEN_UP = (f"SlurmdTimeout={GIVEN_UP_AFTER}",)

FAULTS: Mapping[str, Fault] = {
    "time_limit": Fault(
        by_slurm.time_limit,
        "Slurm signals the job before the time limit, and the program saves a checkpoint",
        steps=450,
        cause="time_limit",
    ),
    "time_limit_ignored": Fault(
        by_slurm.time_limit_ignored,
        "the program ignores the signal, and Slurm kills the program at the time limit",
        steps=450,
        cause="time_limit",
    ),
    "preemption": Fault(
        by_slurm.preemption, "a second job preempts the job, with PreemptMode=REQUEUE", cause="preemption"
    ),
    "preemption_cancel": Fault(
        by_slurm.preemption_cancel, "a second job preempts the job, with PreemptMode=CANCEL", cause="preemption"
    ),
    "scancel": Fault(
        by_slurm.scancel, "the user cancels the job, and later submits the job again", cause="cancelled", by_hand=True
    ),
    "requeue": Fault(by_slurm.requeue, "an administrator requeues the job with scontrol", cause="requeued"),
    "slurmd_killed": Fault(
        by_slurm.slurmd_killed,
        "slurmd is killed on a node, but the job's processes keep running",
        steps=400,
        config=GIVEN_UP,
        cause="node_failure",
    ),
    "slurmd_restarted": Fault(by_slurm.slurmd_restarted, "slurmd is killed on a node, and restarted after 2 s"),
    "node_lost": Fault(
        by_slurm.node_lost,
        "all processes on a node are killed, including slurmd",
        steps=200,
        config=GIVEN_UP,
        cause="node_failure",
    ),
    "node_down": Fault(by_slurm.node_down, "an administrator sets a node to DOWN", cause="node_failure"),
    "slurmctld_running": Fault(
        by_slurm.slurmctld_while_running, "slurmctld is killed while the job runs, and restarted after 3 s"
    ),
    "slurmctld_submitting": Fault(
        by_launch.slurmctld_while_submitting,
        "slurmctld is killed during a launch; a failed launch is repeated",
        by_hand=True,
    ),
    "rank_killed": Fault(by_hand.rank_killed, "one rank is killed with SIGKILL", cause="script_failure"),
    "rank_hung": Fault(
        by_hand.rank_hung,
        "one rank stops making progress, and the batch script ends the job step",
        cause="hang",
    ),
    "oom": Fault(
        by_hand.oom,
        "one rank runs out of host memory, simulated with SIGKILL",
        cause="script_failure",
    ),
    "disk_full": Fault(by_hand.disk_full, "the disk of the run folder is full for 10 s", cause="*", by_hand=True),
    "unreadable": Fault(
        by_hand.unreadable,
        "the run folder cannot be read for 30 s",
        steps=120,
        uses=("/dev/fuse",),
    ),
    "clock_jump": Fault(
        by_hand.clock_jump,
        "the nodes' clock jumps by a day, then a rank is killed",
        steps=120,  # half of them may be over before the clock has jumped
        cause="script_failure",
        uses=("faketime",),
    ),
    "launched_twice": Fault(by_launch.launched_twice, "a job is launched twice at the same moment, as two runs"),
    "submitted_twice": Fault(
        by_hand.submitted_twice, "the batch script of one run is submitted twice at the same moment"
    ),
}


def strike(name: str, number: int) -> Outcome:
    """What became of run `number` under a fault; where the lab itself fails, that is its trouble."""
    fault = FAULTS[name]
    try:
        with Case(number, steps=fault.steps, config=fault.config) as case:
            return fault.act(case)
    except (LabError, AssertionError, OSError, subprocess.SubprocessError) as error:
        return Outcome(False, 0, 0, 0, (), 0.0, f"{type(error).__name__}: {error}")
