"""A job takes its folders from the batch script, and has its own when run by hand."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.conftest import JOBS
from training import processes
from training import run as run_folder
from training.errors import JobError


def test_folders_come_from_the_batch_script() -> None:
    run = run_folder.from_environment(
        {"RUNNER_RUN": "/r", "RUNNER_ATTEMPT": "/r/attempts/3", "RUNNER_CACHE": "/c"}, "sft"
    )
    assert (run.path, run.attempt_number, run.cache, run.by_hand) == (Path("/r"), 3, Path("/c"), False)
    assert run.save_and_exit == Path("/r/attempts/3/save-and-exit")
    assert run.checkpoints == Path("/r/checkpoints")


def test_by_hand_the_folders_lie_below_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_folder.from_environment({}, "sft")
    assert (run.path, run.by_hand) == (tmp_path / "runs" / "by-hand-sft", True)
    assert run.cache == run.path / "cache"


def test_library_caches_go_to_what_runs_share_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    run = run_folder.from_environment({"RUNNER_RUN": "/r", "RUNNER_CACHE": "/c"}, "sft")
    environment = {"HOME": str(tmp_path), "HF_HOME": "/mine"}
    run_folder.point_caches(run, environment)
    assert (environment["HF_HOME"], environment["MPLCONFIGDIR"]) == ("/mine", "/c/matplotlib")


def test_models_in_a_home_folder_that_is_seen_are_used(tmp_path: Path) -> None:
    """An empty home in a container is passed over; one with a cache of Hugging Face's is the user's."""
    run = run_folder.from_environment({"RUNNER_RUN": "/r", "RUNNER_CACHE": "/c"}, "sft")
    environment = {"HOME": str(tmp_path)}
    run_folder.point_caches(run, environment)
    assert environment["HF_HOME"] == "/c/huggingface"
    (tmp_path / ".cache/huggingface").mkdir(parents=True)
    (tmp_path / ".config/matplotlib").mkdir(parents=True)
    environment = {"HOME": str(tmp_path)}
    run_folder.point_caches(run, environment)
    assert environment.keys() - run_folder.COMPILED.keys() == {"HOME"}


def test_started_alone_a_job_is_rank_0_of_1_and_deepspeed_has_what_it_asks_for() -> None:
    environment: dict[str, str] = {}
    alone = processes.from_environment(environment)
    assert (alone.rank, alone.world_size, alone.launcher) == (0, 1, "alone")
    assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(environment)


def test_srun_tasks_without_ranks_are_refused_since_each_would_train_alone() -> None:
    with pytest.raises(JobError, match="8 tasks were started"):
        processes.from_environment({"SLURM_NTASKS": "8", "SLURM_PROCID": "3", "SLURM_STEP_ID": "0"})


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({"TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        ({"SLURM_PROCID": "1"}, "srun"),
        ({"ACCELERATE_X": "1"}, "accelerate"),
    ],
)
def test_the_launcher_is_known_by_what_it_sets(variables: dict[str, str], launcher: str) -> None:
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    found = processes.from_environment({**ranks, **variables})
    assert (found.rank, found.world_size, found.local_world_size, found.launcher) == (1, 4, 2, launcher)


def test_threads_already_set_are_kept() -> None:
    peers = processes.Processes(0, 0, 2, 2, "torchrun")
    assert processes.set_threads({"OMP_NUM_THREADS": "7"}, peers) == 7
    assert processes.set_threads({}, peers) >= 1


def test_compiled_code_goes_to_a_disk_of_the_node_and_variables_that_are_set_stay(tmp_path: Path) -> None:
    run = run_folder.from_environment({"RUNNER_RUN": "/r", "RUNNER_CACHE": "/c"}, "sft")
    environment = {"HOME": "/nonexistent", "TMPDIR": str(tmp_path), "TRITON_CACHE_DIR": "/elsewhere"}
    run_folder.point_caches(run, environment)
    assert environment["TRITON_CACHE_DIR"] == "/elsewhere"
    for variable in ("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert environment[variable].startswith(f"{tmp_path}/runner-{os.getuid()}/py"), variable
    assert (tmp_path / f"runner-{os.getuid()}").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_another_user_has_put_there_is_not_used(tmp_path: Path) -> None:
    """Code is loaded from it."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / f"runner-{os.getuid()}").symlink_to(tmp_path / "theirs")
    found = run_folder.local_folder({"TMPDIR": str(tmp_path)})
    assert not str(found).startswith(str(tmp_path))


