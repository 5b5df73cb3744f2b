"""All faults by name, and what each run of one is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.faults import by_hand, by_slurm
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


GIVEN_UP = (f"SlurmdTimeout={GIVEN_UP_AFTER}",)

FAULTS: Mapping[str, Fault] = {
    "time_limit": Fault(by_slurm.time_limit, steps=450),
    "preemption": Fault(by_slurm.preemption),
    "scancel": Fault(by_slurm.scancel, "stays cancelled; `sbatch job.sbatch` by hand goes on"),
    "requeue": Fault(by_slurm.requeue),
    "slurmd_killed": Fault(by_slurm.slurmd_killed, config=GIVEN_UP),
    "slurmd_restarted": Fault(by_slurm.slurmd_restarted),
    "node_lost": Fault(by_slurm.node_lost, config=GIVEN_UP),
    "node_down": Fault(by_slurm.node_down),
    "slurmctld_running": Fault(by_slurm.slurmctld_while_running),
    "rank_killed": Fault(by_hand.rank_killed),
    "rank_hung": Fault(by_hand.rank_hung),
    "oom": Fault(by_hand.oom, "simulated: SIGKILL, and slurmd's message as recorded"),
}


def strike(name: str, number: int) -> Outcome:
    """What became of run `number` under a fault; where the lab itself fails, that is its trouble."""
    fault = FAULTS[name]
    try:
        with Case(number, steps=fault.steps, config=fault.config) as case:
            return fault.act(case)
    except (LabError, AssertionError) as error:
        return Outcome(False, 0, 0, 0, (), 0.0, f"{type(error).__name__}: {error}")
