"""On a real Slurm, in a real container: what a user launches is what each task gets, and how it went is known."""

import json
import os
import re
import shutil
import signal
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.conftest import need
from tests.end_to_end.conftest import Runner, environment, write
from tests.lab.images import busybox_root, enroot_files
from tests.lab.slurm import SlurmLab
from tests.waiting import until

SEEN = """\
echo "task $SLURM_PROCID of $SLURM_NTASKS: $GREETING, $FROM_EDF, $FROM_JOB, $HOST_OR_IMAGE"
cat /mnt/note.txt
echo "here $PWD"
[ "$SLURM_PROCID" != 0 ] || echo "data" >"$RUNNER_RUN/from-inside.txt"
[ -e /etc/debian_version ] && echo "the host's files" || echo "the image's files"
"""


@pytest.fixture
def boxed(project: Path, busybox_sqsh: Path) -> str:
    """The name of an environment on the busybox image, with a mount and variables."""
    variables = {"FROM_EDF": "edf $x 'y'", "HOST_OR_IMAGE": "edf"}
    write(project, {"edf/box.toml": environment(busybox_sqsh, [f"{project}/data:/mnt"], variables)})
    write(project, {"jobs/seen.sh": SEEN, "jobs/seen.toml": JOB_FILE})
    return "box"


def test_the_shipped_cpu_environment_keeps_the_images_path(
    cluster: Runner, slurm: SlurmLab, project: Path, tmp_path: Path
) -> None:
    """`launch --env cpu --script hello`: a login shell reads Debian's /etc/profile; edf/cpu.toml sets PATH after it."""
    if not slurm.plugins:
        pytest.skip("this Slurm has no container plug-in")
    need("mksquashfs", "busybox")
    root, images = tmp_path / "root", tmp_path / "images"
    busybox_root(root)
    variables = {"PATH": "/opt/venv/bin:/usr/bin:/bin"}
    for name, text in enroot_files(variables, workdir="/srv").items():
        (root / name).write_text(text)
    (root / "etc/profile").write_text('PATH="/usr/local/bin:/usr/bin:/bin"\nexport PATH\n')
    python = root / "opt/venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "the image\'s python, PATH $PATH"\n')
    python.chmod(0o755)
    images.mkdir()
    argv = ("mksquashfs", root, images / "cpu.sqsh", "-all-root", "-quiet", "-no-progress")
    subprocess.run(argv, check=True, capture_output=True)
    runner = Runner(project, {**cluster.environ, "RUNNER_IMAGES": str(images)}, cluster.site)
    words = ("--env", "cpu", "--script", "hello", "--engine", "ce", "--time", "5")
    _, log = runner.finished(*words)
    assert "the image's python, PATH /opt/venv/bin:" in log


JOB_FILE = """\
script = "jobs/seen.sh"
environment = "box"
launcher = "none"
[resources]
nodes = 2
tasks_per_node = 2
time = "5"
[env]
FROM_JOB = "job"
"""


@pytest.mark.parametrize(
    ("site", "engine"), [("generic-slurm", "ce"), ("generic-pyxis", "pyxis"), ("generic-slurm", "sandbox")]
)
@pytest.mark.uses("bubblewrap", "squashfuse")
def test_two_nodes_with_two_tasks_each_in_the_container(
    cluster: Runner, boxed: str, slurm: SlurmLab, site: str, engine: str
) -> None:
    """Image, mount, variables (EDF over image over host) and folder are the same for all four tasks, on each engine."""
    if engine != "sandbox" and not slurm.plugins:
        pytest.skip("this Slurm has no container plug-in")
    runner = Runner(cluster.project, cluster.environ, site)
    folder, log = runner.finished("seen", "--engine", engine)
    tasks = sorted(re.findall(r"task (\d) of 4: (.*)", log))
    assert [task for task, _ in tasks] == ["0", "1", "2", "3"]
    assert {rest for _, rest in tasks} == {"from the image, edf $x 'y', job, edf"}
    assert log.count("from the mount\n") == 4
    assert log.count(f"here {folder}/code\n") == 4
    assert log.count("the image's files\n") == 4
    assert (folder / "from-inside.txt").read_text() == "data\n"
    status = runner.status(folder.name)
    assert (status["state"], status["nodes"]) == ("COMPLETED", "nid[001-002]")


