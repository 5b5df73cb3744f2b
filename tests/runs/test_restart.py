"""Whether another attempt follows is the job file's to say: decided by the same shell functions without a scheduler."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.runs import resolve, status
from runner.runs.job import Restart, load_job_file
from runner.runs.run import Run, load, save
from tests.runs.scripts import SLURM, run_locally, script, shell_job, write_run
from tests.waiting import until

# saves a checkpoint, and asks to be continued, until there are three
TRAINING = """
step=$(ls ../checkpoints 2>/dev/null | sed 's/.*-//' | sort -n | tail -n 1); step=${step:-0}
echo "from step $step"
[ "$step" -lt 30 ] || exit 0
mkdir -p "../checkpoints/checkpoint-$((step + 10))"
echo '{}' >"../checkpoints/checkpoint-$((step + 10))/complete.json"
exit "${CODE:-75}"
"""


def causes(run: Path) -> list[str]:
    folders = sorted((run / "attempts").iterdir(), key=lambda path: int(path.name))
    return [(folder / "cause").read_text().strip() for folder in folders]


def restarted(folder: Path, text: str, environ: dict[str, str] | None = None, **policy: int) -> tuple[Path, int, str]:
    """The run folder, exit code and output of a job with that policy, after its last attempt."""
    run = write_run(folder, shell_job(text, restart=Restart(**policy) if policy else None))
    done = run_locally(run, extra_environ=environ or {})
    return run, done.returncode, done.stdout + done.stderr


def test_a_job_that_asks_to_be_continued_is(tmp_path: Path) -> None:
    run, code, said = restarted(tmp_path, TRAINING, time_limit=3)
    assert (code, causes(run)) == (0, ["time_limit", "time_limit", "time_limit", "done"])
    assert [line for line in said.splitlines() if line.startswith("from")] == [
        f"from step {n}" for n in (0, 10, 20, 30)
    ]
    assert not (run / "stopped").exists()
    assert (run / "attempts/1/exit_code").read_text() == "75\n"


def test_nothing_is_started_anew_unless_the_job_file_says_so(tmp_path: Path) -> None:
    run, code, _ = restarted(tmp_path, TRAINING)
    assert (code, causes(run)) == (75, ["time_limit"])


@pytest.mark.parametrize(
    ("policy", "found", "reason"),
    [
        # the limit is of restarts, not of attempts
        ({"time_limit": 2}, ["time_limit"] * 3, "third time_limit; [restart] allows 2"),
        ({"script_failure": 9, "time_limit": 1}, ["time_limit"] * 2, "second time_limit; [restart] allows 1"),
        ({"node_failure": 9}, ["time_limit"], "first time_limit; [restart] allows none"),
    ],
)
def test_each_cause_has_its_own_limit(tmp_path: Path, policy: dict[str, int], found: list[str], reason: str) -> None:
    run, code, said = restarted(tmp_path, TRAINING, **policy)
    assert (code, causes(run)) == (75, found)
    assert (run / "stopped").read_text() == f"{reason}\n"
    assert "no further attempt" in said


def test_a_failure_is_no_time_limit(tmp_path: Path) -> None:
    run, code, _ = restarted(tmp_path, "exit 3", time_limit=9)
    assert (code, causes(run)) == (3, ["script_failure"])


def test_failures_with_progress_go_on(tmp_path: Path) -> None:
    """Each attempt saves before it fails: no crash loop."""
    run, code, _ = restarted(tmp_path, TRAINING, {"CODE": "9"}, script_failure=20, without_checkpoint=1)
    assert (code, causes(run)) == (0, ["script_failure"] * 3 + ["done"])


def test_an_attempt_that_could_not_write_its_cause_is_asked_after(tmp_path: Path) -> None:
    """An empty line in the place of a cause is none: the scheduler's record, or the log, tells."""
    run = write_run(tmp_path, shell_job("exit 0", restart=Restart(node_failure=3)))
    attempt = run / "attempts/1"
    attempt.mkdir(parents=True)
    (attempt / "started").write_text("job 7\ncheckpoint 0\n")
    (attempt / "cause").write_text("\n")
    (attempt / "exit_code").write_text("143\n")
    (run / "job.log").write_text("job.sbatch: attempt 1 on nid001\n")
    run_locally(run, argv=("again",))
    assert causes(run) == ["node_failure", "done"]


def test_a_crash_loop_stops(tmp_path: Path) -> None:
    """Attempts that leave nothing new are counted, whatever else is allowed."""
    run, code, _ = restarted(tmp_path, "exit 3", script_failure=50)
    assert (code, causes(run)) == (3, ["script_failure"] * 3)
    assert "3 attempts in a row have ended without a new checkpoint" in (run / "stopped").read_text()


