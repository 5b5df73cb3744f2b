"""Runs that go on, on a real Slurm: where requeue is forbidden, by chains, without unfit nodes; and what stays ended.

What they survive is counted in tests/faults.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from runner.machine.report import Quiet
from runner.runs.job import Restart
from runner.runs.run import Run, load, save
from runner.runs.schedulers import slurm_commands as scheduler
from runner.runs.schedulers.slurm import exclude_flags
from runner.runs.status import RunStatus, ask
from runner.site import Site
from tests.conftest import need
from tests.lab import parts
from tests.lab.slurm import SlurmLab
from tests.runs.scripts import SLURM, command_job, shell_job, write_run
from tests.runs.test_restart import causes
from tests.waiting import until

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
    """Two nodes."""
    need(*parts.SLURM)
    with SlurmLab(nodes=2, plugins=()) as made:
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


def status_of(lab: SlurmLab, run: Path) -> RunStatus:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in lab.environ.items():
            patch.setenv(name, value)
        return ask([load(run)])[0]


def began(run: Path, number: int = 1) -> Callable[[], bool]:
    """Whether the program of attempt N runs."""

    def has_begun() -> bool:
        log = (run / "job.log").read_text() if (run / "job.log").exists() else ""
        return "from step" in log.partition(f"attempt {number} on")[2]

    return has_begun


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
    until(lambda: (run / "attempts/3/exit_code").exists())
    assert causes(run) == ["time_limit", "time_limit", "done"]
    ids = load(run).job_ids
    assert len(set(ids)) == 3
    lab.wait_for(ids[-1], "COMPLETED")
    assert "SLURM_RESTART_COUNT" not in (run / "job.log").read_text()


def test_a_job_that_another_job_has_submitted_restarts_itself(lab: SlurmLab, tmp_path: Path) -> None:
    """By hand, from a task of an array that was requeued before: sbatch hands the outer job's variables on."""
    text = (
        'echo "from step 0, restart ${SLURM_RESTART_COUNT:-0}, array ${SLURM_ARRAY_JOB_ID:-none}"; [ -d ../attempts/2 ]'
    )
    run = written(tmp_path / "x-1", text, script_failure=1)
    outer = tmp_path / "outer.sh"
    outer.write_text(f"""#!/bin/bash
#SBATCH --array=1-1 --output={tmp_path}/outer.log --open-mode=append
echo started
cd {run} && srun --overlap --ntasks=1 env SLURM_RESTART_COUNT=3 SLURM_TRES_PER_TASK=cpu=7 sbatch job.sbatch
""")
    lab.run(("sbatch", "--parsable", str(outer)), cwd=tmp_path)
    until((run / "attempts/2/exit_code").exists)
    assert causes(run) == ["script_failure", "done"]
    assert (tmp_path / "outer.log").read_text().count("started") == 1
    log = (run / "job.log").read_text()
    assert "restart 0, array none" in log and "restart 1, array none" in log
    ids = (run / "job_ids").read_text().split()
    assert [f"job {each}" in (run / "attempts/1/started").read_text() for each in ids] == [True]


def test_a_chain(lab: SlurmLab, tmp_path: Path) -> None:
    """Each link waits for the one before; those that are left when it is done are cancelled."""
    run = written(tmp_path, time_limit=9, site=replace(SLURM, restart_by="chain"))
    ids = [submit(lab, run)]
    for _ in range(4):
        argv = scheduler.submit_after(run, ids[-1])
        ids.append(scheduler.parse_submit(lab.run(argv, cwd=run).stdout))
        (run / "job_ids").write_text("".join(f"{each}\n" for each in ids[1:]))
    save(Run("x-1", run, "x", "generic-slurm", "slurm", "2026", state="submitted", job_ids=(ids[0],)))
    assert status_of(lab, run).job_id in ids[:2]  # the one that counts is not the last of the chain
    for number in (1, 2):
        time_is_over(lab, run, number, ids[number - 1])
    until(lambda: (run / "attempts/3/exit_code").exists())
    lab.wait_for(ids[4], "CANCELLED")
    assert causes(run) == ["time_limit", "time_limit", "done"]
    states = [lab.wait_for(each, ENDED)["JobState"] for each in ids]
    assert states == ["FAILED", "FAILED", "COMPLETED", "CANCELLED", "CANCELLED"]  # 75 is a failure to Slurm
    found = status_of(lab, run)
    assert (found.state, found.job_id) == ("COMPLETED", ids[2])


