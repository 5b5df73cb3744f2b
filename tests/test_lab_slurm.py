"""The lab's Slurm behaves like a small cluster of GH200 nodes, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.lab import processes
from tests.lab.processes import LabError
from tests.lab.slurm import SlurmLab


def test_three_nodes_are_idle_with_four_gpus_and_288_cores(slurm: SlurmLab) -> None:
    shown = slurm.run(("sinfo", "--noheader", "-p", "normal", "-N", "-o", "%N %c %G")).stdout
    assert shown.splitlines() == [f"{node} 288 gpu:4" for node in ("nid001", "nid002", "nid003")]


def test_srun_reaches_two_nodes_and_shows_four_gpus_on_each(slurm: SlurmLab) -> None:
    script = 'echo "$SLURMD_NODENAME $SLURM_PROCID $CUDA_VISIBLE_DEVICES"'
    argv = ("srun", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "bash", "-c", script)
    lines = sorted(slurm.run(argv).stdout.splitlines())
    assert [line.split()[1:] for line in lines] == [["0", "0,1,2,3"], ["1", "0,1,2,3"]]
    assert len({line.split()[0] for line in lines}) == 2


def test_sbatch_runs_a_script_and_its_exit_code_is_known_without_sacct(slurm: SlurmLab, tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=2 --time=00:05:00\necho job $SLURM_NNODES\nsrun hostname\nexit 3\n")
    job = slurm.run(("sbatch", "--parsable", f"--output={tmp_path}/out", str(script))).stdout.strip()
    assert slurm.wait_for(job, ("FAILED", "COMPLETED"))["ExitCode"] == "3:0"
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines[0] == "job 2" and len(lines) == 3
    assert slurm.run(("sacct", "-j", job), check=False).returncode != 0


def test_a_cancelled_job_ends(slurm: SlurmLab, tmp_path: Path) -> None:
    job = slurm.run(("sbatch", "--parsable", "--output=/dev/null", "--wrap", "sleep 600")).stdout.strip()
    slurm.wait_for(job, "RUNNING")
    slurm.run(("scancel", job))
    assert slurm.wait_for(job, "CANCELLED", timeout=60)["JobState"] == "CANCELLED"


def test_waiting_in_vain_names_the_state_that_the_job_is_in(slurm: SlurmLab) -> None:
    job = slurm.run(("sbatch", "--parsable", "--output=/dev/null", "--wrap", "sleep 30")).stdout.strip()
    with pytest.raises(LabError, match=r"is (RUNNING|PENDING)"):
        slurm.wait_for(job, "COMPLETED", timeout=0.2)
    slurm.run(("scancel", job))


def test_limits_of_a_partition_are_enforced_at_submission(slurm: SlurmLab) -> None:
    argv = ("sbatch", "--partition=debug", "--time=02:00:00", "--wrap", "true")
    refused = slurm.run(argv, check=False)
    assert refused.returncode != 0 and "time limit" in refused.stderr


def test_two_labs_run_at_once_and_know_nothing_of_each_other(slurm: SlurmLab) -> None:
    with SlurmLab(nodes=1, plugins=()) as other:
        job = other.run(("sbatch", "--parsable", "--output=/dev/null", "--job-name=other", "--wrap", "true")).stdout
        other.wait_for(job.strip(), "COMPLETED")
        assert "other" not in slurm.run(("squeue", "--states=all", "--noheader", "-o", "%j")).stdout
        assert other.folder != slurm.folder


def test_stop_ends_daemons_steps_and_containers_and_removes_the_folder(tmp_path: Path, busybox_sqsh: Path) -> None:
    edf = tmp_path / "e.toml"
    edf.write_text(f'image = "{busybox_sqsh}"\n')
    with SlurmLab(nodes=1) as lab:
        waiting = subprocess.Popen(
            ("srun", f"--environment={edf}", "sh", "-c", "echo up; exec sleep 987654"),
            env=lab.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert waiting.stdout is not None and waiting.stdout.readline() == b"up\n"
        assert len(processes.marked(lab.folder)) >= 5
    assert not processes.marked(lab.folder)
    assert not lab.folder.exists()
    assert _sleepers() == []
    waiting.kill()
    waiting.wait()


def _sleepers() -> list[int]:
    found = subprocess.run(("pgrep", "-x", "-f", "sleep 987654"), capture_output=True, text=True, check=False)
    return [pid for pid in map(int, found.stdout.split()) if processes.is_alive(pid)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_process_that_started_a_lab_is_ended(number: signal.Signals) -> None:
    program = """
        import time
        from tests.lab.slurm import SlurmLab
        with SlurmLab(nodes=1, plugins=()) as lab:
            print(lab.folder, flush=True)
            time.sleep(60)
    """
    owner = subprocess.Popen(
        (sys.executable, "-c", textwrap.dedent(program)),
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert owner.stdout is not None
    folder = Path(owner.stdout.readline().strip())
    assert processes.marked(folder)
    os.kill(owner.pid, number)
    owner.wait()
    processes.wait_until(lambda: not processes.marked(folder) and not folder.exists(), 60, "the lab to be gone")


def test_a_lab_that_cannot_start_says_why_and_leaves_nothing() -> None:
    lab = SlurmLab(nodes=1, plugins=(), extra_config=("NoSuchParameter=1",))
    with pytest.raises(LabError, match="NoSuchParameter"):
        lab.start()
    assert not lab.folder.exists() and not processes.marked(lab.folder)


def test_by_hand_it_prints_what_a_shell_needs_and_three_commands_to_try(tmp_path: Path) -> None:
    """`runner` of this Python, the lab's Slurm, and the images of the demo."""
    environ = {**os.environ, "RUNNER_IMAGES": "", "XDG_DATA_HOME": str(tmp_path)}
    lab = subprocess.Popen(
        (sys.executable, "-m", "tests.lab", "run"),
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert lab.stdout and lab.stderr
        exports = "".join(lab.stdout.readline() for _ in range(3))
        commands = [line for line in (lab.stderr.readline() for _ in range(5)) if line.startswith("  runner ")]
        shell = f"{exports}sinfo --noheader -o %P; echo $RUNNER_IMAGES; command -v runner"
        shown = subprocess.run(("sh", "-euc", shell), capture_output=True, text=True, check=True).stdout.split()
    finally:
        lab.send_signal(signal.SIGINT)
        lab.communicate(timeout=60)
    assert len(commands) == 3
    assert shown[:2] == ["normal*", "debug"]
    assert shown[2:] == [f"{tmp_path}/runner/images", str(Path(sys.executable).parent / "runner")]
