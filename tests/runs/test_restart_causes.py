"""What decides about restarts and bad nodes: Slurm's messages about this job, exit codes and progress; no quotation.

Slurm is played by three small programs that keep to what the real ones print; tests/runs/test_restart_slurm.py and
tests/faults use the real ones.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runner.project import Project
from runner.runs import trainer
from runner.runs.job import Restart
from tests.runs.scripts import SLURM, command_job, run_locally, script, shell_job, write_run
from tests.runs.test_restart import causes

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do case $1 in --ntasks=*) count=${1#*=} ;; esac; shift; done
for ((rank = 0; rank < count; rank++)); do
    SLURM_PROCID=$rank SLURM_LOCALID=0 SLURM_NTASKS=$count "$@" &
done
code=0
for ((rank = 0; rank < count; rank++)); do wait -n || code=$?; done
exit "${SRUN_CODE:-$code}"
"""
SCONTROL = """#!/bin/bash
case "$1 $2" in
"show hostnames") tr , '\\n' <<<"$3" ;;
requeue*) [ -n "$REQUEUE" ] && echo "$2" >>"$REQUEUE" ;;
*) exit 1 ;;
esac
"""
SQUEUE = """#!/bin/bash
[[ "$*" != *RestartCnt* || -z "$RESTARTS" ]] || echo "$RESTARTS   "
"""
PREEMPTED = "slurmstepd: error: *** {what} ON {node} CANCELLED AT 2026-11-22T03:30:41 DUE TO PREEMPTION ***"
LOST = "srun: error: Node failure on {node}"
LAUNCH = "srun: error: Task launch for StepId=7.1 failed on node {node}: Communication connection failure"


