"""Spare nodes on a real Slurm: unfit nodes are left out before the training, and a guard notices a lost batch script.

Nodes that are lost while a training runs are in tests/faults.
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.runs.job import Restart
from tests.conftest import need
from tests.faults.case import ancestors, command
from tests.lab import parts
from tests.lab.slurm import SlurmLab
from tests.runs.scripts import SLURM, command_job, write_run
from tests.runs.test_payload import programs
from tests.runs.test_restart import causes
from tests.runs.test_restart_slurm import ENDED, submit
from tests.waiting import until

QUICK = {"RUNNER_GUARD_SECONDS": "1", "RUNNER_LOST_SECONDS": "4", "RUNNER_CHECK_SECONDS": "30"}
WORLD = 'echo "rank $RANK of $WORLD_SIZE on $SLURMD_NODENAME among $SLURM_JOB_NODELIST, $SLURM_NNODES"'
# a node whose GPUs do not answer, and all others
GPUS = """#!/bin/sh
case " $UNFIT " in *" $SLURMD_NODENAME "*) echo "Unable to determine the device handle"; exit 15 ;; esac
for gpu in 0 1 2 3; do echo "$gpu, 0"; done
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    """Four nodes."""
    need(*parts.SLURM)
    with SlurmLab(nodes=4, plugins=()) as made:
        yield made


def written(folder: Path, text: str, launcher: str = "srun", least: int | None = None, **policy: Any) -> Path:
    """A run on two nodes with a spare one, which are tested before the first step."""
    policy = {"node_failure": 1, **policy}
    tasks = 1 if launcher == "srun" else 2
    job = command_job("sh", "-c", text, launcher=launcher, nodes=2, tasks=tasks, restart=Restart(**policy))
    resources = replace(job.resources, spare_nodes=1, min_nodes=least, gpus_per_node=4)
    run = write_run(folder, replace(job, resources=resources), site=SLURM)
    script = run / "job.sbatch"
    script.write_text(script.read_text().replace("\nplace_ranks #", "\nplace_ranks check #"))
    return run


def submitted(lab: SlurmLab, run: Path, monkeypatch: pytest.MonkeyPatch, unfit: str = "", **environ: str) -> str:
    path = programs(run / "bin", {"nvidia-smi": GPUS})["PATH"]
    for name, value in {**QUICK, "UNFIT": unfit, "PATH": path, **environ}.items():
        monkeypatch.setenv(name, value)
    return submit(lab, run)


@pytest.mark.parametrize(
    ("unfit", "least", "nodes", "world"),
    [
        ("", None, ["nid001", "nid002"], "2 on {} among nid[001-002], 2"),
        ("nid001", None, ["nid002", "nid003"], "2 on {} among nid[002-003], 2"),  # the batch script stays where it is
        ("nid002 nid003", 1, ["nid001"], "1 on {} among nid001, 1"),
    ],
)
def test_unfit_nodes_get_no_ranks(
    lab: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unfit: str, least: int | None, nodes: list[str],
    world: str,
) -> None:  # fmt: skip
    run = written(tmp_path / "run", WORLD, least=least)
    job_id = submitted(lab, run, monkeypatch, unfit)
    assert lab.wait_for(job_id, ENDED)["JobState"] == "COMPLETED"
    logs = [run / "job.log", *run.glob("attempts/1/rank-*.log")]
    text = "\n".join(path.read_text() for path in logs if path.is_file())
    for rank, node in enumerate(nodes):
        assert f"rank {rank} of {world.format(node)}" in text
    started = (run / "attempts/1/started").read_text()
    assert "held nid[001-003]\n" in started and "gpus 12\n" in started
    for node in unfit.split():
        assert f"node {node} is unfit: nvidia-smi fails with exit code 15" in text
        assert f"{node} " in (run.parent / f".cache/bad-nodes/{lab_name(lab)}").read_text()


def lab_name(lab: SlurmLab) -> str:
    shown = lab.run(("scontrol", "show", "config")).stdout
    return next(line.split()[2] for line in shown.splitlines() if line.startswith("ClusterName"))


def test_a_job_without_enough_healthy_nodes_avoids_the_others(
    lab: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster has too few left: the policy ends the run, and says why."""
    run = written(tmp_path / "run", "true")
    submitted(lab, run, monkeypatch, "nid001 nid002 nid003 nid004")
    until((run / "stopped").exists)
    until(lambda: not lab.run(("squeue", "--noheader")).stdout)
    assert "healthy nodes: 0, needed: 2" in (run / "job.log").read_text()
    assert causes(run) == ["node_failure"] * 2
    assert (run / "stopped").read_text() == "second node_failure; [restart] allows 1\n"


# the program `python`: prints its words; in the first attempt, the GPUs of a node break where the test wants that, but
# only when both nodes have printed: a failure ends the step on the other node
LAUNCHED = """#!/bin/sh
[ "$1" != -c ] || { echo 2.8.0 && exit; } # the version of torch
[ "$2" = torch.distributed.run ] || [ "$2" = accelerate.commands.launch ] || exec /usr/bin/python3 "$@"
echo "$SLURMD_NODENAME, attempt ${RUNNER_ATTEMPT##*/}: $*"
[ "${RUNNER_ATTEMPT##*/}" = 1 ] || exit 0
touch "$RUNNER_ATTEMPT/printed-$SLURMD_NODENAME"
case " $BREAKS " in
*" $SLURMD_NODENAME "*)
    until [ -e "$RUNNER_ATTEMPT/printed-nid001" ] && [ -e "$RUNNER_ATTEMPT/printed-nid002" ]; do sleep 0.05; done
    echo "CUDA error: uncorrectable ECC error encountered"
    exit 1 ;;