def test_nodes_are_free_soon_after_one_rank_has_died(lab: SlurmLab, tmp_path: Path) -> None:
    """Killed without a word on one node; the other ignores that it is told to end."""
    text = """trap '' TERM; touch "../here-$RANK"; [ "$RANK" = 0 ] || kill -KILL $$; while :; do sleep 1; done"""
    run = write_run(tmp_path, command_job("sh", "-c", text, launcher="srun", nodes=2), site=SLURM)
    job_id = submit(lab, run)
    until((run / "here-1").exists)
    lab.wait_for(job_id, ENDED, 120)
    assert (run / "attempts/1/exit_code").read_text() == "137\n"


def test_an_unfit_node_is_left_out(lab: SlurmLab, tmp_path: Path) -> None:
    """By the mark of a preflight: the retry is a new job, since a requeue cannot say it; noted for other runs."""
    text = """echo "from step 0 on $SLURMD_NODENAME"; [ "$SLURMD_NODENAME" = nid001 ] || exit 0
    echo "GPU 2 has uncorrected memory errors (4)" >"$RUNNER_ATTEMPT/bad-node-0"; exit 76"""
    run = written(tmp_path / "runs/x-1", text, node_failure=2)
    job_id = submit(lab, run, "--nodelist=nid001")
    save(Run("x-1", run, "x", "generic-slurm", "slurm", "2026", state="submitted", job_ids=(job_id,)))
    until((run / "attempts/2/exit_code").exists)
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
        assert exclude_flags(tmp_path / "runs", {}, Quiet()) == ("--exclude=nid001",)
        assert exclude_flags(tmp_path / "runs", {}, Quiet(), "nid003") == ("--exclude=nid003,nid001",)


@pytest.mark.parametrize("notices", [False, True])
def test_a_node_that_slurm_has_not_missed_yet_is_found_by_its_missing_sign(
    lab: SlurmLab, tmp_path: Path, notices: bool
) -> None:
    """Its slurmd, its tasks and their parents are gone; Slurm would wait for minutes. The next attempt avoids it.

    If the task of the other node notices, it fails because its connection is lost, and shows no more signs of life.
    """
    text = 'echo "from step 0"; : >"$RUNNER_ATTEMPT/began-$SLURM_PROCID"; until [ -e ../go ]; do sleep .2; done; exit 1'
    run = written(tmp_path, text, nodes=2, script_failure=1)
    environ = {"RUNNER_NODE_SECONDS": "6", "RUNNER_WATCH_SECONDS": "1"}
    job_id = scheduler.parse_submit(lab.run(scheduler.submit(run, ()), cwd=run, extra_environ=environ).stdout)
    attempt = run / "attempts/1"
    until(lambda: (attempt / "began-1").exists() and (attempt / "usage/0").exists() and (attempt / "usage/1").exists())
    lab.stop_node("nid002")
    try:
        end_processes_of("nid002", job_id)
        if notices:
            (run / "go").touch()
        until((attempt / "cause").exists)
        assert (attempt / "cause").read_text() == "node_failure\n"
        assert (attempt / "silent").read_text() == "nid002\n"
        log, seconds = (run / "job.log").read_text(), 2 if notices else 6
        assert f"no sign of life from nid002 for {seconds} s: ending the step" in log
        assert "Killed" not in log, "`runner why` would take it for the cause"
        for name in ("busy-node-1", "fit/nid002"):
            assert (attempt / name).read_text() == f"no sign of life for {seconds} s\n"
        events = [line.split()[1] for line in (attempt / "times").read_text().splitlines()]
        assert events[3:7] == ["step", "stalled", "detected", "step_end"]
    finally:
        lab.start_node("nid002")
    lab.wait_for(job_id, ENDED)


def end_processes_of(node: str, job_id: str) -> None:
    """Kill what runs on a node for a job, and the slurmstepd above it."""
    marks = {f"SLURMD_NODENAME={node}", f"SLURM_JOB_ID={job_id}"}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if marks <= set((folder / "environ").read_bytes().decode(errors="replace").split("\0")):
                above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if Path(f"/proc/{above}/cmdline").read_bytes().startswith(b"slurmstepd:"):
                    os.kill(above, signal.SIGKILL)
                os.kill(int(folder.name), signal.SIGKILL)
