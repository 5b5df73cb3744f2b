"""Before the time limit, a trainer gets the signal on which it saves; if it then exits with 0, it is not done."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.environments.environment import Attachment
from runner.runs import payload
from runner.runs.job import Job, Resources, Restart
from runner.runs.schedulers import slurm_commands as scheduler
from tests.conftest import need
from tests.lab import parts
from tests.lab.slurm import SlurmLab
from tests.runs.savers import MEGATRON, PYTHON, asked, log_of, saver_run, started, time_is_over, wait_for_text
from tests.runs.scripts import BARE, SLURM, write_run
from tests.runs.test_restart import causes
from tests.waiting import until

RESTART, TRAINER = (Path(payload.__file__).with_name(name) for name in ("restart.sh", "trainer.sh"))


def saved(run: Path) -> int:
    """The step of the newest checkpoint of the first attempt."""
    return max(int(step) for step in re.findall(r"from iteration +(\d+) to", log_of(run).partition("attempt 2 on")[0]))


def resumed(run: Path) -> int:
    """The step at which the second attempt started."""
    return int(re.findall(r"from step (\d+)", log_of(run).partition("attempt 2 on")[2])[0])


def saves_and_resumes(run: Path, phase: str = "step", holding: int = 1, **environ: str) -> None:
    """Start the run, send the signal while the program is held in the phase, and check both attempts."""
    with started(run, **environ) as script:
        until(lambda: log_of(run).count(f"holds in {phase}") == holding, f"{phase}: {log_of(run)}")
        time_is_over(script)
        if phase == "start":
            wait_for_text(run, "asking the program to save and exit")
        else:
            until(lambda: asked(run), "the signal")
        (run / "go").touch()
        assert script.wait(120) == 0, log_of(run)
    assert causes(run) == ["time_limit", "done"], log_of(run)
    assert (run / "attempts/1/exit_code").read_text() == "75\n"
    assert resumed(run) == saved(run)


@pytest.mark.parametrize("phase", ["step", "evaluation", "save", "start"])
def test_a_program_like_megatron_saves_and_resumes(tmp_path: Path, phase: str) -> None:
    """The signal comes during a step, an evaluation, a save, and before the program handles it."""
    run = saver_run(tmp_path, MEGATRON, save_signal=("TERM",), env={"PHASE": phase})
    saves_and_resumes(run, phase)
    assert log_of(run).count("exiting program after receiving SIGTERM.") == 1


@pytest.mark.parametrize(
    "end", ["sys.exit(128 + 15)", "signal.signal(15, signal.SIG_DFL); os.kill(os.getpid(), 15)"], ids=["code", "signal"]
)
def test_a_program_that_ends_by_the_signal_after_its_save_has_not_failed(tmp_path: Path, end: str) -> None:
    run = saver_run(tmp_path, MEGATRON.replace("sys.exit(0)", end), save_signal=("TERM",))
    saves_and_resumes(run)


def test_the_log_shows_the_trainer_and_its_signal(tmp_path: Path) -> None:
    """Nothing in the job names a signal: the lines of the log do."""
    run = saver_run(tmp_path, MEGATRON, env={"PHASE": "evaluation"})
    with started(run) as script:
        wait_for_text(run, "holds in evaluation")
        assert not (run / "attempts/1/trainer").exists()
        time_is_over(script)
        until(lambda: asked(run), "the signal")
        (run / "go").touch()
        assert script.wait(120) == 0, log_of(run)
    assert (run / "attempts/1/trainer").read_text() == "megatron-lm\n"
    assert causes(run) == ["time_limit", "done"] and resumed(run) == saved(run)


def test_ranks_get_the_signal_but_not_torchrun_and_no_data_loader(tmp_path: Path) -> None:
    """At TERM, torchrun would end the ranks, and a data loader would end, which fails its rank."""
    pytest.importorskip("torch")
    run = saver_run(tmp_path, MEGATRON, launcher="torchrun", processes=2, save_signal=("TERM",), env={"WORKER": "1"})
    with started(run) as script:
        rank_1 = "attempts/1/node-0/*/attempt_0/1/stdout.log"
        until(lambda: any("holds in step" in path.read_text() for path in run.glob(rank_1)), "rank 1")
        wait_for_text(run, "rank 0 holds in step")
        time_is_over(script)
        until(lambda: asked(run), "the signal")
        (run / "go").touch()
        assert script.wait(120) == 0, log_of(run)
    assert causes(run) == ["time_limit", "done"], log_of(run)
    assert resumed(run) == saved(run)
    [told] = [path.read_text().split() for path in run.glob("attempts/1/save-signal-*")]
    assert len(told) == 2 and not (run / "worker-got-term").exists()
    assert "Received Signals.SIGTERM death signal" not in log_of(run)


def test_accelerate_passes_no_signal_on(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    run = saver_run(tmp_path, MEGATRON, launcher="accelerate", save_signal=("TERM",))
    saves_and_resumes(run)


def test_processes_of_the_launcher_srun(tmp_path: Path) -> None:
    run = saver_run(tmp_path, MEGATRON, launcher="srun", processes=2, save_signal=("TERM",))
    with started(run) as script:
        wait_for_text(run, "rank 0 holds in step")
        until(lambda: "holds in step" in (run / "attempts/1/rank-1.log").read_text(), "rank 1")
        time_is_over(script)
        until(lambda: len(list(run.glob("attempts/1/save-signal-*"))) == 2, "two signals")
        (run / "go").touch()
        assert script.wait(120) == 0, log_of(run)
    assert causes(run) == ["time_limit", "done"] and resumed(run) == saved(run)


@pytest.mark.uses("bubblewrap")
@pytest.mark.parametrize("first", [(), ("--as-pid-1",)], ids=["init", "task"])
def test_in_a_container_with_its_own_processes(tmp_path: Path, first: tuple[str, ...]) -> None:
    """The signal is sent inside: with and without an init process of the container."""
    prefix = ("bwrap", "--dev-bind", "/", "/", "--unshare-pid", *first, "--proc", "/proc")
    run = saver_run(tmp_path, MEGATRON, save_signal=("TERM",), attachment=Attachment(prefix=prefix))
    saves_and_resumes(run)


def test_a_command_of_the_user_may_start_the_launcher(tmp_path: Path) -> None:
    """torchrun under another name, from a shell: it has no local rank, but starts processes that have one."""
    pytest.importorskip("torch")
    agent = tmp_path / "trainer"
    agent.write_text(f"#!{sys.executable}\nfrom torch.distributed.run import main\nmain()\n")
    agent.chmod(0o755)
    run = saver_run(tmp_path / "run", MEGATRON, save_signal=("TERM",))
    job, plain = run / "job.sbatch", 'none python \\\n    "$RUNNER_RUN"/code/train.py'
    by_agent = f"{agent} --nproc-per-node=2 --master-port=0 ../code/train.py"
    job.write_text(job.read_text().replace(plain, f'none command sh -c "{by_agent}; exit \\$?"'))
    assert str(agent) in job.read_text()
    saves_and_resumes(run, holding=2)


def test_without_a_handler_no_signal_is_sent(tmp_path: Path) -> None:
    run = saver_run(tmp_path, MEGATRON, save_signal=("TERM",), env={"WITHOUT_HANDLER": "1"})
    with started(run) as script:
        wait_for_text(run, "holds in step")
        time_is_over(script)
        wait_for_text(run, "asking the program to save and exit")
        (run / "go").touch()
        until(lambda: "iteration       40/" in log_of(run), "more steps")
        assert not asked(run) and script.poll() is None


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    need(*parts.SLURM)
    with SlurmLab(nodes=2, plugins=()) as made:
        yield made


def test_on_two_nodes_of_slurm(lab: SlurmLab, tmp_path: Path) -> None:
    """Slurm signals the batch script, which asks the task of each node; the requeued job resumes."""
    job = Job("train", BARE, script="train.py", launcher="srun", save_signal=("TERM",), restart=Restart(time_limit=1),
              env={**PYTHON, "PHASE": "evaluation"}, resources=Resources(nodes=2, time_minutes=60))  # fmt: skip
    run = write_run(tmp_path, job, site=SLURM, code={"train.py": MEGATRON})
    job_id = scheduler.parse_submit(lab.run(scheduler.submit(run, ()), cwd=run).stdout)
    wait_for_text(run, "rank 0 holds in evaluation")
    until(lambda: "holds in evaluation" in (run / "attempts/1/rank-1.log").read_text(), "rank 1")
    lab.run(("scancel", "--batch", "--signal=USR2", job_id))
    until(lambda: len(list(run.glob("attempts/1/save-signal-*"))) == 2, "two signals")
    (run / "go").touch()
    until((run / "attempts/2/exit_code").exists, "the second attempt")
    assert causes(run) == ["time_limit", "done"] and resumed(run) == saved(run), log_of(run)
    assert (run / "attempts/1/exit_code").read_text() == "75\n"


def test_none_turns_the_signal_off(tmp_path: Path) -> None:
    run = saver_run(tmp_path, MEGATRON, save_signal=("none",))
    with started(run) as script:
        wait_for_text(run, "holds in step")
        time_is_over(script)
        wait_for_text(run, "asking the program to save and exit")
        (run / "go").touch()
        until(lambda: "iteration       40/" in log_of(run), "more steps")
        assert not asked(run)


def test_a_program_that_reaches_its_last_step_is_done(tmp_path: Path) -> None:
    """Although it was asked to save shortly before."""
    text = MEGATRON.replace("total = 400 if here == 1", "total = 3 if here == 1")
    run = saver_run(tmp_path, text, save_signal=("none",))
    with started(run) as script:
        wait_for_text(run, "holds in step")
        time_is_over(script)
        wait_for_text(run, "asking the program to save and exit")
        (run / "go").touch()
        assert script.wait(120) == 0, log_of(run)
    assert causes(run) == ["done"]


def test_exit_code_0_on_usr2_before_the_last_step_is_no_end(tmp_path: Path) -> None:
    """A program that handles USR2 needs no save_signal."""
    run = saver_run(tmp_path, MEGATRON.replace("SIGTERM,", "SIGUSR2,"))
    with started(run) as script:
        wait_for_text(run, "holds in step")
        time_is_over(script)
        wait_for_text(run, "asking the program to save and exit")
        (run / "go").touch()
        assert script.wait(120) == 0, log_of(run)
    assert causes(run) == ["time_limit", "done"] and resumed(run) == saved(run)


@pytest.mark.parametrize(
    ("steps", "told", "early"),
    [
        ("10/100 20/100", False, True),
        ("90/100 100/100", True, False),
        ("90/105 100/105", False, False),  # every tenth step is logged: the last ones may have been made
        ("90/105 100/105", True, True),
        ("100/105", False, True),
        ("", False, False),
        ("", True, True),
    ],
)
def test_the_last_step_decides(tmp_path: Path, steps: str, told: bool, early: bool) -> None:
    attempt = tmp_path / "attempts/1"
    attempt.mkdir(parents=True)
    (attempt / "save-and-exit").touch()
    if told:
        (attempt / "save-signal-0").touch()
    pairs = [each.split("/") for each in steps.split()]
    lines = (json.dumps({"total_steps": int(total), "step": int(step), "loss": 2.5}) for step, total in pairs)
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    text = f"RUNNER_RUN={tmp_path} RUNNER_ATTEMPT={attempt}; . {RESTART}; . {TRAINER}; stopped_early && echo early"
    done = subprocess.run(("bash", "-uc", text), cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout == "early\n") == early and done.stderr == ""


def test_a_save_that_ends_after_term_keeps_its_exit_code(tmp_path: Path) -> None:
    """The cause is recorded at once, because Slurm kills the job soon; the exit code is that of the program."""
    run = saver_run(tmp_path, MEGATRON, env={"PHASE": "step"})
    with started(run) as script:
        wait_for_text(run, "holds in step")
        os.kill(script.pid, signal.SIGTERM)
        until((run / "attempts/1/cause").exists)
        (run / "go").touch()
        assert script.wait(120) == 0, log_of(run)
    assert causes(run) == ["cancelled"] and (run / "attempts/1/exit_code").read_text() == "0\n"
    assert "cannot create" not in log_of(run) and not (run / "attempts/1/finished").exists()
