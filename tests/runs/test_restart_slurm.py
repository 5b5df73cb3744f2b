"""Runs that survive on a real Slurm: time limit, preemption, a lost node, no requeue, chains; and what stays ended."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from runner.machine.report import Quiet
from runner.runs.checking import bad_nodes
from runner.runs.job import Restart
from runner.runs.run import Run, load, save
from runner.runs.schedulers import slurm as scheduler
from runner.runs.state.status import _settle
from runner.site import Site
from tests.conftest import need
from tests.lab import parts
from tests.lab.slurm import SlurmLab
from tests.runs.scripts import SLURM, command_job, shell_job, write_run
from tests.runs.test_restart import causes

# saves when it is told to, ten steps further each time, and is done at step 20
TRAINING = """
trap : TERM
step=$(ls ../checkpoints 2>/dev/null | sed 's/.*-//' | sort -n | tail -n 1); step=${step:-0}
echo "from step $step"
[ "$step" -lt 20 ] || exit 0
until [ -e "$RUNNER_SAVE_AND_EXIT" ]; do sleep 0.1; done
mkdir -p "../checkpoints/checkpoint-$((step + 10))"
echo '{}' >"../checkpoints/checkpoint-$((step + 10))/complete.json"
exit 75
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    """Two nodes; jobs of the partition `high` take them from those of the others, by requeue or by cancelling."""
    need(*parts.SLURM)
    preemption = (
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "PartitionName=high Nodes=ALL PriorityTier=10 State=UP",
        "PartitionName=cancelled Nodes=ALL PriorityTier=1 PreemptMode=CANCEL State=UP",
    )
    with SlurmLab(nodes=2, plugins=(), extra_config=preemption) as made:
        yield made


def written(folder: Path, text: str = TRAINING, *, site: Site = SLURM, nodes: int = 1, **policy: int) -> Path:
    """A run folder of a job with that policy."""
    return write_run(folder, shell_job(text, nodes=nodes, restart=Restart(**policy)), site=site)


def time_is_over(lab: SlurmLab, run: Path, number: int, job_id: str) -> None:
    """Slurm's warning, as soon as the program of attempt N runs; Slurm itself gives it a minute before the limit."""
    until(began(run, number))
    lab.run(("scancel", "--batch", "--signal=USR2", job_id))


def submit(lab: SlurmLab, run: Path, *flags: str) -> str:
    return scheduler.parse_submit(lab.run(scheduler.submit(run, flags), cwd=run).stdout)


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


def began(run: Path, number: int = 1) -> Callable[[], bool]:
    """Whether the program of attempt N runs."""

    def has_begun() -> bool:
        log = (run / "job.log").read_text() if (run / "job.log").exists() else ""
        return "from step" in log.partition(f"attempt {number} on")[2]

    return has_begun


def kill_node(lab: SlurmLab, node: str, job_id: str) -> None:
    """What a crash of the node leaves: nothing of slurmd, of the job's shepherds, of its processes."""
    lab.stop_node(node)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace")
            around = (process / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        mine = f"SLURM_JOB_ID={job_id}" in around and f"SLURMD_NODENAME={node}" in around
        shepherd = words.startswith(f"slurmstepd: [{job_id}.") and f"SLURM_CONF={lab.folder}/slurm.conf" in around
        if mine or shepherd:
            os.kill(int(process.name), signal.SIGKILL)


def test_the_time_limit_is_passed_twice(lab: SlurmLab, tmp_path: Path) -> None:
    """One submission: told, saved, requeued, resumed, until it is done."""
    run = written(tmp_path, time_limit=5)
    job_id = submit(lab, run)
    for number in (1, 2):
        time_is_over(lab, run, number, job_id)
    until(lambda: (run / "attempts/3/exit_code").exists(), 120)
    fields = lab.wait_for(job_id, ENDED)
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "2")
    assert causes(run) == ["time_limit", "time_limit", "done"]
    log = (run / "job.log").read_text()
    assert log.index("from step 0\n") < log.index("from step 10\n") < log.index("from step 20\n")
    assert [(run / f"attempts/{n}/exit_code").read_text() for n in (1, 2, 3)] == ["75\n", "75\n", "0\n"]


def test_a_program_that_does_not_leave_in_time_is_requeued_too(lab: SlurmLab, tmp_path: Path) -> None:
    """Slurm ends it at the limit: what follows is settled before Slurm kills the batch script."""
    run = written(tmp_path, 'echo "from step 0"; [ ! -d ../attempts/2 ] || exit 0; sleep 600', time_limit=1)
    job_id = submit(lab, run)
    until(began(run))
    lab.run(("scontrol", "update", f"JobId={job_id}", "EndTime=now+1"))  # a limit of one minute takes two
    until(lambda: (run / "attempts/2/exit_code").exists(), 180)
    assert lab.wait_for(job_id, ENDED)["JobState"] == "COMPLETED"
    assert causes(run) == ["time_limit", "done"]


