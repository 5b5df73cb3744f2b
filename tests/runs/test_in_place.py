"""Attempts that start in the allocation of the one before, on a real Slurm: which faults, and what stays as it was.

Whole trainings that survive them are in tests/faults.
"""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.runs.job import Restart
from runner.runs.schedulers import slurm_commands as scheduler
from tests.conftest import need
from tests.lab import parts
from tests.lab.slurm import SlurmLab
from tests.runs.scripts import SLURM, command_job, write_run
from tests.runs.test_restart import causes
from tests.waiting import until

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
KILLED = "kill -KILL $$"
FIRST = 'n=${RUNNER_ATTEMPT##*/}; [ "$RANK" = 1 ] || { [ "$n" != 1 ] || exec sleep 100; exit 0; }; '
"""rank 1 decides; in the first attempt rank 0 waits for it"""


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    """Three nodes."""
    need(*parts.SLURM)
    with SlurmLab(nodes=3, plugins=()) as made:
        yield made


def written(folder: Path, text: str, *, spare: int = 0, by: str = "submit", **policy: Any) -> Path:
    """A run folder of two tasks, each on a node. Unlike a requeued job, a new one starts at once."""
    job = command_job("sh", "-c", text, launcher="srun", nodes=2, restart=Restart(**policy))
    job = replace(job, resources=replace(job.resources, spare_nodes=spare))
    return write_run(folder, job, site=replace(SLURM, restart_by=by))


def submit(lab: SlurmLab, run: Path, *flags: str) -> str:
    return scheduler.parse_submit(lab.run(scheduler.submit(run, flags), cwd=run).stdout)


def ended(lab: SlurmLab, run: Path, *flags: str) -> dict[str, str]:
    """What Slurm knows about the job of the run, after the job has ended."""
    return lab.wait_for(submit(lab, run, *flags), ENDED)


def rungs(run: Path) -> list[str]:
    """How each attempt was followed."""
    folders = sorted((run / "attempts").iterdir(), key=lambda path: int(path.name))
    return [(folder / "next").read_text().split()[0] for folder in folders if (folder / "next").exists()]


def test_after_a_killed_rank_the_same_job_goes_on(lab: SlurmLab, tmp_path: Path) -> None:
    run = written(tmp_path, f'{FIRST}[ "$n" != 1 ] || {KILLED}', script_failure=1)
    job = ended(lab, run)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0")
    assert causes(run) == ["script_failure", "done"]
    why = "task 1 on nid002 was killed by signal 9: the next attempt starts in this allocation, on the same nodes"
    assert (run / "attempts/1/next").read_text() == f"in_place\n{why}\nnid001,nid002\n"
    assert f"job.sbatch: {why}\n" in (run / "job.log").read_text()
    for number in (1, 2):
        lines = (run / f"attempts/{number}/started").read_text().splitlines()
        assert {"nodes nid[001-002]", "held nid[001-002]", f"job {job['JobId']}"} <= set(lines)


@pytest.mark.parametrize(
    ("policy", "text", "rung"),
    [
        ({}, "exit 3", "submit"),
        ({"in_place": True}, "exit 3", "in_place"),
        ({"in_place": False}, KILLED, "submit"),
    ],
)
def test_the_policy_decides_about_errors_of_the_script(
    lab: SlurmLab, tmp_path: Path, policy: dict[str, bool], text: str, rung: str
) -> None:
    run = written(tmp_path, f'{FIRST}[ "$n" != 1 ] || {text}', script_failure=1, **policy)
    submit(lab, run)
    until((run / "attempts/2/exit_code").exists)
    assert (causes(run), rungs(run)) == (["script_failure", "done"], [rung])


def test_a_spare_node_takes_the_place_of_a_lost_one(lab: SlurmLab, tmp_path: Path) -> None:
    down = 'scontrol update nodename="$SLURMD_NODENAME" state=down reason=fault; exec sleep 100'
    run = written(tmp_path, f'{FIRST}[ "$n" != 1 ] || {{ {down}; }}', spare=1, node_failure=1)
    job = ended(lab, run)
    lab.run(("scontrol", "update", "nodename=nid002", "state=resume"), check=False)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0")
    assert causes(run) == ["node_failure", "done"]
    why = "lost nid002: the next attempt starts in this allocation, with nid003 instead of nid002"
    assert (run / "attempts/1/next").read_text() == f"in_place\n{why}\nnid001,nid003\n"
    assert "nodes nid[001,003]" in (run / "attempts/2/started").read_text()
    assert "attempt 2 on nid[001,003]\n" in (run / "job.log").read_text()


ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
TIMEOUT = "[rank1]:[E1123 ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught collective operation timeout"