@pytest.fixture
def job_7(tmp_path: Path) -> dict[str, str]:
    """The variables of job 7 on nid001 and nid002."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("squeue", SQUEUE), ("scancel", "#!/bin/sh\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "nid001,nid002",
        "SLURM_CPUS_PER_TASK": "1",
        "REQUEUE": "",
        "RESTARTS": "",
    }


def started(run: Path, environ: dict[str, str], *words: str) -> int:
    """The exit code of the script; its output is appended to job.log, as sbatch does it."""
    with (run / "job.log").open("ab") as log:
        return run_locally(
            run, extra_environ=environ, argv=words, capture_output=False, stdout=log, stderr=log
        ).returncode


def job_that(folder: Path, text: str, **policy: int) -> Path:
    job = command_job("sh", "-c", text, "sh", launcher="srun", nodes=2, restart=Restart(**policy) if policy else None)
    return write_run(folder / "runs/x-1", job, site=SLURM)


@pytest.mark.parametrize(
    ("line", "code", "cause"),
    [
        (PREEMPTED.format(what="JOB 7", node="nid001"), 3, "preemption"),
        (PREEMPTED.format(what="STEP 7.0", node="nid002"), 143, "preemption"),
        (LOST.format(node="nid002"), 143, "node_failure"),
        (LAUNCH.format(node="nid002"), 233, "node_failure"),
        (" 45%|####5     | 45/100\r 46%|##" + PREEMPTED.format(what="JOB 7", node="nid001"), 3, "preemption"),
        # another job's, another node's, a quotation
        (PREEMPTED.format(what="JOB 8", node="nid001"), 3, "script_failure"),
        (PREEMPTED.format(what="JOB 7", node="nid004"), 3, "script_failure"),
        (LOST.format(node="nid004"), 3, "script_failure"),
        (LAUNCH.format(node="nid004"), 3, "script_failure"),
        ("Node failure on nid001", 3, "script_failure"),
        ('{"text": "' + PREEMPTED.format(what="JOB 7", node="nid001") + '"}', 3, "script_failure"),
    ],
)
def test_only_slurms_own_message_about_this_job_is_a_cause(
    job_7: dict[str, str], tmp_path: Path, line: str, code: int, cause: str
) -> None:
    run = job_that(tmp_path, f"""[ "$RANK" = 0 ] || exit 0; printf '%b\\n' "$LINE"; exit {code}""", hang=1)
    started(run, {**job_7, "LINE": line})
    assert causes(run) == [cause]
    noted = tmp_path / "runs/.cache/bad-nodes/cluster"
    assert noted.exists() == (cause == "node_failure")


@pytest.mark.parametrize(
    ("flags", "excluded"),
    [
        ((), "nid002"),
        (("--exclude=nid[007-008]",), "nid002,nid[007-008]"),
        (("-xnid007",), "nid002,nid007"),
        (("--exclude=./nodes.txt",), "nid002"),  # a file cannot be joined to a list
    ],
)
def test_the_nodes_that_the_user_excludes_stay_excluded(
    job_7: dict[str, str], tmp_path: Path, flags: tuple[str, ...], excluded: str
) -> None:
    """sbatch takes only the newest of two such flags."""
    for name, text in (("sinfo", "printf 'nid00%s\\n' 1 2 7 8"), ("sbatch", 'echo "$*" >sent; echo 8')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    text = """[ "$RANK" = 0 ] || exit 0; printf '%b\\n' "$LINE"; exit 143"""
    job = command_job(
        "sh", "-c", text, "sh", launcher="srun", nodes=2, restart=Restart(node_failure=1, in_place=False), sbatch=flags
    )
    run = write_run(tmp_path / "runs/x-1", job, site=replace(SLURM, restart_by="submit"))
    started(run, {**job_7, "LINE": LOST.format(node="nid002")})
    assert (run / "sent").read_text() == f"--parsable --exclude={excluded} job.sbatch again\n"


def test_a_program_that_ends_with_0_is_done_whatever_it_prints(job_7: dict[str, str], tmp_path: Path) -> None:
    """It may print this job's own message, word for word: every task has ended with 0."""
    run = job_that(tmp_path, """[ "$RANK" = 0 ] && printf '%s\\n' "$LINE"; exit 0""", node_failure=3)
    for line in (LOST.format(node="nid002"), PREEMPTED.format(what="JOB 7", node="nid001")):
        assert started(run, {**job_7, "LINE": line}) == 0
    assert causes(run) == ["done", "done"]
    assert not (tmp_path / "runs/.cache/bad-nodes").is_dir() or not list((tmp_path / "runs/.cache/bad-nodes").iterdir())


def test_srun_may_return_0_for_a_step_that_slurm_has_ended(job_7: dict[str, str], tmp_path: Path) -> None:
    """A task is missing: the message counts."""
    line = PREEMPTED.format(what="STEP 7.0", node="nid001")
    run = job_that(tmp_path, """[ "$RANK" = 0 ] || kill -KILL $PPID; printf '%s\\n' "$LINE"; exit 0""", hang=1)
    started(run, {**job_7, "LINE": line, "SRUN_CODE": "0"})
    assert causes(run) == ["preemption"]


def test_a_cause_is_sought_again_where_slurms_signal_ended_the_search(job_7: dict[str, str], tmp_path: Path) -> None:
    """TERM goes to every process of a job at the same moment, to the one that reads the log for the cause too."""
    stub = tmp_path / "bin" / "grep"
    # the shell that waits for it, and the one above, are ended the first time; one that ignores TERM goes on
    stub.write_text(f"""#!/bin/bash
if [[ "$*" == *"CANCELLED AT"* && ! -e {tmp_path}/once ]]; then
    : >{tmp_path}/once
    above=$(sed -n 's/^PPid:[^0-9]*//p' "/proc/$PPID/status")
    [ "$above" = "$(sed -n 's/^pid //p' {tmp_path}/script)" ] || kill -TERM "$above"
    kill -TERM "$PPID"
fi
exec /bin/grep "$@"
""")
    stub.chmod(0o755)
    run = job_that(tmp_path, 'echo "$LINE"; exit 3', preemption=0)
    script_pid = f"echo pid $$ >{tmp_path}/script\n"
    (run / "job.sbatch").write_text((run / "job.sbatch").read_text().replace("\n", f"\n{script_pid}", 1))
    started(run, {**job_7, "LINE": PREEMPTED.format(what="JOB 7", node="nid001")})
    assert (tmp_path / "once").exists()
    assert causes(run) == ["preemption"]


