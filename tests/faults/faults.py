"""All faults by name, and what each run of one is."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.faults import by_hand, by_jobs, by_launch, by_node, by_slurm
from tests.faults.account import misplaced
from tests.faults.case import GIVEN_UP_AFTER, SAVE_EVERY, STEPS, Case, Outcome
from tests.lab.processes import LabError
from tests.lab.slurm import PLUGINS


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
    """of every attempt but the last, as it is to be written down; empty: there is one attempt; `*`: that depends;
    `A|B`: either"""
    rung: str = "*"
    """how each next attempt is started; `*`: that depends"""
    nodes: int = 2
    """of the job, with its spare nodes"""
    ends: str = "completed"
    """how the run ends: completed, stopped (with an explanation) or either"""
    uses: tuple[str, ...] = ()
    """parts of the machine, beside Slurm"""
    plugins: tuple[str, ...] = ()
    """of the lab's Slurm, for containers"""
    modules: tuple[str, ...] = ()
    """Python packages that the training imports"""
    weight: float = 1
    """how many runs there are for each run of another fault"""
    in_suite: int = 1
    """how many runs the ordinary test suite has"""
    by_hand: bool = False
    """whether a person may have to submit the same file again"""
    account: bool = True
    """whether `runner account` has each second in its class"""

    def explains(self, outcome: Outcome) -> bool:
        """Whether the run and its attempts ended as they have to end."""
        rungs, causes = set(outcome.rungs), outcome.causes
        if self.rung != "*" and rungs != {self.rung}:
            return False
        if not outcome.completed:
            return self.ends != "completed" and bool(outcome.stopped)
        if self.ends == "stopped":
            return False
        if self.cause == "*":
            return True
        restarted = bool(self.cause)
        known = set(causes[:-1]) <= set(self.cause.split("|")) and bool(causes[:-1]) == restarted
        return known and causes[-1:] == ("done",)

    def runs(self, times: int) -> int:
        """How many runs there are where other faults have `times`."""
        return round(times * self.weight)

    def passed(self, outcome: Outcome) -> bool:
        """Whether the run survived the fault, or ended as it has to end, at no cost but repeated steps."""
        costs = (outcome.checkpoints_lost, outcome.nodes_held, outcome.given_back, outcome.late_steps)
        wrong = self.account and misplaced(outcome.costs)
        return self.explains(outcome) and not any(costs) and not wrong and outcome.steps_repeated <= SAVE_EVERY


GIVEN_UP = (f"SlurmdTimeout={GIVEN_UP_AFTER}",)

WITH_SPARE: Mapping[str, Any] = {
    "config": GIVEN_UP,
    "nodes": 3,
    "cause": "node_failure",
    "rung": "in_place",
}