def test_an_unfinished_checkpoint_is_none(tmp_path: Path) -> None:
    """Ours is complete when its mark is there; the folder alone is a save that was broken off."""
    text = 'mkdir -p "../checkpoints/checkpoint-$(date +%N | sed "s/^0*//")"; exit 3'
    run, _, _ = restarted(tmp_path, text, script_failure=50, without_checkpoint=2)
    assert causes(run) == ["script_failure"] * 2


def test_other_programs_checkpoints_count_by_the_number_in_their_names(tmp_path: Path) -> None:
    text = """mkdir -p ../checkpoints; n=$(ls ../checkpoints | wc -l)
    [ "$n" -lt 3 ] || exit 4; printf %30s x >"../checkpoints/iter_000000$n$n.pt"; exit 3"""
    run, _, _ = restarted(tmp_path, text, script_failure=50, without_checkpoint=2)
    # names 00 (step 0, not beyond nothing), 11, 22, then two attempts without a new one
    assert len(causes(run)) == 5


def test_a_step_that_only_the_job_knows_is_progress(tmp_path: Path) -> None:
    """Checkpoints elsewhere: attempts/N/continue names the step."""
    text = """n=${RUNNER_ATTEMPT##*/}
    printf '{"step": %s, "checkpoint": "/elsewhere"}' "$n" >"$RUNNER_ATTEMPT/continue"
    [ "$n" -lt 6 ] || { rm "$RUNNER_ATTEMPT/continue"; exit 0; }; exit 1"""
    run, code, _ = restarted(tmp_path, text, time_limit=50, without_checkpoint=1)
    assert (code, len(causes(run))) == (0, 6)


def test_a_stop_file_ends_it(tmp_path: Path) -> None:
    run, code, said = restarted(tmp_path, "[ -d ../attempts/2 ] && touch ../stop; exit 75", time_limit=9)
    assert (code, causes(run)) == (75, ["time_limit", "time_limit"])
    assert "/stop asks to stop" in said


def test_a_start_by_hand_is_always_allowed(tmp_path: Path) -> None:
    """Whoever types it has looked; the attempts before still count."""
    run, _, _ = restarted(tmp_path, "exit 3", script_failure=50, without_checkpoint=2)
    done = run_locally(run)
    assert causes(run) == ["script_failure"] * 3
    assert "(crash loop)" in done.stderr


def test_a_link_of_a_chain_that_is_done_has_nothing_to_do(tmp_path: Path) -> None:
    """The word `again` on its command line says that nobody stands behind this start."""
    run, _, _ = restarted(tmp_path, "true", time_limit=5)
    again = run_locally(run, extra_environ={}, argv=("again",))
    assert (again.returncode, causes(run)) == (0, ["done"])
    failed, _, _ = restarted(tmp_path / "failed", "exit 3", time_limit=5)
    assert run_locally(failed, argv=("again",)).returncode == 1
    assert causes(failed) == ["script_failure"]


def test_gpu_hours_are_counted_and_limited(tmp_path: Path) -> None:
    """The account stands in the log; beyond the limit no attempt begins."""
    job = shell_job("sleep 2; exit 75", restart=Restart(time_limit=9, gpu_hours=1))
    text = script(job).replace("next_attempt 0", "next_attempt 1800")  # 1 hour in 2 s
    run = write_run(tmp_path, job)
    (run / "job.sbatch").write_text(text)
    done = run_locally(run)
    assert "GPU hours, " in done.stderr and "in all attempts" in done.stderr
    assert causes(run) == ["time_limit"]
    assert "the 1 GPU hours of [restart] are used up" in (run / "stopped").read_text()


@pytest.mark.parametrize("cause", ["node_failure", "requeued"])
def test_the_limit_of_gpu_hours_holds_when_slurm_starts_the_attempt(tmp_path: Path, cause: str) -> None:
    """A requeue of Slurm's own, or of a program such as Lightning, has no attempt yet when it is asked whether one may
    begin."""
    run = write_run(tmp_path, shell_job("true", restart=Restart(node_failure=9, gpu_hours=1)))
    earlier = run / "attempts/1"
    earlier.mkdir(parents=True)
    for name, seconds in (("started", 1000), ("alive", 5000)):
        (earlier / name).write_text("job 7\ngpus 4\n")
        os.utime(earlier / name, (seconds, seconds))
    (earlier / "cause").write_text(f"{cause}\n")
    os.utime(earlier / "cause", (5000, 5000))
    done = run_locally(run, argv=("again",))
    assert done.returncode == 1 and "the 1 GPU hours of [restart] are used up" in done.stderr
    assert causes(run) == [cause]