def test_slurms_message_counts_where_it_comes_after_the_end_of_the_tasks(job_7: dict[str, str], tmp_path: Path) -> None:
    """Slurm signals the tasks, then the batch script: the step may end before its log says by what."""
    run = job_that(tmp_path, '[ "$RANK" != 0 ] || { (sleep 1; echo "$LINE" >>../job.log) & }; exit 143', preemption=0)
    assert started(run, {**job_7, "LINE": PREEMPTED.format(what="STEP 7.0", node="nid001")}) == 143
    assert causes(run) == ["preemption"]


# --- progress of any trainer


def restarts_of(folder: Path, text: str, **policy: int) -> tuple[int, list[str]]:
    run = write_run(folder, shell_job(text, restart=Restart(**policy)))
    return run_locally(run).returncode, causes(run)


NEXT = 'n=${RUNNER_ATTEMPT##*/}; [ "$n" -lt 6 ] || exit 0; '


@pytest.mark.parametrize("file", ["trainer_state.json", "random_states_0.pkl"])
def test_a_checkpoint_of_transformers_or_accelerate_is_progress(tmp_path: Path, file: str) -> None:
    """They do not write complete.json, but other files when they have written the weights."""
    (tmp_path / trainer.FILE).write_text(trainer.render("huggingface", Project(None, tmp_path, tmp_path)))
    text = NEXT + f"f=../checkpoints/checkpoint-$((8 * n)); mkdir -p $f; echo '{{}}' >$f/{file}; exit 3"
    assert restarts_of(tmp_path, text, script_failure=9, without_checkpoint=1) == (0, ["script_failure"] * 5 + ["done"])


def test_weights_without_the_rest_are_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / trainer.FILE).write_text(trainer.render("huggingface", Project(None, tmp_path, tmp_path)))
    text = NEXT + "f=../checkpoints/checkpoint-$((8 * n)); mkdir -p $f; echo x >$f/pytorch_model.bin; exit 3"
    assert restarts_of(tmp_path, text, script_failure=9, without_checkpoint=2) == (3, ["script_failure"] * 2)


def test_a_trainer_that_marks_its_checkpoints_is_held_to_the_mark(tmp_path: Path) -> None:
    """A save that was broken off has weights too, and its steps are lost."""
    text = """cd ..; echo "{\\"step\\": $((8 * n))}" >>metrics.jsonl
    mkdir -p checkpoints/checkpoint-1 "checkpoints/checkpoint-$((8 * n))"
    : >checkpoints/checkpoint-1/complete.json; : >"checkpoints/checkpoint-$((8 * n))/trainer_state.json"; exit 3"""
    text = NEXT + text
    code, found = restarts_of(tmp_path, text, script_failure=9, without_checkpoint=2)
    assert (code, len(found)) == (3, 3)  # the first one leaves checkpoint-1, two more leave nothing new


def test_a_training_that_begins_again_in_a_folder_with_later_steps_makes_progress(tmp_path: Path) -> None:
    """As with --overwrite_output_dir: complete.json has the generation, by which the program chooses its checkpoint."""
    later = tmp_path / "checkpoints/checkpoint-1000/complete.json"
    later.parent.mkdir(parents=True)
    later.write_text('{\n "step": 1000\n}\n')
    text = """c=../checkpoints/checkpoint-$((8 * n)); mkdir -p $c
    printf '{\\n "generation": 1,\\n "step": %s\\n}\\n' $((8 * n)) >$c/complete.json; exit 3"""
    assert restarts_of(tmp_path, NEXT + text, script_failure=9, without_checkpoint=1) == (
        0,
        ["script_failure"] * 5 + ["done"],
    )
    started = [(tmp_path / f"attempts/{n}/started").read_text() for n in (1, 2, 6)]
    assert ["checkpoint 1000\n" in started[0], "checkpoint 8\n" in started[1], "checkpoint 40\n" in started[2]] == [
        True
    ] * 3


