"""Without a scheduler: the same commands, the same run folder, on this machine."""

import json
import os
import signal
import subprocess
import time
import tomllib
from pathlib import Path

from tests.end_to_end.conftest import Runner, environment, write
from tests.lab import processes
from tests.waiting import until

HOST = ("--engine", "host", "--env", "plain")


def test_a_command_runs_and_its_exit_code_is_passed_on(local: Runner) -> None:
    """Output in job.log, the code from `--wait`, from `status`, and in the run folder."""
    folder, log = local.finished(*HOST, "--", "sh", "-c", 'echo "$FROM_EDF at $PWD"; exit 7', code=7)
    assert f"edf at {folder}/code\n" in log
    assert (folder / "attempts/1/exit_code").read_text() == "7\n"
    status = local.status("last")
    assert (status["state"], status["exit_code"], status["run"]) == ("FAILED", 7, "sh-0001")


def test_words_after_the_dashes_reach_a_script_untouched(local: Runner) -> None:
    words = ("", "a b", "$HOME", "$(id)", "`id`", "'", '"', "--", "-x", "\n", "#", "ü😀", "\\", "*")
    folder, log = local.finished(*HOST, "--script", "where", "--", *words)
    assert f"script {folder}/code/jobs/where.sh" in log
    assert "".join(f"<{word}>\n" for word in words) in log


def test_the_submitted_script_is_that_of_the_dry_run(local: Runner) -> None:
    """Byte for byte, and a dry run leaves nothing behind."""
    words = (*HOST, "--script", "where", "--name", "same", "--", "a b")
    shown = local("launch", "--dry-run", *words).stdout
    assert not local.runs.exists()
    assert (local.launch(*words) / "job.sbatch").read_text() == shown


