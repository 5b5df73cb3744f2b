"""The batch script on a real Slurm, without containers: submission, ranks, signals, requeue, codes, status."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner import quoting
from runner.errors import RunnerError
from runner.runs.job import Job, Resources
from runner.runs.schedulers import slurm_commands as scheduler
from runner.runs.schedulers.scheduler import JobStatus
from tests.lab import parts
from tests.lab.slurm import SlurmLab
from tests.runs.scripts import BARE, CORPUS, NOTHING, SLURM, command_job, shell_job, write_run
from tests.waiting import until

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


def submit(lab: SlurmLab, run: Path, *flags: str) -> str:
    return scheduler.parse_submit(lab.run(scheduler.submit(run, flags), cwd=run).stdout)


def asked(lab: SlurmLab, *job_ids: str) -> dict[str, JobStatus]:
    return dict(scheduler.parse_status(lab.run(scheduler.status(job_ids)).stdout))


def test_two_nodes_two_tasks(plain_slurm: SlurmLab, tmp_path: Path) -> None:
    """Ranks, world size, one master; words and variables as they were written; output where it belongs."""
    # not echo, which reads backslashes in some shells
    text = 'printf "%s\\n" "$RANK $LOCAL_RANK $WORLD_SIZE $SLURMD_NODENAME $MASTER_ADDR ${MASTER_PORT:+port} $NOTE $*"'
    job = replace(shell_job(text, launcher="srun", tasks=2, nodes=2, env={"NOTE": "a\n$(id)"}), arguments=CORPUS[:20])
    run = write_run(tmp_path, job, site=SLURM)
    job_id = submit(plain_slurm, run)
    plain_slurm.wait_for(job_id, ENDED)
    words = " ".join(("a\n$(id)", *CORPUS[:20]))
    assert f"0 0 4 nid001 127.0.0.1 port {words}\n" in (run / "job.log").read_text()
    assert (run / "attempts/1/rank-1.log").read_text() == f"1 1 4 nid001 127.0.0.1 port {words}\n"
    assert (run / "attempts/1/rank-3.log").read_text() == f"3 1 4 nid002 127.0.0.1 port {words}\n"
    assert (run / "attempts/1/exit_code").read_text() == "0\n"
    assert asked(plain_slurm, job_id)[job_id].state == "COMPLETED"


def test_torchruns_words_on_two_nodes(plain_slurm: SlurmLab, tmp_path: Path) -> None:
    """One task per node, and each knows its own node rank."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python").write_text('#!/bin/sh\n[ "$1" != -m ] || echo "$@" >"$RUNNER_ATTEMPT/words-$SLURM_NODEID"\n')
    (programs / "python").chmod(0o755)
    job = Job("x", BARE, script="a.py", launcher="torchrun", resources=Resources(nodes=2, tasks_per_node=4),
              env={"PATH": f"{programs}:/usr/bin:/bin"})  # fmt: skip
    run = write_run(tmp_path / "run", job, site=SLURM)
    fields = plain_slurm.wait_for(submit(plain_slurm, run), ENDED)
    assert (fields["JobState"], fields["NumTasks"], fields["CPUs/Task"]) == ("COMPLETED", "2", "4")
    for node in (0, 1):
        words = (run / f"attempts/1/words-{node}").read_text()
        assert f"--nnodes=2 --nproc-per-node=4 --node-rank={node} --master-addr=127.0.0.1 --master-port=2" in words
        assert f"--log-dir={run}/attempts/1/node-{node} " in words
        assert ("--tee=0:3" in words) == (node == 0)


def test_setup_runs_once_per_node(plain_slurm: SlurmLab, tmp_path: Path) -> None:
    """On every node, before any task goes on."""
    job = shell_job('cat "../made-$SLURMD_NODENAME"', launcher="srun", tasks=2, nodes=2,
                    setup='sleep 1; echo "set up" >>"../made-$SLURMD_NODENAME"')  # fmt: skip
    run = write_run(tmp_path, job, site=SLURM)
    assert plain_slurm.wait_for(submit(plain_slurm, run), ENDED)["JobState"] == "COMPLETED"
    for rank in (1, 2, 3):
        assert (run / f"attempts/1/rank-{rank}.log").read_text() == "set up\n"


def test_the_first_failure_is_the_jobs(plain_slurm: SlurmLab, tmp_path: Path) -> None:
    """One rank dies: the job ends at once, with that rank's code."""
    run = write_run(
        tmp_path, shell_job('[ "$RANK" = 3 ] && exit 7; sleep 1000', launcher="srun", tasks=2, nodes=2), site=SLURM
    )
    job_id = submit(plain_slurm, run)
    plain_slurm.wait_for(job_id, ENDED, 300)
    found = asked(plain_slurm, job_id)[job_id]
    assert (found.state, found.reason, found.exit_code) == ("FAILED", "NonZeroExitCode", 7)
    assert found.nodes == "nid[001-002]"
    assert (run / "attempts/1/exit_code").read_text() == "7\n"