@pytest.mark.parametrize(("line", "cause"), [(ECC, "node_failure"), (TIMEOUT, "hang")])
def test_a_spare_node_replaces_one_with_a_broken_gpu_or_the_first_rank_that_timed_out(
    lab: SlurmLab, tmp_path: Path, line: str, cause: str
) -> None:
    text = f"{FIRST}[ \"$n\" != 1 ] || {{ echo '{line}'; exit 1; }}"
    run = written(tmp_path / "runs/x-1", text, spare=1, node_failure=1, hang=1)
    assert ended(lab, run)["Restarts"] == "0"
    assert causes(run) == [cause, "done"]
    lost, to = (node_of(run, number) for number in (1, 2))
    assert lost != to and line in (run / "attempts/1/next").read_text()
    bad = tmp_path / "runs/.cache/bad-nodes/lab"
    assert not bad.exists(), "a program can print anything: other runs may use the node"


def node_of(run: Path, number: int) -> str:
    """The node of rank 1."""
    log = (run / f"attempts/{number}/started").read_text()
    (nodes,) = [line for line in log.splitlines() if line.startswith("nodes ")]
    return "nid" + nodes.strip("]")[-3:]


@pytest.mark.parametrize("line", ["  exitcode  : -9 (pid: 4242)", "died with <Signals.SIGKILL: 9>."])
def test_a_killed_process_of_a_launcher_is_a_killed_rank(lab: SlurmLab, tmp_path: Path, line: str) -> None:
    """torchrun and accelerate themselves end with exit code 1."""
    run = written(tmp_path, f"{FIRST}[ \"$n\" != 1 ] || {{ echo '{line}' >>../job.log; exit 1; }}", script_failure=1)
    assert ended(lab, run)["Restarts"] == "0"
    assert rungs(run) == ["in_place"]