def a_run(path: Path) -> run_folder.RunFolder:
    return run_folder.from_environment({"RUNNER_RUN": str(path)}, "sft")


def test_a_second_start_beside_a_living_one_is_refused(tmp_path: Path) -> None:
    """Killing torchrun alone leaves its workers running; a second start would write beside them."""
    with subprocess.Popen(("sleep", "60")) as other:
        try:
            started = run_folder._start_time(other.pid)
            lock = {"host": socket.gethostname(), "pid": other.pid, "started": started}
            a_run(tmp_path).lock.write_text(json.dumps(lock))
            with pytest.raises(JobError, match=f"process {other.pid} on .* is training in {tmp_path}"):
                run_folder.take_lock(a_run(tmp_path))
        finally:
            other.kill()
    run_folder.take_lock(a_run(tmp_path))
    assert json.loads(a_run(tmp_path).lock.read_text())["pid"] == os.getpid()
    run_folder.release_lock(a_run(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_lock_of_another_host_or_of_a_number_used_again_refuses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = {"host": "elsewhere", "pid": 7, "started": "1"}
    a_run(tmp_path).lock.write_text(json.dumps(lock))
    run_folder.take_lock(a_run(tmp_path))
    assert "note: process 7 on elsewhere has left its lock" in capsys.readouterr().out
    for content in (json.dumps({"host": socket.gethostname(), "pid": os.getppid(), "started": "1"}), "", "[]"):
        a_run(tmp_path).lock.write_text(content)
        run_folder.take_lock(a_run(tmp_path))


@pytest.mark.training
def test_a_module_of_the_users_own_imports_whatever_is_installed(tmp_path: Path) -> None:
    """Beside the scripts, once a job has started."""
    pytest.importorskip("torch")
    (tmp_path / "mine.py").write_text("import datasets, peft, deepspeed\nprint('all there')\n")
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]\nfrom training import job\nwith job.start('clm'):\n    import mine\n"
    )
    done = subprocess.run(
        (sys.executable, "-c", program, str(JOBS), str(tmp_path)),
        env={**os.environ, "RUNNER_RUN": str(tmp_path / "run")}, capture_output=True, text=True,
    )  # fmt: skip
    assert "all there" in done.stdout, done.stderr
    assert not (tmp_path / "run" / "training.lock").exists()


ENDS = """
import atexit, os, sys, threading, time
sys.path.insert(0, sys.argv[1])
from training import job as contract

class Aborts:  # as a thread of gloo does that releases a tensor while Python is torn down
    def __del__(self, abort=os.abort):
        abort()

def late():
    time.sleep(0.1)
    print("thread")

kept = Aborts()
kept.itself = kept
atexit.register(print, "exit handler")
threading.Thread(target=late).start()
contract.end_process(75)
"""


def test_a_library_that_aborts_while_python_is_torn_down_does_not_change_the_exit_code() -> None:
    command = (sys.executable, "-c", ENDS, str(JOBS))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout.split("\n")) == (75, ["thread", "exit handler", ""]), ended.stderr


@pytest.mark.parametrize("script", ["sft.py", "clm.py"])
def test_the_training_scripts_end_that_way(script: str) -> None:
    ends = f'    with start("{script[:-3]}") as job:\n        code = main(sys.argv[1:], job)\n    end_process(code)\n'
    assert (JOBS / script).read_text().endswith(ends)


def test_a_time_that_cannot_be_written_does_not_fail_the_training(tmp_path: Path) -> None:
    run = run_folder.from_environment({"RUNNER_RUN": str(tmp_path), "RUNNER_ATTEMPT": str(tmp_path / "gone")}, "sft")
    run_folder.note_time(run, processes.ALONE, "train")
    full = tmp_path / "full"
    full.mkdir()
    (full / "times-rank-0").symlink_to("/dev/full")
    run = run_folder.from_environment({"RUNNER_RUN": str(tmp_path), "RUNNER_ATTEMPT": str(full)}, "sft")
    run_folder.note_time(run, processes.ALONE, "train")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