def test_the_script_runs_by_hand_without_runner(local: Runner) -> None:
    """`cd RUN && bash job.sbatch` is a new attempt of the same run, with no runner and no Python on the path."""
    folder, _ = local.finished(*HOST, "--", "echo", "by hand")
    done = subprocess.run(
        ("bash", "job.sbatch"), cwd=folder, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "by hand\n"
    assert (folder / "attempts/2/exit_code").read_text() == "0\n"


def test_the_snapshot_is_what_runs(local: Runner) -> None:
    """Changes after the launch do not reach the run."""
    local("launch", *HOST, "--name", "slow", "--", "sh", "-c", "sleep 2; sh jobs/where.sh")
    write(local.project, {"jobs/where.sh": "echo changed\n"})
    local.wait("last", lambda status: status["state"] == "COMPLETED")
    assert "changed" not in local("logs", "last").stdout
    assert "here " in local("logs", "last").stdout


def test_the_lock_names_every_input_and_no_secret(local: Runner) -> None:
    subprocess.run(("git", "init", "-q", "."), cwd=local.project, check=True)
    write(local.project, {"edf/plain.toml": environment(None, env={"HF_TOKEN": "hf_" + "x" * 30, "LEVEL": "3"})})
    folder, _ = local.finished(*HOST, "--", "true", "--wandb-key", "abc123secret")
    text = (folder / "lock.toml").read_text() + (folder / "run.json").read_text()
    assert "xxxx" not in text and "abc123secret" not in text
    lock = tomllib.loads((folder / "lock.toml").read_text())
    assert lock["environment"]["env"]["LEVEL"] == "3"
    assert lock["code"]["dirty"] is True and "runner.toml" in lock["code"]["untracked"]
    assert lock["site"]["values"]["scheduler"] == "local"
    assert lock["job"]["sources"]["command"] == "command line"


def test_a_script_of_the_users_own_from_anywhere(local: Runner, tmp_path: Path) -> None:
    """A .py from outside the project sees itself, its arguments, and the project's files around it."""
    code = "import os, sys\nprint(os.path.relpath(__file__), sys.argv[1:], os.path.exists('jobs/where.sh'))\n"
    write(tmp_path, {"else where/own.py": code})
    words = ("--launcher", "none", "--script", str(tmp_path / "else where/own.py"), "--", "--x", "1")
    _, log = local.finished(*HOST, *words)
    assert "own.py ['--x', '1'] True\n" in log


def test_the_job_outlives_the_command_that_started_it(local: Runner) -> None:
    """Ctrl-C while waiting leaves the job alone, and says so."""
    text = "echo started; until [ -e ../go ]; do sleep 0.1; done"
    waiting = local.start("launch", "--wait", *HOST, "--name", "long", "--", "sh", "-c", text)
    until(lambda: "started" in log_of(local, "long-0001"), "the job to start")
    waiting.send_signal(signal.SIGINT)
    _, said = waiting.communicate(timeout=600)
    assert waiting.returncode == 130
    assert "long-0001 keeps running" in said
    assert local.status("long-0001")["state"] == "RUNNING"
    (local.runs / "long-0001/go").touch()
    assert local.wait("long-0001", lambda status: status["state"] == "COMPLETED")["exit_code"] == 0


def log_of(runner: Runner, run: str) -> str:
    path = runner.runs / run / "job.log"
    return path.read_text() if path.exists() else ""


def test_cancel_ends_every_process(local: Runner) -> None:
    """Those that ignore SIGTERM's first visit in a grandchild too; the state says CANCELLED."""
    folder = local.launch(*HOST, "--name", "endless", "--", "sh", "-c", "(sleep 1000; true) & echo up; wait")
    until(lambda: "up" in log_of(local, "endless-0001"), "the job to start")
    session = int(json.loads((folder / "run.json").read_text())["job_ids"][0].removeprefix("local-"))
    assert local("cancel", "last").stdout == "endless-0001\n"
    assert local.status("last")["state"] == "CANCELLED"
    left = [
        pid
        for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
        if in_session(pid, session)
    ]
    assert not left
    assert "had already ended" in local("cancel", "last").stderr


def in_session(pid: int, session: int) -> bool:
    try:
        return os.getsid(pid) == session and processes.is_alive(pid)
    except ProcessLookupError:
        return False


def test_a_killed_job_is_lost_and_says_so(local: Runner) -> None:
    folder = local.launch(*HOST, "--", "sleep", "1000")
    until(lambda: (folder / "attempts/1/environment.sh").exists(), "the job to start")
    session = int(json.loads((folder / "run.json").read_text())["job_ids"][0].removeprefix("local-"))
    os.killpg(session, signal.SIGKILL)
    status = local.wait("last", lambda status: status["state"] != "RUNNING")
    assert status["state"] == "LOST" and "no exit code" in status["reason"]


def test_logs_follow_until_the_end(local: Runner) -> None:
    local("launch", *HOST, "--", "sh", "-c", "for i in 1 2 3; do echo line $i; sleep 0.5; done")
    done = local("logs", "-f", "last")
    assert done.stdout.endswith("line 1\nline 2\nline 3\njob.sbatch: attempt 1 ended with exit code 0\n")
    assert "COMPLETED, exit code 0" in done.stderr


def test_nothing_stays_of_a_launch_that_fails(local: Runner) -> None:
    """A refused launch, and one that is stopped by Ctrl-C while it copies, leave no run folder."""
    local("launch", *HOST, "--nodes", "2", "--", "true", code=1)
    assert not local.made()


def test_ctrl_c_while_the_folder_is_made_leaves_nothing(local: Runner) -> None:
    big = local.project / "jobs" / "many"
    write(big, {f"f{number}.py": "x" * 1000 for number in range(4000)})
    for files in (1, 20, 1000):  # the first file, some of the payload, some of the code
        before = count(local.runs)
        launching = local.start("launch", *HOST, "--", "true")
        while launching.poll() is None and count(local.runs) < before + files:
            time.sleep(0.001)
        launching.send_signal(signal.SIGINT)
        out, _ = launching.communicate(timeout=600)
        found = [path.name for path in local.made()]
        # either it was stopped and nothing is there, or it had submitted and the run is whole
        assert (
            launching.returncode == 130 and not out.strip() and all(is_whole(local.runs / name) for name in found)
        ) or (out.strip() in found)


def count(folder: Path) -> int:
    """The files below a folder that somebody else writes."""
    return sum(len(files) for _, _, files in os.walk(folder))


def is_whole(folder: Path) -> bool:
    return json.loads((folder / "run.json").read_text())["state"] == "submitted"


def test_json_and_parsable(local: Runner) -> None:
    record = json.loads(local("launch", "--json", *HOST, "--", "true").stdout)
    assert record["run"] == "true-0001" and record["job_id"].startswith("local-")
    job_id = local("launch", "--parsable", *HOST, "--", "true").stdout.strip()
    assert local.status(job_id)["run"] == "true-0002"


def test_shell_runs_a_command_in_the_environment(local: Runner) -> None:
    """Variables of the EDF, the user's own folder, the exit code; the default environment of runner.toml. Without a
    container, nothing is mounted."""
    done = local("shell", "-v", "--engine", "host", "--", "sh", "-c", "echo $FROM_EDF $PWD; exit 5", code=5)
    assert "environment plain" in done.stderr and "the default of runner.toml" in done.stderr
    assert "is mounted" not in done.stderr
    assert done.stdout.startswith("edf ")
    assert not local.made()


def test_shell_of_a_run_stands_in_its_snapshot(local: Runner) -> None:
    folder, _ = local.finished(*HOST, "--", "true")
    done = local("shell", "last", "--", "sh", "-c", "echo $FROM_EDF $PWD $RUNNER_RUN")
    assert done.stdout == f"edf {folder}/code {folder}\n"