def test_a_clock_that_is_wrong_is_no_hang(tmp_path: Path) -> None:
    """The file server's is an hour behind: progress is what changes, not what is young."""
    text = """n=0; until [ "$((n += 1))" = 50 ]; do
    touch -d "$((3600 - n)) seconds ago" "$RUNNER_ATTEMPT/heartbeat"; sleep 0.2; done"""
    run = write_run(tmp_path, shell_job(text, hang_seconds=8, restart=Restart(hang=1)))
    assert run_locally(run, extra_environ={"RUNNER_WATCH_SECONDS": "1"}).returncode == 0
    assert causes(run) == ["done"]


def test_nothing_is_started_twice(tmp_path: Path) -> None:
    """A second start while the first one works ends at once, and leaves no attempt; after the end it may go on."""
    run = write_run(tmp_path, shell_job("touch ../here; until [ -e ../go ]; do sleep 0.1; done"))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run_locally, run)
        until((run / "here").exists)
        second = run_locally(run)
        (run / "go").touch()
        assert first.result().returncode == 0
    assert (second.returncode, causes(run)) == (1, ["done"])
    assert "already runs attempt 1 of this run: not starting it twice" in second.stderr
    assert run_locally(run).returncode == 0


def test_the_tool_counts_the_same_gpu_hours(tmp_path: Path) -> None:
    """An attempt that was killed counts until its last sign of life."""
    run = Run("x-1", tmp_path, "x", "generic-slurm", "slurm", "2026")
    for number, (gpus, start, end) in {1: (8, 1000, 4600), 2: (8, 10000, 11800)}.items():
        folder = tmp_path / "attempts" / str(number)
        folder.mkdir(parents=True)
        for name, seconds in (("started", start), ("ended" if number == 1 else "alive", end)):
            (folder / name).write_text(f"started x\njob {number}7\ngpus {gpus}\n")
            os.utime(folder / name, (seconds, seconds))
    assert status.gpu_hours(run, 11800.0) == 12.0
    assert [attempt.job_id for attempt in run.attempts] == ["17", "27"]


def test_jobs_that_the_script_submits_belong_to_the_run(tmp_path: Path) -> None:
    run = Run("x-1", tmp_path, "x", "generic-slurm", "slurm", "2026", job_ids=("7",))
    save(run)
    (tmp_path / "job_ids").write_text("8\n9\n")
    assert load(tmp_path).job_ids == ("7", "8", "9")
    save(load(tmp_path))
    assert load(tmp_path).job_ids == ("7", "8", "9")


def test_slurm_may_requeue_where_the_site_does() -> None:
    """The policy decides at the beginning of an attempt, so that Slurm's own requeues are counted too."""
    job = shell_job("true", restart=Restart(time_limit=3, node_failure=2))
    assert "#SBATCH --requeue\n" in script(job, site=SLURM)
    assert "\nrestarts by=requeue time_limit=3 node_failure=2 without_checkpoint=3\n" in script(job, site=SLURM)
    assert "#SBATCH --no-requeue\n" in script(job, site=replace(SLURM, restart_by="submit"))
    assert "requeue" not in script(shell_job("true"), site=SLURM)
    assert "\nrestarts by=chain " in script(replace(job, chain=4), site=SLURM)


def test_the_job_file_says_it(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('command = ["true"]\n[restart]\ntime_limit = 20\npreemption = 5\n')
    assert load_job_file(path)["restart"].value == Restart(time_limit=20, preemption=5)
    for text, said in (("time_limit = -1", "3: time_limit cannot be -1"), ("timelimit = 1", "timelimit"),
                       ("without_checkpoint = 0", "must be 1 or more"), ('hang = "x"', "hang")):  # fmt: skip
        path.write_text(f'command = ["true"]\n[restart]\n{text}\n')
        with pytest.raises(RunnerError, match=said):
            load_job_file(path)


@pytest.mark.parametrize(("longest", "wanted"), [(None, 120), (40, 120), (100.5, 231), (40_000, 65535)])
def test_a_measured_save_decides_how_early_the_job_is_told(tmp_path: Path, longest: Any, wanted: int) -> None:
    """Twice the longest save of the newest runs of that job and half a minute, at least what the job file says."""
    for number, seconds in ((1, longest), (2, 5), (3, None)):
        folder = tmp_path / f"test-{number:04}"
        folder.mkdir()
        entries = [{"step": 1, "loss": 2.0}, *([{"step": 1, "checkpoint_seconds": seconds}] if seconds else [])]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in entries))
    other = tmp_path / "test-other-0001"
    other.mkdir()
    (other / "metrics.jsonl").write_text('{"step": 1, "checkpoint_seconds": 900}\n')
    job = resolve.with_measured(shell_job("true"), tmp_path)
    assert job.save_seconds == wanted
    assert bool(job.notes) == (wanted != 120)
    assert f"#SBATCH --signal=B:USR2@{wanted}\n" in script(job, site=SLURM)
    assert resolve.with_measured(shell_job("true", save_seconds=0), tmp_path).save_seconds == 0