# below a launcher that has no handler of its own
TRAINER = """
import os, signal, sys, time
got = []
for each in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    signal.signal(each, lambda number, frame: got.append(signal.Signals(number).name))
open("../ready-" + os.environ["RANK"], "w").close()
while not got: time.sleep(0.02)
time.sleep(0.5 + float(os.environ["RANK"]))
print(*got, os.path.exists(os.environ["RUNNER_SAVE_AND_EXIT"]), flush=True)
sys.exit(75)
"""
LAUNCHER = 'python3 -c "$1"; code=$?; echo "launcher saw $code"; exit "$code"'


def test_the_warning_before_the_limit_reaches_every_trainer(plain_slurm: SlurmLab, tmp_path: Path) -> None:
    """Slurm signals the batch shell alone; flag first, then USR2 to whoever waits for it, and to nobody else."""
    job = command_job("sh", "-c", LAUNCHER, "sh", TRAINER, launcher="srun", tasks=2, nodes=2)
    run = write_run(tmp_path, job, site=SLURM)
    job_id = submit(plain_slurm, run)
    until(lambda: all((run / f"ready-{rank}").exists() for rank in range(4)))
    plain_slurm.run(("scancel", "--batch", "--signal=USR2", job_id))
    plain_slurm.wait_for(job_id, ENDED)
    log = (run / "job.log").read_text()
    assert "SIGUSR2 True\nlauncher saw 75\n" in log
    for rank in (1, 2, 3):
        assert (run / f"attempts/1/rank-{rank}.log").read_text() == "SIGUSR2 True\nlauncher saw 75\n"
    assert asked(plain_slurm, job_id)[job_id].exit_code == 75


def test_cancel_lets_the_job_save(plain_slurm: SlurmLab, tmp_path: Path) -> None:
    """scancel's TERM reaches the trainers, and the flag is there."""
    run = write_run(tmp_path, command_job("python3", "-c", TRAINER, launcher="srun", tasks=2), site=SLURM)
    job_id = submit(plain_slurm, run)
    until(lambda: all((run / f"ready-{rank}").exists() for rank in range(2)))
    plain_slurm.run(("scancel", job_id))
    plain_slurm.wait_for(job_id, "CANCELLED")
    until(lambda: (run / "attempts/1/exit_code").exists())
    assert "SIGTERM True" in (run / "job.log").read_text()
    assert "SIGTERM True" in (run / "attempts/1/rank-1.log").read_text()
    assert (run / "attempts/1/exit_code").read_text() == "75\n"


def test_a_requeue_is_the_next_attempt(plain_slurm: SlurmLab, tmp_path: Path) -> None:
    """The same job id, a new folder, and one log that goes on."""
    run = write_run(tmp_path, shell_job('echo "attempt ${RUNNER_ATTEMPT##*/}"; [ -e ../go ] || sleep 600'), site=SLURM)
    job_id = submit(plain_slurm, run)
    until(lambda: (run / "job.log").exists() and "attempt 1\n" in (run / "job.log").read_text())
    (run / "go").touch()
    plain_slurm.run(("scontrol", "requeue", job_id))
    plain_slurm.wait_for(job_id, "COMPLETED")
    log = (run / "job.log").read_text()
    assert log.index("attempt 1\n") < log.index("attempt 2\n")
    assert (run / "attempts/2/exit_code").read_text() == "0\n"
    assert not (run / "attempts/3").exists()


def test_a_second_submission_of_the_same_file_is_an_attempt_too(plain_slurm: SlurmLab, tmp_path: Path) -> None:
    """As after a bad node: `sbatch --exclude=NODE job.sbatch`."""
    run = write_run(tmp_path, shell_job("exit 3"), site=SLURM)
    for number, flags in (("1", ()), ("2", ("--exclude=nid001",))):
        job_id = submit(plain_slurm, run, *flags)
        plain_slurm.wait_for(job_id, ENDED)
        assert (run / f"attempts/{number}/exit_code").read_text() == "3\n"
    assert asked(plain_slurm, job_id)[job_id].nodes == "nid002"