def test_the_same_checkpoints_of_an_earlier_training_are_no_progress(tmp_path: Path) -> None:
    """Each attempt begins again at step 0, and saves no more than the one before."""
    text = """c=../checkpoints/checkpoint-8; mkdir -p $c; printf '{"generation": 1}' >$c/complete.json; exit 3"""
    code, found = restarts_of(tmp_path, NEXT + text, script_failure=9, without_checkpoint=2)
    assert (code, found) == (3, ["script_failure"] * 3)  # the first one saved


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoints/24", "24"),  # Orbax
        ("checkpoints/32.orbax-checkpoint-tmp-1700000000", "8"),
        ("checkpoints/checkpoint_32.tmp-1700000000", "8"),  # T5X
        ("checkpoints/tmp-checkpoint-32", "8"),
        ("checkpoints/tmp-checkpoint-32/checkpoint-32", "8"),
        ("tmp-out/checkpoint-32", "32"),
    ],
)
def test_the_name_of_a_save_that_was_broken_off_tells(tmp_path: Path, name: str, step: str) -> None:
    run = write_run(tmp_path, shell_job("true"))
    (run / trainer.FILE).write_text(f"trainer a\ncheckpoint_name checkpoint-*/\ncheckpoint_folder {run}/tmp-out\n")
    for path in (name, "checkpoints/8"):
        (run / path).mkdir(parents=True)
        (run / path / "state").write_text("x")
    words = ("bash", "-uc", ". payload/checkpoints.sh; newest_complete")
    done = subprocess.run(words, cwd=run, capture_output=True, text=True, check=True)
    assert done.stdout == str(step)


@pytest.mark.parametrize(
    ("names", "step"),
    [
        (["epoch=1-step=24.ckpt", "epoch=0-step=12.ckpt"], 24),
        (["epoch=00-val_loss=0.93.ckpt", "epoch=02-val_loss=0.32.ckpt"], 2),  # of Lightning, with a metric in the name
        (["step_8.pt", "best_0.9123.pt"], 8),
        (["ep1-ba24-rank0.pt", "ep1-ba24-rank1.pt"], 24),  # Composer
        (["model_8_rank_12.pt"], 8),
        (["checkpoint.8.pt", "checkpoint_2_24.pt"], 24),
    ],
)
def test_the_step_in_the_name_of_a_file(tmp_path: Path, names: list[str], step: int) -> None:
    run = write_run(tmp_path, shell_job("true"))
    (run / "checkpoints").mkdir()
    for name in names:
        (run / "checkpoints" / name).write_bytes(b"x" * 100)
    words = ("bash", "-uc", ". payload/checkpoints.sh; newest_complete")
    done = subprocess.run(words, cwd=run, capture_output=True, text=True, check=True)
    assert done.stdout == str(step)