def test_limits_count_on_every_rung_and_a_new_job_has_no_secrets(lab: SlurmLab, tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.write_text("WORD=hunter2hunter2\n")
    secrets.chmod(0o600)
    text = f"""n=${{RUNNER_ATTEMPT##*/}}; [ "$RANK" = 1 ] || exec sleep 100; echo "word=${{WORD:-}}"
    case $n in 2) rm {secrets}; exit 3 ;; *) {KILLED} ;; esac"""
    run = written(tmp_path / "x-1", text, script_failure=2)
    lab.run(scheduler.submit(run, ()), cwd=run, extra_environ={"RUNNER_SECRETS": str(secrets)})
    until((run / "attempts/3/exit_code").exists)
    assert (run / "stopped").read_text() == "third script_failure; [restart] allows 2\n"
    assert rungs(run) == ["in_place", "submit"]
    words = [(run / f"attempts/{number}/rank-1.log").read_text().split()[0] for number in (1, 2, 3)]
    assert words == ["word=hunter2hunter2", "word=hunter2hunter2", "word="]
    assert lab.wait_for((run / "job_ids").read_text().split()[-1], ENDED)["JobState"] == "FAILED"


def test_a_crash_loop_ends_in_place(lab: SlurmLab, tmp_path: Path) -> None:
    run = written(tmp_path, f'[ "$RANK" = 1 ] || exec sleep 100; {KILLED}', script_failure=50)
    job = ended(lab, run)
    assert (job["JobState"], causes(run), rungs(run)) == ("FAILED", ["script_failure"] * 3, ["in_place"] * 2)
    assert "(crash loop)" in (run / "stopped").read_text()


def test_close_to_the_time_limit_the_job_gives_its_nodes_back(lab: SlurmLab, tmp_path: Path) -> None:
    """Slurm's signal must not arrive while the next attempt starts."""
    run = written(tmp_path, f'{FIRST}[ "$n" != 1 ] || {KILLED}', script_failure=1)
    submit(lab, run, "--time=3")
    until((run / "attempts/2/exit_code").exists)
    assert rungs(run) == ["submit"]
    assert "s are left of the time limit: the next attempt is job " in (run / "attempts/1/next").read_text()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_job_that_is_cancelled_while_it_restarts_stays_cancelled(lab: SlurmLab, tmp_path: Path, moment: str) -> None:
    """squeue tells that the job ends, and TERM arrives later; or squeue tells that it runs, and TERM has arrived."""
    stub = tmp_path / "bin/squeue"
    stub.parent.mkdir()
    stub.write_text(f"""#!/bin/bash
    [[ "$*" == *%L* ]] || exec squeue.real "$@"
    trap '' TERM
    answer=$(squeue.real "$@")
    if [ {moment} = before ]; then
        {{ sleep 1 && scancel.real "$SLURM_JOB_ID"; }} >&- &
        echo "${{answer/RUNNING/COMPLETING}}"
        exit
    fi
    until scancel.real "$SLURM_JOB_ID" &&
        [ "$(squeue.real -h -j "$SLURM_JOB_ID" -o %T)" = COMPLETING ]; do sleep 0.1; done
    echo "$answer"
    """)
    stub.chmod(0o755)
    for name in ("squeue", "scancel"):
        (stub.parent / f"{name}.real").symlink_to(shutil.which(name) or name)
    run = written(tmp_path / "x-1", f'{FIRST}[ "$n" != 1 ] || {KILLED}', script_failure=1)
    path = f"{stub.parent}:{lab.environ['PATH']}"
    lab.run(scheduler.submit(run, ()), cwd=run, extra_environ={"PATH": path})
    until((run / "attempts/1/exit_code").exists)
    job_id = (run / "job_ids").read_text().split()
    assert lab.wait_for(job_id[-1], ENDED)["JobState"] == "CANCELLED"
    assert len(job_id) == 1 and not (run / "attempts/2/finished/1").exists()


def test_what_slurm_asks_while_the_nodes_are_checked_counts(lab: SlurmLab, tmp_path: Path) -> None:
    """The signal before the time limit comes only once; a requeue means that no node needs to answer any more."""
    stub = tmp_path / "bin/srun"
    stub.parent.mkdir()
    stub.write_text(f"""#!/bin/bash
    case "$*" in *payload/check.sh*)
        : >checking
        until [ -e go ]; do sleep 0.1; done ;;
    esac
    exec {shutil.which("srun")} "$@"
    """)
    stub.chmod(0o755)
    path = {"PATH": f"{stub.parent}:{lab.environ['PATH']}", "RUNNER_CHECK_SECONDS": "100"}
    limit, requeue = (
        written(tmp_path / name, f'{FIRST}[ "$n" != 1 ] || {KILLED}', script_failure=1, by=by)
        for name, by in (("x-1", "submit"), ("x-2", "requeue"))
    )
    for run in (limit, requeue):
        lab.run(scheduler.submit(run, ()), cwd=run, extra_environ=path)
    until(lambda: (limit / "checking").exists() and (requeue / "checking").exists())
    lab.run(("scancel", "--batch", "--signal=USR2", (limit / "job_ids").read_text().strip()))
    lab.run(("scontrol", "requeue", (requeue / "job_ids").read_text().strip()))
    until((limit / "attempts/1/save-and-exit").exists)
    (limit / "go").touch()
    until(lambda: (limit / "attempts/2/exit_code").exists() and (requeue / "attempts/1/exit_code").exists())
    assert (causes(limit), rungs(limit)) == (["script_failure", "done"], ["submit"])
    assert "; the program was asked to save and exit: the next attempt is job " in (limit / "job.log").read_text()
    assert (causes(requeue), rungs(requeue)) == (["requeued"], ["requeue"])
    assert (requeue / "attempts/1/next").read_text() == "requeue\nrequeued: Slurm has requeued this job\n"
    assert "did not answer" not in (requeue / "job.log").read_text()
    lab.run(("scancel", (requeue / "job_ids").read_text().strip()))


def test_a_task_of_an_array_and_a_job_of_a_chain_go_on_in_place(lab: SlurmLab, tmp_path: Path) -> None:
    text = f'{FIRST}[ "$n" != 1 ] || {KILLED}'
    first, second = (written(tmp_path / name, text, script_failure=1, by="chain") for name in ("0", "1"))
    (tmp_path / "array.sh").write_text("""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --output=%a/job.log --open-mode=append
cd "$SLURM_ARRAY_TASK_ID" || exit 1
exec bash job.sbatch
""")
    array = lab.run(("sbatch", "--parsable", "--array=0-1%1", "array.sh"), cwd=tmp_path).stdout.strip()
    until((second / "attempts/2/exit_code").exists)
    for number, run in enumerate((first, second)):
        assert (causes(run), rungs(run)) == (["script_failure", "done"], ["in_place"])
        assert (run / "job_ids").read_text() == f"{array}_{number}\n"


def test_nodes_that_have_passed_the_preflight_are_not_tested_again(lab: SlurmLab, tmp_path: Path) -> None:
    passed = 'until [ -s "$RUNNER_ATTEMPT/preflight-node-0" ]; do sleep 0.1; done'
    run = written(tmp_path, f'{FIRST}[ "$n" != 1 ] || {{ {passed}; {KILLED}; }}', script_failure=1)
    (run / "job.sbatch").write_text(
        (run / "job.sbatch")
        .read_text()
        .replace("inside RUNNER_NODES", "inside RUNNER_PREFLIGHT yes\n        inside RUNNER_NODES")
    )
    (run / "payload/preflight.py").write_text("print('node', __import__('sys').argv[2], 'tested')")
    assert ended(lab, run)["JobState"] == "COMPLETED"
    assert rungs(run) == ["in_place"]
    assert (run / "job.log").read_text().count("node 0 tested") == 1
    assert [(run / f"attempts/{number}/preflight-node-1").exists() for number in (1, 2)] == [True, False]