def test_the_submitted_script_is_that_of_the_dry_run(cluster: Runner, boxed: str) -> None:
    shown = cluster("launch", "seen", "--dry-run")
    assert not cluster.runs.exists()
    folder = cluster.launch("seen")
    assert (folder / "job.sbatch").read_text() == shown.stdout
    assert f"cd {cluster.runs}/seen-NNNN && sbatch job.sbatch" in shown.stderr
    cluster("cancel", "last")


def test_a_dry_run_needs_no_scheduler_no_image_and_no_mount(cluster: Runner, project: Path) -> None:
    write(project, {"edf/far.toml": environment(Path("/far/away.sqsh"), [f"{project}/nothing:/mnt"])})
    bare = Runner(project, {**cluster.environ, "PATH": "/nonexistent"}, "alps-clariden")
    shown = bare("launch", "--env", "far", "--account", "a", "--dry-run", "--", "true")
    assert "--environment=" in shown.stdout
    assert "/far/away.sqsh" in shown.stderr and "/nothing" in shown.stderr


def test_sbatch_by_hand_is_the_whole_submission(cluster: Runner, boxed: str, slurm: SlurmLab) -> None:
    """Where runner is not installed `cd RUN && sbatch job.sbatch` makes the next attempt of the same run."""
    folder, _ = cluster.finished("--env", "box", "--", "echo", "by hand")
    environ = {**slurm.environ, "PATH": f"{slurm.folder}/bin:/usr/bin:/bin:/usr/sbin"}
    job_id = slurm.run(("sbatch", "--parsable", "job.sbatch"), cwd=folder, env=environ).stdout.strip()
    slurm.wait_for(job_id, "COMPLETED")
    assert (folder / "attempts/2/exit_code").read_text() == "0\n"
    assert (folder / "job.log").read_text().count("by hand\n") == 2
    held = slurm.run(("sbatch", "--parsable", "--hold", "job.sbatch"), cwd=folder, env=environ).stdout.strip()
    status = cluster.status(folder.name)  # seen before it starts, when no file names it
    assert (status["state"], status["job_id"]) == ("PENDING", held)
    cluster("cancel", folder.name)
    status = cluster.status(folder.name)
    assert (status["state"], status["exit_code"]) == ("COMPLETED", 0), "what ran had ended well before"


def test_exit_codes_pass_through(cluster: Runner, boxed: str) -> None:
    folder, _ = cluster.finished("--env", "box", "--", "sh", "-c", "exit 43", code=43)
    status = cluster.wait(folder.name, lambda status: status["state"] != "COMPLETING")  # Slurm is still cleaning up
    assert (status["state"], status["exit_code"]) == ("FAILED", 43)


def test_status_asks_squeue_once_for_all_runs_and_never_sacct(cluster: Runner, boxed: str, tmp_path: Path) -> None:
    """Five runs, one squeue; the lab has no accounting, so that sacct could only fail."""
    for _ in range(5):
        cluster("launch", "--env", "box", "--name", "many", "--", "sleep", "600")
    calls = tmp_path / "calls"
    watched = {}
    for name in ("squeue", "sacct", "scontrol"):
        real = shutil.which(name, path=cluster.environ["PATH"])
        write(tmp_path / "bin", {name: f'#!/bin/sh\necho {name} >>{calls}\nexec {real} "$@"\n'})
        (tmp_path / "bin" / name).chmod(0o755)
        watched["PATH"] = f"{tmp_path / 'bin'}:{cluster.environ['PATH']}"
    shown = json.loads(cluster("status", "--json", extra_environ=watched).stdout)
    assert {each["state"] for each in shown} <= {"PENDING", "RUNNING", "CONFIGURING"}
    assert len(shown) == 5
    assert calls.read_text().split().count("squeue") == 1
    assert "sacct" not in calls.read_text()
    cluster("cancel", *(each["run"] for each in shown))


def test_status_reads_the_run_folder_when_slurm_has_forgotten(cluster: Runner, boxed: str) -> None:
    """Without an answer of the scheduler the attempt's own exit code counts; a run it knows nothing of is UNKNOWN."""
    folder, _ = cluster.finished("--env", "box", "--", "true")
    gone = {"PATH": "/nonexistent"}
    shown = json.loads(cluster("status", "--json", "last", extra_environ=gone).stdout)[0]
    assert (shown["state"], shown["exit_code"]) == ("COMPLETED", 0)
    (job_id,) = json.loads((folder / "run.json").read_text())["job_ids"]
    for path in filter(Path.exists, (folder / name for name in ("run.json", "job_ids", "attempts/1/started"))):
        path.write_text(path.read_text().replace(job_id, "999999"))
    assert cluster.status("last")["state"] == "COMPLETED"
    (folder / "attempts/1/exit_code").unlink()
    lost = cluster.status("last")
    assert lost["state"] == "LOST" and "no longer knows" in lost["reason"]
    shown = json.loads(cluster("status", "--json", "last", extra_environ=gone).stdout)[0]
    assert shown["state"] == "UNKNOWN"