@pytest.mark.parametrize(
    ("cause", "file", "content", "idle"),
    [
        ("time_limit", "last.pt", b"x" * 100, 0),
        ("node_failure", "exp/weights/last.pth", b"x" * 100, 0),
        ("time_limit", "last.pt", bytes(100), 3),  # cut off
        ("time_limit", "train.log", b"x" * 100, 3),
        ("time_limit", "step-0.pt", b"x" * 100, 3),
        ("script_failure", "last.pt", b"x" * 100, 3),  # a loop may save before it fails each time
        ("hang", "last.pt", b"x" * 100, 3),
    ],
)
def test_a_checkpoint_without_a_number_is_progress_of_an_attempt_that_was_well(
    tmp_path: Path, cause: str, file: str, content: bytes, idle: int
) -> None:
    """Many trainers overwrite one file. What it wrote before the newest attempt does not count for that one."""
    run = write_run(tmp_path, shell_job("true"))
    path = run / "checkpoints" / file
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    for number in (1, 2, 3):
        (run / f"attempts/{number}").mkdir(parents=True)
        (run / f"attempts/{number}/started").write_text("checkpoint 0\nstep 0\n")
        (run / f"attempts/{number}/cause").write_text(f"{cause}\n")
        os.utime(run / f"attempts/{number}/started", (1000 * number, 1000 * number))

    def without_progress() -> int:
        text = ". payload/checkpoints.sh; . payload/restart.sh; attempts_without_progress"
        return int(subprocess.run(("bash", "-uc", text), cwd=run, capture_output=True, text=True, check=True).stdout)

    os.utime(path, (3500, 3500))
    assert without_progress() == idle
    os.utime(path, (2500, 2500))
    assert without_progress() == min(idle + 1, 3)
    (run / "checkpoints/step-8.pt").write_bytes(b"x" * 100)
    for number in (1, 2, 3):
        (run / f"attempts/{number}/started").write_text("checkpoint 8\nstep 0\n")
        os.utime(run / f"attempts/{number}/started", (1000 * number, 1000 * number))
    os.utime(path, (3500, 3500))
    assert without_progress() == 3  # numbers tell


def test_exit_code_75_is_progress(tmp_path: Path) -> None:
    """Also where checkpoints lie in the run folder, under names that tell no step."""
    text = NEXT + "mkdir -p ../checkpoints/latest; exit 75"
    assert restarts_of(tmp_path, text, time_limit=9, without_checkpoint=1) == (0, ["time_limit"] * 5 + ["done"])


def test_a_higher_step_in_metrics_is_progress(tmp_path: Path) -> None:
    """Checkpoints may be anywhere; a loop that never gets further stops."""
    text = NEXT + 'echo "{\\"step\\": $((n * 8))}" >>../metrics.jsonl; exit 3'
    assert restarts_of(tmp_path / "a", text, script_failure=9, without_checkpoint=2)[0] == 0
    text = NEXT + 'echo "{\\"step\\": 8}" >>../metrics.jsonl; exit 3'
    code, found = restarts_of(tmp_path / "b", text, script_failure=9, without_checkpoint=2)
    assert (code, len(found)) == (3, 3)


def test_only_checkpoints_are_progress_once_there_is_one(tmp_path: Path) -> None:
    """Each attempt gets further than the one before, but none saves again: its steps are lost."""
    (tmp_path / trainer.FILE).write_text(trainer.render(None, Project(None, tmp_path, tmp_path)))
    text = (
        NEXT
        + """echo "{\\"step\\": $((50 + n))}" >>../metrics.jsonl; c=../checkpoints/checkpoint-50
    [ -e $c ] || { mkdir -p $c; echo '{}' >$c/trainer_state.json; }; exit 3"""
    )
    code, found = restarts_of(tmp_path, text, script_failure=9, without_checkpoint=2)
    assert (code, found) == (3, ["script_failure"] * 3)  # the first one saved
    assert "without a new checkpoint (crash loop)" in (tmp_path / "stopped").read_text()


def test_steps_that_a_program_prints_are_no_progress(tmp_path: Path) -> None:
    (tmp_path / trainer.FILE).write_text(trainer.render(None, Project(None, tmp_path, tmp_path)))
    text = NEXT + 'echo "step $((8 * n)) loss 2"; exit 3'
    code, found = restarts_of(tmp_path, text, script_failure=9, without_checkpoint=2)
    assert (code, len(found)) == (3, 2)


# --- a full disk