TRAININGS = (
    ("sft", by_jobs.our_job, "sft.py", "our job sft under torchrun", ("torch", "trl", "deepspeed")),
    ("clm", by_jobs.our_job, "clm.py", "our job clm under torchrun", ("torch", "transformers", "deepspeed")),
    ("plain_loop", by_jobs.stand_in, "plain_loop.py", "a plain PyTorch loop under torchrun", ("torch",)),
    (
        "lightning",
        by_jobs.stand_in,
        "with_lightning.py",
        "a PyTorch Lightning training under torchrun",
        ("torch", "pytorch_lightning"),
    ),
    (
        "megatron",
        by_jobs.stand_in,
        "like_megatron.py",
        "a training that saves, resumes and prints as Megatron-LM does",
        (),
    ),
)

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
    "node_lost_spare": Fault(
        by_node.node_lost_spare,
        "a node is lost, and the job has a spare node; runner notices it first",
        **WITH_SPARE,
    ),
    "node_lost_spare_slurm": Fault(
        by_node.node_lost_spare_slurm,
        "a node is lost, and the job has a spare node; Slurm notices it first",
        **WITH_SPARE,
    ),
    "node_down_spare": Fault(
        by_node.node_down_spare, "an administrator sets a node to DOWN, and the job has a spare node", **WITH_SPARE
    ),
    "two_nodes_lost": Fault(
        by_node.two_nodes_lost,
        "two of three nodes are lost, with one spare node and min_nodes = 2",
        **{**WITH_SPARE, "nodes": 4},
    ),
    "node_lost_saving": Fault(
        by_node.node_lost_saving,
        "a node is lost while a checkpoint is saved, and the job has a spare node",
        **WITH_SPARE,
    ),
    "node_lost_restarting": Fault(
        by_node.node_lost_restarting,
        "a node is lost, then the spare node that replaces it; the job has another spare node",
        **{**WITH_SPARE, "nodes": 4},
    ),
    "spare_unfit": Fault(
        by_node.spare_unfit,
        "a node is lost, and the GPUs of the spare node fail; every other run has a second spare node",
        **{**WITH_SPARE, "nodes": 4, "rung": "*"},
    ),
    "first_node_lost": Fault(
        by_node.first_node_lost,
        "the node of the batch script is lost, and the job has a spare node",
        **{**WITH_SPARE, "rung": "*"},
    ),
    "gpu_error": Fault(
        by_node.gpu_error,
        "a rank fails with a GPU error, and nvidia-smi fails on its node; the job has a spare node",
        **WITH_SPARE,
    ),
    "nccl_timeout": Fault(
        by_node.nccl_timeout,
        "NCCL's watchdog aborts a rank after a time-out, and the job has a spare node",
        **{**WITH_SPARE, "cause": "hang"},
    ),
    "no_nodes_left": Fault(
        by_node.no_nodes_left,
        "a node and the only spare node are lost, and Slurm refuses further jobs",
        # so many steps that the training goes on while the test prepares Slurm
        **{**WITH_SPARE, "rung": "*", "ends": "stopped", "steps": 3 * STEPS},
    ),
    "slurmctld_running": Fault(
        by_slurm.slurmctld_while_running, "slurmctld is killed while the job runs, and restarted after 3 s"
    ),
    "slurmctld_submitting": Fault(
        by_launch.slurmctld_while_submitting,
        "slurmctld is killed during a launch; a failed launch is repeated",
        by_hand=True,
    ),
    "rank_killed": Fault(
        by_hand.rank_killed, "one rank is killed with SIGKILL", cause="script_failure", rung="in_place"
    ),
    "rank_hung": Fault(
        by_hand.rank_hung,
        "one rank stops making progress, and the batch script ends the job step",
        cause="hang",
        rung="in_place",
    ),
    "helper_killed": Fault(
        by_jobs.helper_killed,
        "a process of the batch script is killed at a random moment",
        **{**WITH_SPARE, "cause": "*", "rung": "*", "ends": "either"},
        steps=90,  # the process is killed up to 2 s after the step that other faults wait for
        account=False,  # what was killed may have been about to write a part of it
        weight=2.5,
        in_suite=2,
    ),
    "own_script": Fault(
        by_launch.own_script,
        "one rank of a user's own batch script is killed; in_place = true",
        cause="script_failure",
        rung="in_place",
    ),
    "container_left": Fault(
        by_launch.container_left,
        "all processes of a step on one node are killed, and its container is left behind",
        cause="hang|script_failure",  # whether the task's shell is killed before it writes how its program ended
        rung="in_place",
        plugins=PLUGINS,
        uses=("gcc, spank.h", "unsquashfs", "squashfuse", "/dev/fuse", "mmdebstrap", "tar2sqfs"),
    ),
    "oom": Fault(
        by_hand.oom,
        "one rank runs out of host memory, simulated with SIGKILL; in_place = false",
        cause="script_failure",
        rung="requeue",
    ),
    **{
        name: Fault(
            partial(act, file),
            f"one rank of {description} is killed after a save",
            cause="script_failure",
            rung="in_place",
            modules=modules,
            in_suite=0 if modules else 1,
        )
        for name, act, file, description, modules in TRAININGS
    },
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
        account=False,  # of what the ranks measure, and of what the account reads, some times are wrong by a day
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
        with Case(number, steps=fault.steps, config=fault.config, nodes=fault.nodes, plugins=fault.plugins) as case:
            try:
                return fault.act(case)
            except (LabError, AssertionError) as error:
                return failed(error, case.story())
    except (LabError, AssertionError, OSError, subprocess.SubprocessError) as error:
        return failed(error)


def failed(error: Exception, story: str = "") -> Outcome:
    return Outcome(False, 0, 0, 0, (), 0.0, trouble=f"{type(error).__name__}: {error}\n{story}")
