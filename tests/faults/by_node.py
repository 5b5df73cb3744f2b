"""Faults of the nodes of a job that holds spare nodes: lost, set to DOWN, unfit; one, two, or the wrong one."""

from __future__ import annotations

from tests.faults.case import Case, Outcome

SPARE = {"spare_nodes": 1}
ERROR_STATE = "Unable to determine the device handle for GPU0000:01:00.0: Unknown Error"
# as drivers, PyTorch and NCCL print them
GPU_ERROR = """\
[12847.402914] NVRM: Xid (PCI:0000:01:00): 94, pid=4242, name=python3, Contained: SM (0x1). RST: No, D-RST: No
RuntimeError: CUDA error: uncorrectable ECC error encountered
"""
NCCL_TIMEOUT = """\
[rank1]:[E1123 13:12:04.512345678 ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=97, OpType=ALLREDUCE, NumelIn=1048576, NumelOut=1048576, Timeout(ms)=600000) ran for 600018 \
milliseconds before timing out.
[rank1]:[E1123 13:12:04.612345678 ProcessGroupNCCL.cpp:744] [Rank 1] To avoid data inconsistency, we are taking the \
entire process down.
"""
# what a node's nvidia-smi prints for any query: a line for each GPU, a number for each field
NVIDIA_SMI = """\
#!/bin/sh
if [ -e "{folder}/unfit-$SLURMD_NODENAME" ]; then echo "{error}"; exit 15; fi
fields=
for word; do case $word in --query-gpu=*) fields=$(printf %s "${{word#*=}}" | tr , ' ') ;; esac; done
for gpu in 0 1 2 3; do
    line=
    for field in $fields; do
        case $field in
        index) value=$gpu ;;
        memory.total*) value=97871 ;;
        utilization* | memory*) value=42 ;;
        *) value=0 ;;
        esac
        line="${{line:+$line, }}$value"
    done
    echo "$line"
done
"""


def node_lost_spare(case: Case) -> Outcome:
    """Nobody tells Slurm about the crash; the job's own heartbeat of the node stops."""
    case.resources, case.keeps = SPARE, True
    case.start()
    return swapped(case, lose(case))


def node_lost_spare_slurm(case: Case) -> Outcome:
    """The same, noticed by Slurm alone."""
    case.environ = {"RUNNER_NODE_SECONDS": "3600"}
    return node_lost_spare(case)


def node_down_spare(case: Case) -> Outcome:
    """Set so by an admin."""
    case.resources, case.keeps = SPARE, True
    case.start()
    node = case.node(1)
    case.set_down(node)
    return swapped(case, node)


def lose(case: Case, rank: int = 1) -> str:
    """Kill all processes of a rank's node, and return its name."""
    node = case.node(rank)
    case.kill_node(node)
    return node


def swapped(case: Case, *nodes: str) -> Outcome:
    """The outcome of a run whose last attempt may not use these nodes."""
    outcome = case.outcome()
    used = case.nodes_of(len(outcome.causes))
    assert not used & set(nodes), f"the last attempt used {', '.join(used)}\n{outcome.trouble}"
    return outcome


def two_nodes_lost(case: Case) -> Outcome:
    """At most 5 s apart: the first is replaced, and the job continues on fewer nodes without the second."""
    case.resources, case.keeps = {**SPARE, "min_nodes": 2}, True
    case.start()
    first, second = case.node(1), case.node(2)
    case.kill_node(first)
    case.pause(case.chance.uniform(0, 5))
    case.kill_node(second)
    outcome = swapped(case, first, second)
    assert len(case.nodes_of(len(outcome.causes))) == 2, outcome.trouble
    return outcome


def node_lost_saving(case: Case) -> Outcome:
    """While rank 0 writes a checkpoint."""
    case.resources, case.keeps = SPARE, True
    case.start()
    node = case.node(1)
    case.until(lambda: [*case.run.glob("checkpoints/.checkpoint-*.partial")], 60, "a save")
    case.strike_now()
    case.kill_node(node)
    return swapped(case, node)


def node_lost_restarting(case: Case) -> Outcome:
    """The spare node that replaces a lost one is lost too, before it has taken a step; there is a second spare node."""
    case.resources, case.keeps = {"spare_nodes": 2}, True
    case.start()
    first, spare = case.node(1), case.held_nodes()[2]
    case.kill_node(first)
    case.until((case.run / "attempts/1/next").exists, 120, "the choice of nodes")
    case.kill_node(spare)
    return swapped(case, first, spare)


def spare_unfit(case: Case) -> Outcome:
    """The spare node's GPUs do not work; every other run has another spare node, the others need another allocation."""
    case.keeps = bool(case.number % 2)
    case.resources = {"spare_nodes": 1 + case.keeps}
    case.nodes = 2 + 1 + case.keeps  # the cluster has 5
    add_nvidia_smi(case)
    case.start()
    unfit = case.held_nodes()[2]
    (case.folder / f"unfit-{unfit}").touch()
    case.strike_now()
    outcome = swapped(case, lose(case), unfit)
    assert ("in_place" in outcome.rungs) == case.keeps, f"{outcome.rungs}\n{outcome.trouble}"
    return outcome


def add_nvidia_smi(case: Case) -> None:
    """Put an nvidia-smi in PATH that fails on a node as soon as FOLDER/unfit-NODE exists."""
    program = case.folder / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text(NVIDIA_SMI.format(folder=case.folder, error=ERROR_STATE))
    program.chmod(0o755)
    case.environ = {**case.environ, "PATH": f"{program.parent}:{case.lab.environ['PATH']}"}
    case.gpus = 4


def first_node_lost(case: Case) -> Outcome:
    """The batch script and its node are gone: a step on another node has the job requeued."""
    case.resources = SPARE
    case.start()
    return swapped(case, lose(case, rank=0))


def gpu_error(case: Case) -> Outcome:
    """A rank fails with an uncorrectable error, and nvidia-smi does not answer on its node from then on."""
    case.resources, case.keeps = SPARE, True
    add_nvidia_smi(case)
    case.start()
    node = case.node(1)
    (case.folder / f"unfit-{node}").touch()
    case.strike_now()
    case.ask_rank("exit", 1, GPU_ERROR)
    return swapped(case, node)


def nccl_timeout(case: Case) -> Outcome:
    """NCCL's watchdog aborts a rank: its node is under suspicion, and is not used again while there is a spare node."""
    case.resources, case.keeps = SPARE, True
    case.start()
    node = case.node(1)
    case.ask_rank("abort", 1, NCCL_TIMEOUT)
    return swapped(case, node)


def no_nodes_left(case: Case) -> Outcome:
    """Both the node of a rank and the spare node are lost, and Slurm accepts neither a requeue nor a new job."""
    case.resources = SPARE
    job_id = case.start()
    case.lab.run(("scontrol", "update", f"JobId={job_id}", "Requeue=0"))
    case.lab.run(("scontrol", "update", "PartitionName=normal", "State=DRAIN"))
    case.strike_now()
    case.kill_node(case.held_nodes()[2])
    lose(case)
    outcome = case.outcome()
    assert "healthy nodes: 1, needed: 2" in outcome.stopped, f"{outcome.stopped}\n{outcome.trouble}"
    return outcome