def test_cancel_ends_a_running_and_a_waiting_job(cluster: Runner, boxed: str, slurm: SlurmLab) -> None:
    running = cluster.launch("--env", "box", "--nodes", "3", "--", "sleep", "600")
    cluster.wait("last", lambda status: status["state"] == "RUNNING")
    waiting = cluster.launch("--env", "box", "--nodes", "3", "--sbatch=--exclusive", "--", "sleep", "600")
    shown = cluster("cancel", "--dry-run", "last").stdout
    assert shown.startswith("scancel ")
    assert cluster("cancel", running.name, waiting.name).stdout.split() == [running.name, waiting.name]
    for folder in (running, waiting):
        state = cluster.wait(folder.name, lambda status: status["state"] not in ("RUNNING", "PENDING", "COMPLETING"))
        assert state["state"] == "CANCELLED"


def test_logs_follow_from_the_queue_to_the_end(cluster: Runner, boxed: str) -> None:
    cluster("launch", "--env", "box", "--", "sh", "-c", "for i in 1 2 3; do echo line $i; sleep 0.3; done")
    done = cluster("logs", "-f", "last")
    assert [line for line in done.stdout.splitlines() if line.startswith("line")] == ["line 1", "line 2", "line 3"]
    assert "COMPLETED, exit code 0" in done.stderr


def test_logs_of_single_ranks(cluster: Runner, boxed: str) -> None:
    """With the srun launcher each rank writes to a file of its own; rank 0 is seen in job.log."""
    command = ("sh", "-c", "echo I am rank $RANK of $WORLD_SIZE on $SLURMD_NODENAME")
    cluster.finished("--env", "box", "--launcher", "srun", "--nodes", "2", "--tasks-per-node", "2", "--", *command)
    assert "I am rank 0 of 4" in cluster("logs", "last").stdout
    for rank in range(4):
        assert f"I am rank {rank} of 4" in cluster("logs", "last", "--rank", str(rank)).stdout
    assert "ranks are 0 to 3" in cluster("logs", "last", "--rank", "4", code=1).stderr


def test_shell_in_the_environment_and_inside_a_running_run(cluster: Runner, boxed: str) -> None:
    """The same image, mounts and variables as the job; inside a run its allocation, folder and job variables."""
    words = ("sh", "-c", "echo $GREETING, $FROM_EDF, $HOST_OR_IMAGE; cat /mnt/note.txt; exit 9")
    done = cluster("shell", "box", "--", *words, code=9)
    assert done.stdout == "from the image, edf $x 'y', edf\nfrom the mount\n"
    folder = cluster.launch("seen", "--", "x")
    write(folder.parent, {})
    until(lambda: (folder / "from-inside.txt").exists(), "the job")
    running = cluster.launch("--env", "box", "--", "sleep", "600")
    job_id = cluster.wait("last", lambda status: status["state"] == "RUNNING")["job_id"]
    until(lambda: (running / "attempts/1/environment.sh").exists(), "the task")
    done = cluster("shell", "last", "--", "sh", "-c", "echo $SLURM_JOB_ID $GREETING $PWD; cat /mnt/note.txt")
    assert done.stdout == f"{job_id} from the image {running}/code\nfrom the mount\n"
    assert "a new container from the same image inside its allocation" in done.stderr
    cluster("cancel", "last")