def with_full_disk(run: Path) -> Path:
    """The run, whose folder has no room while RUN/full exists: files can be made, and nothing written to them."""
    path = run / "payload/attempt.sh"
    text = path.read_text()
    write = 'printf \'%s\\n\' "$2" >"$partial" &&'
    assert text.count(write) == 1
    path.write_text(text.replace(write, f': >"$partial" && [ ! -e full ] && {write}'))
    return run


def test_a_cause_that_cannot_be_written_still_decides(job_7: dict[str, str], tmp_path: Path) -> None:
    """No restart beyond what is allowed, and none is lost: the next start reads the failure from what is there."""
    run = job_that(tmp_path, "touch ../full; exit 3", script_failure=1)
    with_full_disk(run)
    requeued = tmp_path / "requeued"
    environ = {**job_7, "REQUEUE": str(requeued), "RESTARTS": "0"}
    assert started(run, environ) == 3
    assert requeued.read_text() == "7\n"
    assert not (run / "attempts/1/cause").exists() and "cannot write" in (run / "job.log").read_text()
    # Slurm starts it again while the disk is still full; its message about the requeue is no person's
    with (run / "job.log").open("a") as log:
        log.write(PREEMPTED.format(what="JOB 7", node="nid001").replace("PREEMPTION", "JOB REQUEUE") + "\n")
    assert started(run, {**environ, "RESTARTS": "1", "SLURM_RESTART_COUNT": "1"}) == 3
    log = (run / "job.log").read_text()
    assert (run / "attempts/2/started").exists() and "bad array subscript" not in log
    assert "no further attempt: second script_failure; [restart] allows 1" in log


def test_a_failure_beyond_the_limit_ends_the_run_though_its_cause_cannot_be_written(
    job_7: dict[str, str], tmp_path: Path
) -> None:
    run = job_that(tmp_path, "touch ../full; exit 3", node_failure=1)
    with_full_disk(run)
    requeued = tmp_path / "requeued"
    assert started(run, {**job_7, "REQUEUE": str(requeued)}) == 3
    assert not requeued.exists()
    assert "first script_failure; [restart] allows none" in (run / "job.log").read_text()


def test_a_restart_waits_for_room(tmp_path: Path) -> None:
    """Where attempts/N cannot be made, a restart that the job file allows is not given up at once."""
    run = write_run(tmp_path, shell_job("exit 0", restart=Restart(script_failure=1)))
    (run / "attempts").touch()  # a file where the folder should be stops root too; a folder's mode does not
    # not timed: the room never comes, so the run ends after the 5 s, however slow the machine is
    done = run_locally(run, extra_environ={"RUNNER_ROOM_SECONDS": "5"})
    assert done.returncode == 1 and "waiting up to 5 s for free space on the disk" in done.stderr


# --- variables of an outer job


def test_an_outer_jobs_array_and_restarts_are_not_this_jobs(job_7: dict[str, str], tmp_path: Path) -> None:
    """sbatch hands them on. The script that Slurm starts is a copy with another name, and no array's task."""
    run = job_that(tmp_path, "exit 3", script_failure=1)
    (tmp_path / "slurm_script").write_text((run / "job.sbatch").read_text())
    requeued = tmp_path / "requeued"
    environ = {**os.environ, **job_7, "REQUEUE": str(requeued), "RESTARTS": "0", "SLURM_ARRAY_JOB_ID": "3",
               "SLURM_ARRAY_TASK_ID": "1", "SLURM_RESTART_COUNT": "3", "SLURM_TRES_PER_TASK": "cpu=7"}  # fmt: skip
    subprocess.run(("bash", str(tmp_path / "slurm_script")), cwd=run, env=environ, capture_output=True)
    assert requeued.read_text() == "7\n"  # not 3_1
    assert sorted(path.name for path in (run / "attempts").iterdir()) == ["1"]
    assert (run / "job_ids").read_text() == "7\n"


