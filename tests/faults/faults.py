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
    remark: str = ""
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
    "time_limit": Fault(by_slurm.time_limit, steps=450, cause="time_limit"),
    "time_limit_deaf": Fault(
        by_slurm.time_limit_deaf, "the training program ignores the warning", steps=450, cause="time_limit"
    ),
    "preemption": Fault(by_slurm.preemption, "PreemptMode=REQUEUE", cause="preemption"),
    "preemption_cancel": Fault(by_slurm.preemption_cancel, "PreemptMode=CANCEL", cause="preemption"),
    "scancel": Fault(by_slurm.scancel, "stays cancelled until it is submitted again", cause="cancelled", by_hand=True),
    "requeue": Fault(by_slurm.requeue, "scontrol requeue", cause="requeued"),
    "slurmd_killed": Fault(
        by_slurm.slurmd_killed,
        "the job's processes keep running; slurmd is restarted once the next attempt is running",
        steps=400,
        config=GIVEN_UP,
        cause="node_failure",
    ),
    "slurmd_restarted": Fault(by_slurm.slurmd_restarted, "killed, and started again after 2 s; no effect"),
    "node_lost": Fault(
        by_slurm.node_lost, "all processes on the node are gone", steps=200, config=GIVEN_UP, cause="node_failure"
    ),
    "node_down": Fault(by_slurm.node_down, "an administrator sets the node to DOWN", cause="node_failure"),
    "slurmctld_running": Fault(
        by_slurm.slurmctld_while_running, "slurmctld is killed while the job runs, and restarted after 3 s; no effect"
    ),
    "slurmctld_submitting": Fault(
        by_launch.slurmctld_while_submitting,
        "a failed launch prints an error and leaves nothing behind; it was repeated",
        by_hand=True,
    ),
    "rank_killed": Fault(by_hand.rank_killed, cause="script_failure"),
    "rank_hung": Fault(by_hand.rank_hung, "the step is ended; the stacks of all ranks are saved", cause="hang"),
    "oom": Fault(by_hand.oom, "simulated with SIGKILL and a recorded message from slurmd", cause="script_failure"),
    "disk_full": Fault(
        by_hand.disk_full, "the disk is full for 10 s; a restart waits for free space", cause="*", by_hand=True
    ),
    "unreadable": Fault(
        by_hand.unreadable,
        "the run folder cannot be read for 30 s (a stopped FUSE mount); no effect",
        steps=120,
        uses=("/dev/fuse",),
    ),
    "clock_jump": Fault(
        by_hand.clock_jump,
        "the clock jumps by a day (libfaketime), then a rank is killed",
        steps=120,  # half of them may be over before the clock has jumped
        cause="script_failure",
        uses=("faketime",),
    ),
    "launched_twice": Fault(by_launch.launched_twice, "two runs are launched at the same moment"),
    "submitted_twice": Fault(
        by_hand.submitted_twice, "one run is submitted twice at the same moment; only one of the jobs runs it"
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