*) exec sleep 100 ;;
esac
"""
WORDS = {
    "torchrun": "--nnodes={} --nproc-per-node=2 --node-rank={} --master-addr={} --master-port=",
    "accelerate": "--num_machines={} --num_processes={processes} --machine_rank={} --main_process_ip={} ",
}


@pytest.mark.parametrize(
    ("breaks", "unfit", "ranks"),
    [("nid001", "", ["nid002", "nid003"]), ("nid002", "nid003", ["nid001"])],  # a spare node comes first; fewer nodes
)
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_launchers_get_the_numbers_of_the_attempt(
    lab: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, breaks: str, unfit: str,
    ranks: list[str],
) -> None:  # fmt: skip
    """Of the first one, and of the next one in the same allocation, with other nodes or fewer."""
    run = written(tmp_path / "run", "true", launcher, least=1)
    address = '#!/bin/sh\ncase $2 in nid*) echo "10.0.0.${2#nid00} STREAM $2" ;; esac\n'
    programs(run / "bin", {"python": LAUNCHED, "python3": LAUNCHED, "getent": address})
    lab.wait_for(submitted(lab, run, monkeypatch, unfit, BREAKS=breaks), ENDED)
    paths = (run / "job.log", *run.glob("attempts/*/*.log"))
    logs = "\n".join(path.read_text() for path in paths if path.is_file())
    assert causes(run) == ["node_failure", "done"], logs
    for attempt, nodes in enumerate((["nid001", "nid002"], ranks), 1):
        first = f"10.0.0.{nodes[0][-1]}"
        for rank, node in enumerate(nodes):
            words = WORDS[launcher].format(len(nodes), rank, first, processes=2 * len(nodes))
            found = [line for line in logs.splitlines() if line.startswith(f"{node}, attempt {attempt}: ")]
            assert len(found) == 1 and words in found[0], (words, logs)
            assert ("--multi_gpu" in found[0]) == (launcher == "accelerate")


def batch_script(run: Path) -> int:
    until((run / "alive").exists)
    return int((run / "alive").read_text())


def guarded(lab: SlurmLab, run: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The job id of a run of this program, once the guard and the program run."""
    job_id = submitted(lab, written(run, text), monkeypatch)
    until((run / ".guard").exists)
    until((run / "began").exists)
    return job_id


# the second attempt ends by itself
TRAINING = 'cd "$RUNNER_RUN" && : >began && { [ "${RUNNER_ATTEMPT##*/}" != 1 ] || exec sleep 100; }'


def test_a_job_whose_batch_script_is_lost_is_requeued(
    lab: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm alone would keep it until its time limit: only the processes of the batch script are gone."""
    run = tmp_path / "run"
    job_id = guarded(lab, run, TRAINING, monkeypatch)
    script = batch_script(run)
    for pid in (ancestors(script)[0], script):
        assert "slurmstepd" in command(pid) or "job" in command(pid)
        os.kill(pid, signal.SIGKILL)
    until((run / "attempts/2/exit_code").exists)
    assert causes(run) == ["node_failure", "done"]
    why = "the batch script is lost; it no longer runs on nid001: requeueing this job"
    assert (run / "attempts/1/next").read_text() == f"requeue\n{why}\n"
    assert lab.wait_for(job_id, ENDED)["Restarts"] == "1"


def test_a_batch_script_that_ends_without_slurm_noticing_frees_its_nodes(
    lab: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only Slurm's own process above it was killed."""
    run = tmp_path / "run"
    job_id = guarded(lab, run, 'cd "$RUNNER_RUN" && : >began; until [ -e finish ]; do sleep 0.1; done', monkeypatch)
    os.kill(ancestors(batch_script(run))[0], signal.SIGKILL)
    (run / "finish").touch()
    lab.wait_for(job_id, ENDED)
    assert causes(run) == ["done"] and not (run / "stopped").exists()


def test_a_run_whose_batch_script_is_killed_ends_with_an_explanation(
    lab: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    job_id = guarded(lab, run, TRAINING, monkeypatch)
    os.kill(batch_script(run), signal.SIGKILL)
    until((run / "attempts/1/exit_code").exists)  # the guard writes it last
    assert (run / "stopped").read_text() == "the batch script was killed\n"
    assert causes(run) == ["script_failure"]
    assert (run / "attempts/1/exit_code").read_text() == "137\n"
    lab.wait_for(job_id, "FAILED")
    until(lambda: not lab.run(("squeue", "--noheader")).stdout)