def test_attempts_are_numbered_above_the_highest(tmp_path: Path) -> None:
    """A gap is not filled: only attempts below a number are looked at."""
    run = write_run(tmp_path, shell_job("exit 0"))
    (run / "attempts/4").mkdir(parents=True)
    (run / "attempts/4/exit_code").write_text("0\n")
    assert run_locally(run).returncode == 0
    assert (run / "attempts/5/exit_code").exists() and not (run / "attempts/1").exists()


def test_without_a_scheduler_nothing_belongs_to_an_outer_job(tmp_path: Path) -> None:
    """A person in an allocation starts a run of the site `local`: that allocation is not the run's."""
    run = write_run(tmp_path, shell_job("env | grep ^SLURM_; exit 0"))
    done = run_locally(
        run, extra_environ={"SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "nid001", "SLURM_ARRAY_JOB_ID": "3"}
    )
    assert "SLURM_" not in done.stdout
    assert "job local-" in (run / "attempts/1/started").read_text()


def test_a_launch_within_a_job_submits_without_its_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from runner.runs.schedulers import slurm_commands as scheduler

    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    assert scheduler.submit(tmp_path)[0] == "sbatch"
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_CONF"):
        monkeypatch.setenv(name, "1")
    words = [word for word in scheduler.submit(tmp_path) if word not in ("sbatch", "--parsable", "job.sbatch")]
    done = subprocess.run(
        (*words, sys.executable, "-c", "import os; print(*os.environ)"), capture_output=True, text=True
    )
    assert [name for name in done.stdout.split() if name.startswith("SLURM_")] == ["SLURM_CONF"]


# --- a container that a killed step has left


def test_a_left_over_container_costs_no_attempt(job_7: dict[str, str], tmp_path: Path) -> None:
    """As pyxis 0.24 and enroot 4.1.2 print it. The step starts once more, not twice."""
    text = """n=$(cat ../starts 2>/dev/null || echo 0); [ "$RANK" = 0 ] || exit 0; echo $((n + 1)) >../starts
    [ "$n" -ge "$FAILURES" ] || {
    echo "slurmstepd: error: pyxis:     [ERROR] File already exists: /run/enroot/pyxis_7.$n"; exit 1; }"""
    run = job_that(tmp_path / "once", text, script_failure=1)
    assert started(run, {**job_7, "FAILURES": "1"}) == 0
    assert causes(run) == ["done"] and "starting the step once more" in (run / "job.log").read_text()
    run = job_that(tmp_path / "always", text)
    assert started(run, {**job_7, "FAILURES": "9"}) == 1
    assert (run / "starts").read_text() == "2\n"


# --- the site's setup


@pytest.mark.parametrize(("text", "code"), [("return 1", 1), ("return 0", 0), (": $unset_variable", 0)])
def test_a_module_that_does_not_load_ends_the_attempt(tmp_path: Path, text: str, code: int) -> None:
    """What comes with it would be missing, or another version; `module` may use unset variables."""

    from tests.runs.scripts import LOCAL

    site = replace(LOCAL, modules=("cuda/12.4",))
    run = write_run(tmp_path, shell_job("touch ../ran"), site=site)
    assert "module load cuda/12.4 ||" in script(shell_job("true"), site=site)
    done = run_locally(run, extra_environ={"BASH_FUNC_module%%": f"() {{ {text}\n}}"})
    assert done.returncode == code
    assert (run / "ran").exists() == (code == 0)
    assert code == 0 or "this line of the site's setup failed: module load cuda/12.4" in done.stderr


@pytest.mark.parametrize("edit", ["sed -i '2i # a line, so that all that follows moves' {}", "echo '(' >{}"])
def test_a_script_that_is_edited_while_it_runs_runs_as_it_was(tmp_path: Path, edit: str) -> None:
    """bash would continue at the old place of the new text."""
    run = write_run(tmp_path, shell_job(edit.format("../job.sbatch") + "; exit 0"))
    done = run_locally(run)
    assert (done.returncode, done.stderr.count("syntax error")) == (0, 0)
    assert causes(run) == ["done"]