def test_preemption_by_requeue(lab: SlurmLab, tmp_path: Path) -> None:
    """Slurm requeues the job by itself; it saves before, and goes on when the nodes are free again."""
    run = written(tmp_path / "low", preemption=3, nodes=2)
    job_id = submit(lab, run, "--exclusive")
    until(began(run))
    high = write_run(tmp_path / "high", shell_job("sleep 3", nodes=2), site=SLURM)
    submit(lab, high, "--exclusive", "--partition=high")
    until(began(run, 2))
    assert causes_of_ended(run) == ["preemption"]
    assert "from step 10\n" in (run / "job.log").read_text()
    lab.run(scheduler.cancel((job_id,)))
    lab.wait_for(job_id, "CANCELLED")


def causes_of_ended(run: Path) -> list[str]:
    return [path.read_text().strip() for path in sorted((run / "attempts").glob("*/cause"))]


def test_preemption_by_cancelling(lab: SlurmLab, tmp_path: Path) -> None:
    """Slurm forgets the job: the batch script brings it back."""
    run = written(tmp_path / "low", preemption=3, nodes=2)
    job_id = submit(lab, run, "--exclusive", "--partition=cancelled")
    until(began(run))
    high = write_run(tmp_path / "high", shell_job("sleep 3", nodes=2), site=SLURM)
    submit(lab, high, "--exclusive", "--partition=high")
    until(began(run, 2))
    assert causes_of_ended(run) == ["preemption"]
    lab.run(scheduler.cancel((job_id,)))
    lab.wait_for(job_id, "CANCELLED")


def test_a_lost_node(lab: SlurmLab, tmp_path: Path) -> None:
    """Nothing of the attempt can say a word; Slurm requeues it, and the next attempt counts it.

    A node that is down comes back when its slurmd registers (ReturnToService=2): nobody resumes it.
    """
    run = written(tmp_path, node_failure=1)
    job_id = submit(lab, run, "--nodelist=nid001")
    until(began(run))
    kill_node(lab, "nid001", job_id)
    lab.run(("scontrol", "update", "nodename=nid001", "state=down", "reason=crash"))
    lab.start_node("nid001")
    until(began(run, 2))
    assert causes_of_ended(run) == ["node_failure"]
    kill_node(lab, "nid001", job_id)
    lab.run(("scontrol", "update", "nodename=nid001", "state=down", "reason=crash"))
    lab.start_node("nid001")
    assert lab.wait_for(job_id, ENDED, 60)["JobState"] == "FAILED"
    assert "ended by node_failure for time 2, and the job file allows 1" in (run / "stopped").read_text()


def test_what_a_person_cancels_stays_cancelled(lab: SlurmLab, tmp_path: Path) -> None:
    """Although it saves and says "continue me"."""
    run = written(tmp_path, time_limit=9, preemption=9, node_failure=9, script_failure=9)
    job_id = submit(lab, run)
    until(began(run))
    lab.run(scheduler.cancel((job_id,)))
    until((run / "attempts/1/exit_code").exists)
    assert lab.wait_for(job_id, "CANCELLED")["Restarts"] == "0"
    assert causes(run) == ["cancelled"]
    assert (run / "attempts/1/exit_code").read_text() == "75\n"


def test_a_crash_loop_stops_by_itself(lab: SlurmLab, tmp_path: Path) -> None:
    run = written(tmp_path, 'echo "from step 0"; exit 3', script_failure=50, without_checkpoint=2)
    job_id = submit(lab, run)
    until((run / "stopped").exists)
    assert lab.wait_for(job_id, ENDED)["JobState"] == "FAILED"
    assert causes(run) == ["script_failure"] * 2
    assert "(crash loop)" in (run / "stopped").read_text()


def test_where_requeue_is_forbidden_the_file_is_submitted_again(lab: SlurmLab, tmp_path: Path) -> None:
    """Another job, an attempt of the same run; the tool finds it by the run folder."""
    run = written(tmp_path, time_limit=5, site=replace(SLURM, restart_by="submit"))
    first = submit(lab, run)
    save(Run("x-1", run, "x", "generic-slurm", "slurm", "2026", state="submitted", job_ids=(first,)))
    for number in (1, 2):
        until(began(run, number))
        time_is_over(lab, run, number, load(run).job_ids[-1])
    until(lambda: (run / "attempts/3/exit_code").exists(), 120)
    assert causes(run) == ["time_limit", "time_limit", "done"]
    ids = load(run).job_ids
    assert len(set(ids)) == 3
    lab.wait_for(ids[-1], "COMPLETED")
    assert "SLURM_RESTART_COUNT" not in (run / "job.log").read_text()