def test_shell_has_a_terminal_when_the_user_has_one(cluster: Runner, boxed: str) -> None:
    """`srun --pty`: a prompt on a pseudo-terminal answers what is typed."""
    script = Path("/usr/bin/script")
    if not script.exists():
        pytest.skip("script (bsdutils) is not installed")
    words = " ".join(cluster.argv("shell", "box"))
    done = subprocess.run(
        (script, "-qec", words, "/dev/null"), input="test -t 0 && echo on-a-terminal $GREETING\nexit 4\n",
        env=dict(cluster.environ), cwd=cluster.project, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert "on-a-terminal from the image" in done.stdout
    assert done.returncode == 4


def test_what_sbatch_refuses_is_told_in_its_words_and_leaves_nothing(cluster: Runner, boxed: str) -> None:
    done = cluster("launch", "--env", "box", "--partition", "nowhere", "--", "true", code=1)
    assert "sbatch rejected the job" in done.stderr
    assert "invalid partition specified: nowhere" in done.stderr
    assert "--partition NAME" in done.stderr
    assert not cluster.made()


def test_a_missing_sbatch_is_named_with_its_package(cluster: Runner, boxed: str) -> None:
    done = cluster("launch", "--env", "box", "--", "true", code=1, extra_environ={"PATH": "/nonexistent"})
    assert "sbatch" in done.stderr and "slurm-client" in done.stderr
    assert not cluster.made()


def test_slurm_flags_pass_through(cluster: Runner, boxed: str, slurm: SlurmLab) -> None:
    folder = cluster.launch("--env", "box", "--sbatch=--comment=a b#c", "--srun=--label", "--", "echo", "labelled")
    fields = slurm.run(("scontrol", "show", "job", cluster.status("last")["job_id"])).stdout
    assert "Comment=a b#c" in fields
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", tomllib.loads((folder / "lock.toml").read_text())["slurm"]["version"])
    cluster.wait("last", lambda status: status["state"] == "COMPLETED")
    assert "0: labelled" in (folder / "job.log").read_text()


def test_ctrl_c_during_sbatch_never_leaves_a_job_that_nobody_knows(
    cluster: Runner, boxed: str, slurm: SlurmLab, tmp_path: Path
) -> None:
    """The terminal sends Ctrl-C to sbatch too; the submission is finished and recorded before we leave."""
    real = shutil.which("sbatch", path=cluster.environ["PATH"])
    mark, go = tmp_path / "submitting", tmp_path / "go"
    waits = f"touch {mark}; until [ -e {go} ]; do sleep 0.1; done"
    write(tmp_path / "bin", {"sbatch": f'#!/bin/sh\n[ "$1" = --version ] || {{ {waits}; }}\nexec {real} "$@"\n'})
    (tmp_path / "bin/sbatch").chmod(0o755)
    slow = Runner(
        cluster.project, {**cluster.environ, "PATH": f"{tmp_path / 'bin'}:{cluster.environ['PATH']}"}, "generic-slurm"
    )
    launching = slow.start("launch", "--env", "box", "--", "sleep", "600", start_new_session=True)
    until(mark.exists, "sbatch")
    os.killpg(launching.pid, signal.SIGINT)
    go.touch()
    _, said = launching.communicate(timeout=600)
    assert launching.returncode == 130, said
    (folder,) = cluster.made()
    record = json.loads((folder / "run.json").read_text())
    assert record["state"] == "submitted"
    assert slurm.job(record["job_ids"][0])["JobName"] == "sleep"
    cluster("cancel", "last")


LOUD = """\
touch "$RUNNER_RUN/started-$SLURM_PROCID"
[ "$SLURM_PROCID" = 1 ] || exec sleep 1000
until [ -e "$RUNNER_RUN/go" ]; do sleep 0.1; done
seq -f "line %.0f" 1 20000
echo "ModuleNotFoundError: No module named 'trl'" >&2
exit 1
"""


def test_the_last_lines_of_a_task_that_fails_are_in_the_log_in_their_order(cluster: Runner) -> None:
    """Also if srun writes them only after the task has ended. The cause of the failure is read from them."""
    write(cluster.project, {"jobs/loud.sh": LOUD})
    words = ("--env", "host", "--engine", "host", "--launcher", "none", "--nodes", "2", "--script", "loud")
    folder = cluster.launch(*words, "--time", "5")
    until(lambda: len(list(folder.glob("started-*"))) == 2)
    sruns = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if (line := path.read_bytes()).partition(b"\0")[0].endswith(b"srun") and str(folder).encode() in line
    ]
    assert sruns
    for pid in sruns:
        os.kill(pid, signal.SIGSTOP)
    (folder / "go").touch()
    until((folder / "attempts/1/first_failure").exists)
    for pid in sruns:
        os.kill(pid, signal.SIGCONT)
    cluster.wait(folder.name, lambda status: status["state"] == "FAILED")
    lines = (folder / "job.log").read_text().splitlines()
    last = lines.index("line 20000")
    assert [line for line in lines if line.startswith("line ")] == [f"line {n}" for n in range(1, 20001)]
    # the other task's shell may say before it that it was ended
    assert "ModuleNotFoundError: No module named 'trl'" in lines[last + 1 :]
    assert (folder / "attempts/1/error").read_text().startswith("module-missing ")