def test_one_question_for_all_jobs(plain_slurm: SlurmLab, tmp_path: Path) -> None:
    """Waiting, running, ended, long forgotten: one squeue, and unknown ids do no harm."""
    run = write_run(tmp_path, shell_job("sleep 600"), site=SLURM)
    waiting = submit(plain_slurm, run, "--begin=now+1hour")
    running = submit(plain_slurm, run)
    until(lambda: asked(plain_slurm, running)[running].state == "RUNNING")
    found = asked(plain_slurm, "999999", waiting, running)
    assert set(found) == {waiting, running}
    assert (found[waiting].state, found[waiting].reason, found[waiting].nodes) == ("PENDING", "BeginTime", "")
    assert found[running].time_left
    assert found[running].exit_code is None
    plain_slurm.run(("scancel", waiting, running))
    plain_slurm.wait_for(running, "CANCELLED")
    found = asked(plain_slurm, waiting, running)
    assert {found[waiting].state, found[running].state} == {"CANCELLED"}


def test_the_time_limit(plain_slurm: SlurmLab, tmp_path: Path) -> None:
    """A job that does not leave by itself is a TIMEOUT; the flag was there before."""
    job = shell_job("sleep 200", save_seconds=60)
    run = write_run(tmp_path, replace(job, resources=replace(job.resources, time_minutes=1)), site=SLURM)
    job_id = submit(plain_slurm, run)
    # with a warning of 60 seconds and a limit of one minute it comes at once
    until(lambda: (run / "attempts/1/save-and-exit").exists())
    plain_slurm.run(("scancel", job_id))


def comment(lab: SlurmLab, folder: Path, word: str) -> str:
    """The --comment of a job whose script says so, as slurmctld has it."""
    script = f"#!/bin/bash\n#SBATCH {word}\n#SBATCH --hold\ntrue\n"
    (folder / "job.sbatch").write_bytes(script.encode())
    job_id = submit(lab, folder, "--output=/dev/null")
    shown = lab.run(("squeue", "--noheader", f"--jobs={job_id}", "--states=all", "--Format=Comment:500|"), check=True)
    lab.run(("scancel", job_id))
    return shown.stdout.rstrip("\n").removesuffix("|").rstrip(" ")


def check_directive(lab: SlurmLab, folder: Path, text: str) -> None:
    try:
        word = quoting.directive(f"--comment=x{text}x", "the comment")
    except RunnerError:
        assert "$" in text or not text.isprintable()
        return
    assert comment(lab, folder, word) == f"x{text}x"


@pytest.mark.parametrize("text", [text for text in CORPUS if len(text) < 1000])
def test_corpus_survives_sbatch(plain_slurm: SlurmLab, tmp_path: Path, text: str) -> None:
    """What stands in an #SBATCH line is what slurmctld gets, or it is refused."""
    check_directive(plain_slurm, tmp_path, text)


@settings(max_examples=60 if parts.every_tier() else 20, suppress_health_check=list(HealthCheck))
@given(text=st.text(alphabet="'\"#\\ ab%j=,:;()é😀|~`-", max_size=20))
def test_any_text_survives_sbatch(plain_slurm: SlurmLab, tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Quotes, backslashes, blanks and `#` in any order."""
    check_directive(plain_slurm, tmp_path_factory.getbasetemp(), text)


@pytest.mark.parametrize("name", ["it's", 'a"b', "$HOME", "$(id)", "a b", "#", "😀", "a\nb", "a,b", "a:b", "-x"])
def test_the_run_folder_may_have_any_name_for_slurm(plain_slurm: SlurmLab, tmp_path: Path, name: str) -> None:
    """The job finds its folder, and its output lies there."""
    run = write_run(tmp_path / name, shell_job("echo here"), site=SLURM)
    assert plain_slurm.wait_for(submit(plain_slurm, run), ENDED)["JobState"] == "COMPLETED"
    assert "here\n" in (run / "job.log").read_text()


@pytest.mark.parametrize("name", ["%j", "a\\b"])
def test_run_folders_that_slurm_misreads_are_refused(tmp_path: Path, name: str) -> None:
    """Its output would go elsewhere, and the job fail without a word."""
    with pytest.raises(RunnerError, match="cannot write its output"):
        scheduler.submit(tmp_path / name)


def test_shell_words(plain_slurm: SlurmLab, tmp_path: Path) -> None:
    """In an allocation of its own, and beside the step of a running job."""
    alone = scheduler.shell(NOTHING, ("sh", "-c", "echo $SLURM_NTASKS"), pty=False)
    assert plain_slurm.run(alone).stdout == "1\n"
    run = write_run(tmp_path, shell_job("touch ../ready; sleep 600", nodes=2), site=SLURM)
    job_id = submit(plain_slurm, run)
    until((run / "ready").exists)
    inside = scheduler.shell(NOTHING, ("sh", "-c", "echo $SLURM_JOB_ID"), job_id, pty=False)
    assert plain_slurm.run(inside).stdout == f"{job_id}\n"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        plain_slurm.run(scheduler.shell(NOTHING, ("sh", "-c", "exit 9"), job_id, pty=False))
    assert caught.value.returncode == 9
    plain_slurm.run(("scancel", job_id))