def test_a_chain(lab: SlurmLab, tmp_path: Path) -> None:
    """Each link waits for the one before; those that are left when it is done are cancelled."""
    run = written(tmp_path, time_limit=9, site=replace(SLURM, restart_by="chain"))
    ids = [submit(lab, run)]
    for _ in range(4):
        argv = scheduler.submit_after(run, ids[-1])
        ids.append(scheduler.parse_submit(lab.run(argv, cwd=run).stdout))
        (run / "job_ids").write_text("".join(f"{each}\n" for each in ids[1:]))
    save(Run("x-1", run, "x", "generic-slurm", "slurm", "2026", state="submitted", job_ids=(ids[0],)))
    shown = scheduler.parse_status(lab.run(scheduler.status(ids)).stdout)
    assert _settle(load(run), shown, "").job_id in ids[:2]  # the one that counts is not the last of the chain
    for number in (1, 2):
        time_is_over(lab, run, number, ids[number - 1])
    until(lambda: (run / "attempts/3/exit_code").exists(), 120)
    lab.wait_for(ids[4], "CANCELLED")
    assert causes(run) == ["time_limit", "time_limit", "done"]
    states = [lab.wait_for(each, ENDED)["JobState"] for each in ids]
    assert states == ["FAILED", "FAILED", "COMPLETED", "CANCELLED", "CANCELLED"]  # 75 is a failure to Slurm
    shown = scheduler.parse_status(lab.run(scheduler.status(ids)).stdout)
    assert (_settle(load(run), shown, "").state, _settle(load(run), shown, "").job_id) == ("COMPLETED", ids[2])


def test_a_hang_is_ended_with_the_stacks_of_all_ranks(lab: SlurmLab, tmp_path: Path) -> None:
    """Two nodes, progress told and then none: stacks by signal, the end, another attempt."""
    text = """
import faulthandler, os, pathlib, signal, time
attempt = pathlib.Path(os.environ["RUNNER_ATTEMPT"])
if attempt.name == "2":
    raise SystemExit(0)
file = open(attempt / "stacks" / f"rank-{os.environ['RANK']}.txt", "w")
faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
def waiting_for_the_others():
    time.sleep(600)
(attempt / "heartbeat").touch()
waiting_for_the_others()
"""
    job = command_job("python3", "-c", text, launcher="srun", nodes=2, hang_seconds=3, restart=Restart(hang=1))
    run = write_run(tmp_path, job, site=SLURM)
    quick = {"RUNNER_WATCH_SECONDS": "1", "RUNNER_STACK_SECONDS": "5"}
    job_id = scheduler.parse_submit(lab.run(scheduler.submit(run), cwd=run, extra_environ=quick).stdout)
    until((run / "attempts/2/exit_code").exists, 120)
    lab.wait_for(job_id, "COMPLETED")
    assert causes(run) == ["hang", "done"]
    for rank in (0, 1):
        assert "in waiting_for_the_others" in (run / f"attempts/1/stacks/rank-{rank}.txt").read_text()
    assert "no progress for" in (run / "attempts/1/hang").read_text()


def test_nodes_are_free_soon_after_one_rank_has_died(lab: SlurmLab, tmp_path: Path) -> None:
    """Killed without a word on one node; the other ignores that it is told to end."""
    text = """trap '' TERM; touch "../here-$RANK"; [ "$RANK" = 0 ] || kill -KILL $$; while :; do sleep 1; done"""
    run = write_run(tmp_path, command_job("sh", "-c", text, launcher="srun", nodes=2), site=SLURM)
    job_id = submit(lab, run)
    until((run / "here-1").exists)
    died = time.monotonic()
    lab.wait_for(job_id, ENDED, 60)
    assert time.monotonic() - died < 60
    assert (run / "attempts/1/exit_code").read_text() == "137\n"


def test_an_unfit_node_is_left_out(lab: SlurmLab, tmp_path: Path) -> None:
    """By the mark of a preflight: the retry is a new job, since a requeue cannot say it; noted for other runs."""
    text = """echo "from step 0 on $SLURMD_NODENAME"; [ "$SLURMD_NODENAME" = nid001 ] || exit 0
    echo "GPU 2 has uncorrected memory errors (4)" >"$RUNNER_ATTEMPT/bad-node-0"; exit 76"""
    run = written(tmp_path / "runs/x-1", text, node_failure=2)
    job_id = submit(lab, run, "--nodelist=nid001")
    save(Run("x-1", run, "x", "generic-slurm", "slurm", "2026", state="submitted", job_ids=(job_id,)))
    until((run / "attempts/2/exit_code").exists, 120)
    assert causes(run) == ["node_failure", "done"]
    assert "from step 0 on nid002" in (run / "job.log").read_text()
    second = load(run).job_ids[1]
    assert lab.job(second)["ExcNodeList"] == "nid001"
    noted = tmp_path / "runs/.cache/bad-nodes/lab"
    assert noted.read_text().startswith("nid001 ") and noted.read_text().endswith(" (4)\n")
    # a launch leaves it out too: on this cluster, for a day, where the node still exists
    noted.write_text(noted.read_text() + f"nid009 {int(time.time())} gone since\nnid002 1000 long ago\n")
    (noted.parent / "elsewhere").write_text(f"nid002 {int(time.time())} of another cluster\n")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in lab.environ.items():
            patch.setenv(name, value)
        assert bad_nodes.flags(tmp_path / "runs", {}, Quiet()) == ("--exclude=nid001",)
