"""What lies beside the batch script works with bash and coreutils on the host, and with /bin/sh alone inside."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from runner.environments.environment import Attachment
from runner.runs import lock
from runner.runs.image import LaunchImage
from runner.runs.job import Job, Resources, Restart
from runner.runs.run import SUBMITTED, Run, load, save
from tests.runs.scripts import BARE, LOCAL, command_job, run_locally, shell_job, write_run
from tests.waiting import until

STEP = {"SLURM_JOB_ID": "71", "SLURM_JOB_NODELIST": "nid[001-002]", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}


def programs(folder: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """PATH with small programs in front."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def on_host(run: Path, text: str, environ: Mapping[str, str]) -> str:
    """What bash prints when it has read payload/attempt.sh, with the variables of a batch script."""
    program = f"set -u; RUNNER_RUN=$PWD; . payload/attempt.sh; {text}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(("bash", "-c", program), cwd=run, env={**clean, **environ}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", command_job("true"))


def test_runs_share_the_cache_beside_them(run: Path) -> None:
    assert on_host(run, 'shared_cache; printf %s "$RUNNER_CACHE"', {}) == str(run.parent / ".cache")
    assert (run.parent / ".cache").is_dir()


def test_how_an_attempt_was_followed_is_read_from_its_folder(run: Path) -> None:
    """The batch script never changes the record of the run."""
    record = Run("x-1", run, "x", "local", "slurm", "2026-11-23", state=SUBMITTED, command_line=("launch", "ü\n"))
    save(record)
    before = (run / "run.json").read_text()
    on_host(
        run,
        'for n in 1 2; do RUNNER_ATTEMPT=attempts/$n; mkdir -p $RUNNER_ATTEMPT; announce requeue "lost: $n"; done',
        {},
    )
    on_host(run, 'RUNNER_ATTEMPT=attempts/3; mkdir $RUNNER_ATTEMPT; announce in_place "rank lost" a,b', {})
    assert (run / "attempts/3/next").read_text() == "in_place\nrank lost\na,b\n"
    assert (run / "run.json").read_text() == before and load(run) == record
    assert load(run).rungs == ((1, "requeue", "lost: 1"), (2, "requeue", "lost: 2"), (3, "in_place", "rank lost"))


def test_the_user_says_where_the_cache_is(run: Path, tmp_path: Path) -> None:
    named = str(tmp_path / "my cache" / "deep")
    assert on_host(run, "shared_cache; env | grep ^RUNNER_CACHE=", {"RUNNER_CACHE": named}) == f"RUNNER_CACHE={named}\n"
    assert Path(named).is_dir()


@pytest.mark.parametrize("named", ["relative", "TMP/a:b", "TMP/a,b", "/dev/null/x"])
def test_a_cache_that_cannot_be_mounted_or_made_is_the_runs_own(run: Path, named: str) -> None:
    """The job goes on: what it would have shared lies in its run folder."""
    named = named.replace("TMP", str(run.parent))
    assert (
        on_host(run, 'shared_cache 2>/dev/null; printf %s "$RUNNER_CACHE"', {"RUNNER_CACHE": named}) == f"{run}/cache"
    )
    assert (run / "cache").is_dir()
    assert not Path(named).exists()


# what `getent ahostsv4 nid001` and `scontrol show node --oneliner nid001` print
SCONTROL = """#!/bin/sh
case "$*" in
"show hostnames nid[001-002]") printf 'nid001\\nnid002\\n' ;;
"show node --oneliner nid001") echo "NodeName=nid001 Arch=x86_64 NodeAddr=10.1.2.3 NodeHostName=nid001 State=IDLE" ;;
*) exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    ("resolver", "address"),
    [
        ("fe80::1 STREAM nid001\n10.0.0.7 STREAM\n10.0.0.8 STREAM", "10.0.0.7"),
        ("127.0.1.1 STREAM nid001\n127.0.1.1 DGRAM", "10.1.2.3"),
        ("127.0.1.1 STREAM nid001\n192.168.0.4 STREAM", "192.168.0.4"),
        ("", "10.1.2.3"),
    ],
    ids=["several, one of them IPv6", "its own loopback name", "loopback and a real one", "unknown to the resolver"],
)
def test_one_ipv4_address_that_other_nodes_reach(run: Path, tmp_path: Path, resolver: str, address: str) -> None:
    """The first node's address; NodeAddr where its name leads nowhere but to itself."""
    getent = f"#!/bin/sh\ncase $2 in nid001) cat <<'X'\n{resolver}\nX\n;; *) echo \"$2 STREAM\" ;; esac\n"
    environ = {**programs(tmp_path / "bin", {"getent": getent, "scontrol": SCONTROL}), **STEP}
    assert on_host(run, 'RUNNER_ATTEMPT=attempts/1; rendezvous; printf %s "$MASTER_ADDR"', environ) == address


def test_without_a_scheduler_processes_meet_at_home(run: Path) -> None:
    """Whatever /etc/hosts says about this machine's name."""
    assert on_host(run, 'RUNNER_ATTEMPT=attempts/1; rendezvous; printf %s "$MASTER_ADDR"', {}) == "127.0.0.1"


def test_the_port_follows_from_the_job_id(run: Path) -> None:
    """Two jobs on a node differ, and so do attempts; the same finds the same; the kernel gives none of them away."""
    jobs = ("71", "71", "72", "10071", "4000000000", "71 2", "71 3")
    ports = [int(on_host(run, f"free_port {job}", {})) for job in jobs]
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert ports[0] == ports[1]
    assert len({ports[0], ports[2], *ports[-2:]}) == 4
    assert all(1024 < port < low or port > high for port in ports)


def listened_on(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("listening", [True, False])
def test_a_port_in_use_is_passed_over(run: Path, listening: bool) -> None:
    """Listened on by anybody, on any address: the next one is taken."""
    wanted = int(on_host(run, "free_port 4321", {}))
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", wanted))
        if listening:
            taken.listen()
            free = next(port for port in count(wanted + 1) if not listened_on(port))
            assert int(on_host(run, "free_port 4321", {})) == free
        else:  # bound only: nobody can be asked, so nothing is promised, but the answer is a port
            assert int(on_host(run, "free_port 4321", {})) in (wanted, wanted + 1)


@pytest.mark.parametrize(("state", "asked"), [("RUNNING", True), ("COMPLETING", False)])
def test_slurm_does_not_wait_for_scancel_at_the_end_of_a_job(
    run: Path, tmp_path: Path, state: str, *, asked: bool
) -> None:
    """While Slurm ends a job, scancel tries again and again: the nodes would be idle until Slurm kills the script."""
    commands = {"squeue": f"#!/bin/sh\necho {state}\n", "scancel": "#!/bin/sh\n: >waited\n"}
    text = "RUNNER_JOB=7 RUNNER_ATTEMPT=. RUNNER_SAVE_AND_EXIT=told; finish_attempt() { :; }; leave TERM 'end'; true"
    on_host(run, text, programs(tmp_path / "bin", commands))
    assert ((run / "told").exists(), (run / "waited").exists()) == (True, asked)


@pytest.mark.parametrize(("finished", "ends"), [("0 1", True), ("0", False), ("", False)])
def test_a_step_that_outlives_all_its_tasks_is_ended(run: Path, finished: str, *, ends: bool) -> None:
    """Srun waits for ever for a slurmstepd that was killed. The clock of the test runs fast."""
    attempt = run / "attempts/1"
    (attempt / "finished").mkdir(parents=True)
    for rank in finished.split():
        (attempt / "finished" / rank).touch()
    (attempt / "environment.sh").write_text("export RUNNER_NODES='2'\nexport RUNNER_TASKS_PER_NODE='1'\n")
    stubs = 'moment() { printf %s "${EPOCHREALTIME/[.,]/}"; }; end_step() { echo "$2"; kill "$1"; }; rounds=0'
    stubs += '; lost_signs() { rounds=$((rounds + 1)); ((rounds < 100)) || kill "$step"; }'
    text = f"RUNNER_ATTEMPT=$PWD/attempts/1; {stubs}; sleep 600 & step=$!; watch_over $step 0"
    told = on_host(run, text, {"RUNNER_WATCH_SECONDS": "0"})
    assert ("all tasks ended 40 s ago" in told) == ends


def test_the_exit_code_of_a_step_that_was_ended_after_its_tasks_is_theirs(run: Path) -> None:
    attempt = run / "attempts/1"
    (attempt / "finished").mkdir(parents=True)
    text = "RUNNER_ATTEMPT=$PWD/attempts/1 log_bytes=0; wait_for $! 0; echo $?"
    assert on_host(run, f"sleep 600 & kill -KILL $!; {text}", {}) == "137\n"
    (attempt / "finished/0").touch()
    assert on_host(run, f"sleep 600 & kill -KILL $!; {text}", {}) == "0\n"


def test_each_start_is_an_attempt_of_its_own(run: Path) -> None:
    """A second submission of the same file never writes into the first one's folder."""
    for number in ("1", "2", "3"):
        assert run_locally(run).returncode == 0
        assert (run / "attempts" / number / "exit_code").read_text() == "0\n"
        assert (run / "attempts" / number / "ended").exists()
    assert sorted(path.name for path in (run / "attempts").iterdir()) == ["1", "2", "3"]


def test_a_folder_that_takes_no_attempts_ends_the_script(run: Path) -> None:
    """Never an endless search for a free number."""
    (run / "attempts").mkdir()
    (run / "attempts" / "1").write_text("a file of somebody's")
    done = run_locally(run)
    assert done.returncode == 1
    assert "disk full" in done.stderr


@pytest.mark.parametrize("code", [0, 1, 2, 7, 75, 127, 130, 255])
def test_the_exit_code_is_the_programs(tmp_path: Path, code: int) -> None:
    """Also in attempts/N/exit_code, for when no scheduler remembers it."""
    run = write_run(tmp_path, shell_job(f"exit {code}"))
    assert run_locally(run).returncode == code
    assert (run / "attempts/1/exit_code").read_text() == f"{code}\n"


def test_the_note_continue_means_75(tmp_path: Path) -> None:
    """torchrun turns every exit code of a worker into 1; the job's note counts."""
    run = write_run(tmp_path, shell_job('echo "{}" >"$RUNNER_ATTEMPT/continue"; exit 1'))
    assert run_locally(run).returncode == 75


def test_a_rank_that_leaves_early_does_not_end_the_one_that_saves(tmp_path: Path) -> None:
    """75 from one task ends no other, and is the run's code at the end."""
    text = '[ "$RANK" = 1 ] && exit 75; sleep 1; echo saved; exit 75'
    run = write_run(tmp_path, shell_job(text, launcher="srun", tasks=2))
    done = run_locally(run)
    assert (done.returncode, done.stdout) == (75, "saved\n")


def test_one_failure_ends_the_step_with_its_code(tmp_path: Path) -> None:
    """The others are ended, and their codes do not hide the first one's."""
    run = write_run(tmp_path, shell_job('[ "$RANK" = 1 ] && exit 7; exec sleep 1000', launcher="srun", tasks=3))
    assert run_locally(run).returncode == 7
    assert (run / "attempts/1/first_failure").read_text() == "7 task 1 node 0\n"


def test_ranks_of_srun(tmp_path: Path) -> None:
    """Each task has its rank; the first one's output is the run's, the others write files."""
    text = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR" "${MASTER_PORT:+port}"'
    run = write_run(tmp_path, shell_job(text, launcher="srun", tasks=3))
    done = run_locally(run, extra_environ={"RANK": "9", "WORLD_SIZE": "99"})
    assert done.stdout == "0 0 3 3 127.0.0.1 port\n"
    assert (run / "attempts/1/rank-2.log").read_text() == "2 2 3 3 127.0.0.1 port\n"


def test_no_ranks_without_a_launcher(tmp_path: Path) -> None:
    """Ranks of a hook of the image, or of an outer job, do not reach a command that has none."""
    run = write_run(tmp_path, shell_job('echo "${RANK-unset} ${WORLD_SIZE-unset}"'))
    assert run_locally(run, extra_environ={"RANK": "9", "WORLD_SIZE": "99"}).stdout == "unset unset\n"


@pytest.mark.parametrize(("image", "expected"), [("", "unset\n"), ("box.sqsh", "1\n")])
def test_packages_in_the_home_folder_do_not_shadow_those_of_an_image(tmp_path: Path, image: str, expected: str) -> None:
    job = shell_job('echo "${PYTHONNOUSERSITE-unset}"')
    run = write_run(tmp_path, replace(job, environment=replace(job.environment, image=image)))
    assert run_locally(run).stdout == expected


FAKE_PYTHON = """#!/bin/sh
# says with which words and ranks it was started
printf '%s\\n' "$@" "RANK=${RANK-unset}" "WORLD_SIZE=${WORLD_SIZE-unset}" "OMP=${OMP_NUM_THREADS-unset}"
"""


def words_of(
    tmp_path: Path, launcher: str, script: str | None, name: str = "python", command: tuple[str, ...] = ("prog", "a")
) -> list[str]:
    job = Job("x", BARE, script=script, command=() if script else command, arguments=("--x", "it's"),
              launcher=launcher, resources=Resources(tasks_per_node=2, cpus_per_task=3))  # fmt: skip
    run = write_run(tmp_path / "run", job)
    # a PATH with nothing but what the script needs: no python of this machine
    (tmp_path / "bin").mkdir()
    for program in ("bash", "sh", "mkdir", "date", "mv", "uname", "grep", "mktemp", "mkfifo", "rm", "cat", "sleep"):
        (tmp_path / "bin" / program).symlink_to(f"/bin/{program}")
    environ = {"PATH": str(tmp_path / "bin"), "RANK": "9", "WORLD_SIZE": "9"}
    programs(tmp_path / "bin", {name: FAKE_PYTHON})
    done = run_locally(run, extra_environ=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace(str(run), "RUN").splitlines()


def test_torchrun_is_started_as_a_module(tmp_path: Path) -> None:
    """Its own script names a Python that need not be the image's. The node rank is the task's; logs go to files."""
    words = words_of(tmp_path, "torchrun", "jobs/sft.py")
    assert words[:5] == ["-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--node-rank=0"]
    assert words[5] == "--master-addr=127.0.0.1"
    assert words[6].startswith("--master-port=2")
    assert words[7:10] == ["--log-dir=RUN/attempts/1/node-0", "--redirects=3", "--tee=0:3"]
    assert words[10:13] == ["RUN/code/jobs/sft.py", "--x", "it's"]
    assert words[13:] == ["RANK=unset", "WORLD_SIZE=unset", "OMP=3"]


def test_accelerate_is_started_as_a_module(tmp_path: Path) -> None:
    """With every answer that it would otherwise take from a file of the user's or ask for."""
    words = words_of(tmp_path, "accelerate", "jobs/sft.py")
    assert words[:2] == ["-m", "accelerate.commands.launch"]
    assert {"--num_machines=1", "--num_processes=2", "--machine_rank=0", "--multi_gpu"} <= set(words)
    assert words[-6:-3] == ["RUN/code/jobs/sft.py", "--x", "it's"]
    assert words[-3:] == ["RANK=unset", "WORLD_SIZE=unset", "OMP=3"]


@pytest.mark.parametrize(("launcher", "word"), [("torchrun", "--no-python"), ("accelerate", "--no_python")])
def test_launchers_run_commands_too(tmp_path: Path, launcher: str, word: str) -> None:
    """A command that is no Python script."""
    words = words_of(tmp_path, launcher, None)
    assert words[words.index("prog") :][:4] == ["prog", "a", "--x", "it's"]
    assert word in words


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "none"])
def test_a_module_is_run_by_the_images_python(tmp_path: Path, launcher: str) -> None:
    """`-m MODULE` is a command that every launcher knows."""
    words = words_of(tmp_path, launcher, None, "python3", command=("-m", "pkg.train"))
    assert words[-7:-3] == ["-m", "pkg.train", "--x", "it's"]
    assert not {"--no-python", "--no_python"} & set(words)


def test_python3_where_there_is_no_python(tmp_path: Path) -> None:
    """Debian's images have python3 only; the choice is made inside."""
    assert words_of(tmp_path, "none", "a.py", "python3")[:3] == ["RUN/code/a.py", "--x", "it's"]


def test_no_python_is_said(tmp_path: Path) -> None:
    """With the way out."""
    run = write_run(tmp_path / "run", Job("x", BARE, script="a.py", env={"PATH": "/nothing"}))
    done = run_locally(run)
    assert done.returncode == 127
    assert "there is no Python in this image" in done.stderr
    assert "-- COMMAND" in done.stderr


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_a_launcher_without_torch_says_what_to_do(tmp_path: Path, launcher: str) -> None:
    environ = programs(tmp_path / "bin", {"python": '#!/bin/sh\n[ "$1" = -c ] || echo "$@"; exit 1\n'})
    done = run_locally(write_run(tmp_path / "run", command_job("x", launcher=launcher)), extra_environ=environ)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"the launcher {launcher} needs torch in this Python" in done.stderr
    assert "--launcher none runs the program once per node" in done.stderr


@pytest.mark.parametrize(("launcher", "module"), [("torchrun", "torch.distributed.run"), ("none", "pkg.train")])
def test_python_and_torch_may_come_from_the_prolog(tmp_path: Path, launcher: str, module: str) -> None:
    """A virtual environment, for example: the image's own Python has no torch."""
    programs(tmp_path / "image", {"python3": "#!/bin/sh\nexit 1\n"})
    programs(tmp_path / "venv", {"python": '#!/bin/sh\n[ "$1" = -c ] || echo "$1 $2"\n'})
    prolog = f'PATH="{tmp_path}/venv:$PATH"'
    job = command_job("-m", "pkg.train", launcher=launcher, task_prolog=prolog, env={"PATH": f"{tmp_path}/image"})
    assert run_locally(write_run(tmp_path / "run", job)).stdout == f"-m {module}\n"


def test_setup_runs_once_and_first(tmp_path: Path) -> None:
    """One task sets up, all see what it has made; prolog and epilog run in every task."""
    job = shell_job(
        'cat ../made; echo "$FROM_PROLOG"; exit 3',
        launcher="srun",
        tasks=3,
        setup="sleep 1\necho set up >>../made",
        task_prolog="export FROM_PROLOG='the prolog'\n",
        task_epilog='echo "code $RUNNER_EXIT_CODE"\nfalse\n',
    )
    run = write_run(tmp_path, replace(job, command=("sh", "-c", job.command[2].replace("exit 3", "exit 0"))))
    done = run_locally(run)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "set up\nthe prolog\ncode 0\n"
    assert (run / "attempts/1/rank-2.log").read_text() == "set up\nthe prolog\ncode 0\n"


def times(path: Path) -> list[tuple[float, str]]:
    """(Unix time, event with its node) of each line of a file of an attempt."""
    return [(float(time), event) for time, event in (line.split(" ", 1) for line in path.read_text().splitlines())]


def test_an_attempt_notes_the_times_of_its_phases(tmp_path: Path) -> None:
    """In order, in fractions of a second."""
    run = write_run(tmp_path, shell_job("exit 3", launcher="srun", tasks=2, setup="true"))
    assert run_locally(run).returncode == 3
    script, node = (times(run / "attempts/1" / name) for name in ("times", "times-node-0"))
    assert [event for _, event in script] == ["started", "step", "step_end", "detected", "ended"]
    assert [event for _, event in node] == ["task 0", "setup 0", "setup_end 0", "program 0", "program_end 0"]
    moments = [time for time, _ in [*script[:2], *node, *script[2:]]]
    assert moments == sorted(moments) and any(time % 1 for time in moments)


def test_the_users_variables_of_squeue_do_not_reach_it(run: Path, tmp_path: Path) -> None:
    environ = {
        **programs(tmp_path / "bin", {"squeue": '#!/bin/sh\necho "${SQUEUE_PARTITION-RUNNING}"\n'}),
        "SLURM_JOB_ID": "71",
        "SQUEUE_PARTITION": "debug",
    }
    assert on_host(run, "job_runs 71 && echo runs", environ) == "runs\n"


def test_a_start_in_the_same_allocation_is_not_a_new_job(run: Path, tmp_path: Path) -> None:
    """Each time Slurm starts the job, it notes when the job was submitted and got its nodes; another step does not."""
    squeue = '#!/bin/sh\n[ "$SLURM_TIME_FORMAT" != standard ] || echo 2026-11-23T10:00:00 2026-11-23T10:05:00\n'
    environ = {**programs(tmp_path / "bin", {"squeue": squeue}), "SLURM_JOB_ID": "71", "TZ": "UTC0",
               "SLURM_TIME_FORMAT": "relative"}  # fmt: skip
    on_host(run, "next_attempt 0; echo in_place >$RUNNER_ATTEMPT/next; trap - EXIT", environ)
    on_host(run, "echo 0 >attempts/1/exit_code; next_attempt 0; trap - EXIT", environ)
    assert times(run / "attempts/1/times")[:2] == [(1795428000.0, "submitted"), (1795428300.0, "held")]
    assert [event for _, event in times(run / "attempts/2/times")] == ["started"]


def test_a_node_that_does_not_answer_does_not_hold_up_the_next_attempt(run: Path, tmp_path: Path) -> None:
    """`scancel` of its step waits for the node, and the step stays in Slurm's list."""
    waiting = f"#!/bin/sh\ntouch {tmp_path}/begun\nuntil [ -e {tmp_path}/go ]; do sleep 0.1; done\n"
    texts = {"squeue": "#!/bin/sh\necho 71.0 step\n", "scancel": waiting}
    started = time.monotonic()
    on_host(run, "RUNNER_JOB=71 RUNNER_ATTEMPT=. SLURM_JOB_NODELIST=a; end_ranks; :", programs(tmp_path / "bin", texts))
    assert time.monotonic() - started < 50, "it has waited for scancel"
    until((tmp_path / "begun").exists)
    (tmp_path / "go").touch()


def test_no_job_of_a_chain_starts_while_the_chain_is_cancelled(run: Path, tmp_path: Path) -> None:
    """Each waits for the end of the one before, which may be that it is cancelled."""
    (run / "job_ids").write_text("70\n71\n72\n73\n")
    tools = programs(tmp_path / "bin", {"scancel": f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n'})
    on_host(run, "RUNNER_JOB=70; cancel_chain", tools)
    assert (tmp_path / "calls").read_text().split() == ["--state=PENDING", "73", "--state=PENDING", "72",
                                                        "--state=PENDING", "71"]  # fmt: skip


def test_host_setup_passes_on_what_it_exports(tmp_path: Path) -> None:
    """It runs in a shell of its own: its functions, folder, options and traps do not reach the batch script."""
    setup = """say() { exit 9; }
cd / && set -e && trap 'exit 8' EXIT && unset NOWHERE GONE && trap - EXIT
plain=1
export WORDS=$'two\n  lines "$x"' FIRST=$NOWHERE
cat <<END
END_
END
"""
    run = write_run(
        tmp_path, shell_job('printf "%s|" "$WORDS" "${plain-unset}" "${FIRST+set}" "${GONE-gone}"', host_setup=setup)
    )
    done = run_locally(run, extra_environ={"GONE": "here"})
    assert (done.returncode, done.stdout) == (0, 'two\n  lines "$x"|unset|set|gone|'), done.stderr
    assert "END_" in done.stderr


def test_a_failed_host_setup_ends_the_job(tmp_path: Path) -> None:
    """Its last command counts; no task starts."""
    run = write_run(tmp_path, shell_job("touch ../started", host_setup="true\nfalse"))
    done = run_locally(run)
    assert done.returncode == 1 and "host_setup of the job file failed" in done.stderr
    assert not (run / "started").exists()


@pytest.mark.parametrize("of_site", [True, False])
def test_a_failed_host_setup_is_a_script_failure(tmp_path: Path, *, of_site: bool) -> None:
    """With its restarts: a module system may not answer for a moment."""
    fails_once = 'test "${RUNNER_ATTEMPT##*/}" = 2'
    site = replace(LOCAL, host_setup=(fails_once,)) if of_site else LOCAL
    job = shell_job("echo started", restart=Restart(script_failure=1), host_setup="" if of_site else fails_once)
    run = write_run(tmp_path, job, site=site)
    done = run_locally(run)
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr
    assert [(run / f"attempts/{number}/cause").read_text() for number in (1, 2)] == ["script_failure\n", "done\n"]


def test_nothing_is_written_when_the_script_is_over(tmp_path: Path) -> None:
    """A program that ends at once waits two seconds for the note of what it found inside, were its Python late."""
    late = f"#!/bin/sh\nuntil [ -e {tmp_path}/over ]; do sleep 0.05; done\necho '[packages]'\n"
    run = write_run(tmp_path, shell_job("touch ../over"))
    assert run_locally(run, extra_environ=programs(tmp_path / "bin", {"python": late})).returncode == 0
    names = sorted(path.name for path in (run / "attempts/1").iterdir())
    assert "inside.toml" in names and ".inside.partial" not in names
    assert "[packages]" in (run / "attempts/1/inside.toml").read_text()


def test_the_epilog_knows_the_code_and_does_not_change_it(tmp_path: Path) -> None:
    """Its own last command may fail."""
    run = write_run(tmp_path, shell_job("exit 3", task_epilog='echo "code $RUNNER_EXIT_CODE"; false'))
    done = run_locally(run)
    assert (done.returncode, done.stdout) == (3, "code 3\n")


@pytest.mark.parametrize("tasks", [1, 3])
def test_a_failed_setup_ends_the_step(tmp_path: Path, tasks: int) -> None:
    """No task starts."""
    run = write_run(tmp_path, shell_job("touch ../started", launcher="srun", tasks=tasks, setup="echo no; exit 5"))
    done = run_locally(run)
    assert done.returncode == 1
    assert "setup ended with exit code 5" in done.stderr
    assert not (run / "started").exists()


def test_a_disk_that_is_full_after_the_setup_ends_the_step(tmp_path: Path) -> None:
    """The tasks that wait for the setup would wait for ever."""
    full = 'ln -s /dev/full "$RUNNER_ATTEMPT/setup-node-0"'
    run = write_run(tmp_path, shell_job("touch ../started", launcher="srun", tasks=2, setup=full))
    done = run_locally(run)
    assert done.returncode == 1
    assert f"cannot write {run}/attempts/1/setup-node-0" in done.stderr
    assert not (run / "started").exists()


def test_a_failed_prolog_ends_the_task(tmp_path: Path) -> None:
    """Its last command counts."""
    run = write_run(tmp_path, shell_job("touch ../started", task_prolog="false"))
    assert run_locally(run).returncode == 1
    assert not (run / "started").exists()


def test_tasks_run_in_the_snapshot(tmp_path: Path) -> None:
    """Unless the EDF names a working folder."""
    job = shell_job("pwd")
    assert run_locally(write_run(tmp_path / "a", job)).stdout == f"{tmp_path}/a/code\n"
    elsewhere = replace(job, environment=replace(BARE, workdir="/workspace"))
    assert run_locally(write_run(tmp_path / "b", elsewhere)).stdout == f"{tmp_path}/b\n"


def test_another_number_of_tasks_is_refused(tmp_path: Path) -> None:
    """Training with a wrong world size is worse than none."""
    run = write_run(tmp_path, command_job("touch", "../started", launcher="srun", tasks=2))
    script = run / "job.sbatch"
    script.write_text(script.read_text().replace("processes.sh 2", "processes.sh 3"))
    done = run_locally(run)
    assert done.returncode == 1
    assert "the step has 3 tasks" in done.stderr
    assert not (run / "started").exists()


@pytest.mark.uses("busybox", "bubblewrap")
def test_busybox_is_enough_inside(tmp_path: Path) -> None:
    """A container with /bin/busybox and nothing else: setup, ranks, prolog, the program, its code."""
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "bin/busybox").write_bytes(Path("/bin/busybox").read_bytes())
    (root / "bin/busybox").chmod(0o755)
    for name in ("sh", "cat", "sleep"):
        (root / "bin" / name).symlink_to("busybox")
    job = shell_job(
        'cat ../made; echo "$RANK $FROM"; [ "$RANK" = 1 ] && exit 0; sleep 3; exit 4',
        launcher="srun",
        tasks=2,
        setup="echo set up >../made",
        task_prolog="export FROM=prolog",
        task_epilog='echo "left with $RUNNER_EXIT_CODE"',
    )
    attachment = Attachment(prefix=("bwrap", "--bind", str(root), "/", "--proc", "/proc", "--dev", "/dev", "--bind",
                                    "${RUNNER_RUN}", "${RUNNER_RUN}"))  # fmt: skip
    run = write_run(tmp_path / "run", job, attachment)
    done = run_locally(run)
    assert done.returncode == 4, done.stderr
    assert done.stdout == "set up\n0 prolog\nleft with 4\n"
    assert (run / "attempts/1/rank-1.log").read_text() == "set up\n1 prolog\nleft with 0\n"


# A trainer below a launcher that knows nothing of signals: it says what it got, and saves a while.
TRAINER = """
import os, signal, sys, time
got = []
for each in (signal.SIGUSR2, signal.SIGTERM):
    signal.signal(each, lambda number, frame: got.append(signal.Signals(number).name))
open(sys.argv[1] + os.environ["RANK"], "w").close()
while not got: time.sleep(0.02)
time.sleep(0.5)
print(*got, os.path.exists(os.environ["RUNNER_SAVE_AND_EXIT"]), flush=True)
sys.exit(75)
"""


TELLS = """
. payload/signals.sh
sleep 600 & wanted=$!
kill() { :; }
for turn in $(seq 60); do
    for other in 1 2 3 4 5 6; do /bin/true & done
    runner_found=; tell USR2 $$
    case " $runner_found " in *" $wanted "*) ;; *) echo "missed in turn $turn" ;; esac
done
unset -f kill; kill "$wanted"
"""


@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_processes_that_end_meanwhile_hide_no_other(run: Path, shell: str) -> None:
    """bash gives the rest of an ended process's file to the next `read`."""
    told = subprocess.run((shell, "-c", TELLS), cwd=run, capture_output=True, text=True, check=True)
    assert told.stdout == ""


IS_FOR = """
. payload/signals.sh
"$1" -c 'import signal, time
signal.signal(signal.SIGUSR2, lambda *_: 0)
print("ready", flush=True)
while True: time.sleep(0.0002)' >ready & busy=$!
until [ -s ready ]; do sleep 0.1; done
turn=0
while turn=$((turn + 1)); [ "$turn" -le 500 ]; do is_for USR2 "$busy" || echo "missed in turn $turn"; done
kill "$busy"
"""


@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_a_process_that_falls_asleep_meanwhile_gets_the_signal(run: Path, shell: str) -> None:
    """The kernel writes /proc/PID/status anew for each line that bash reads, with a shorter or longer state."""
    done = subprocess.run(
        (shell, "-c", IS_FOR, shell, sys.executable), cwd=run, capture_output=True, text=True, check=True
    )
    assert done.stdout == ""


@pytest.mark.parametrize("name", ["USR2", "TERM"])
@pytest.mark.parametrize("shell", ["dash", "bash", "busybox"])
def test_the_signal_reaches_the_trainer_alone(tmp_path: Path, name: str, shell: str) -> None:
    """The flag is there first. USR2 spares a launcher that has no handler; TERM is for all, as Slurm's is."""
    programs(tmp_path / "bin", {"sh": f'#!/bin/sh\nexec {shell} {"sh" if shell == "busybox" else ""} "$@"\n'})
    launcher = 'python3 -c "$1" "$2"; code=$?; echo "launcher saw $code"; exit "$code"'
    if name == "TERM":
        launcher = 'exec python3 -c "$1" "$2"'
    job = command_job("sh", "-c", launcher, "sh", TRAINER, str(tmp_path / "ready-"), launcher="srun", tasks=2)
    run = write_run(tmp_path / "run", job)
    script = run / "job.sbatch"
    script.write_text(script.read_text().replace("/bin/sh", str(tmp_path / "bin/sh")))
    with (run / "job.log").open("wb") as log:
        child = subprocess.Popen(("bash", "job.sbatch"), cwd=run, stdout=log, stderr=log)
        until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)))
        child.send_signal(getattr(signal, f"SIG{name}"))
        code = child.wait(600)
    log_text = (run / "job.log").read_text()
    assert code == 75, log_text
    assert f"SIG{name} True\n" in log_text
    assert f"job.sbatch: {name} (" in log_text and ": asking the program to save and exit\n" in log_text
    assert f"SIG{name} True\n" in (run / "attempts/1/rank-1.log").read_text()
    assert (run / "attempts/1/save-and-exit").exists()
    assert ("launcher saw 75" in log_text) == (name == "USR2")


def test_term_ends_a_program_that_does_not_listen(tmp_path: Path) -> None:
    """`runner cancel` without a scheduler: nothing is left running, and the code says how it ended."""
    run = write_run(tmp_path, shell_job('touch "../ready-$RANK"; exec sleep 321', launcher="srun", tasks=2))
    child = subprocess.Popen(("bash", "job.sbatch"), cwd=run, stderr=subprocess.DEVNULL)
    until(lambda: all((run / f"ready-{rank}").exists() for rank in (0, 1)))
    child.terminate()
    assert child.wait(600) == 143
    assert (run / "attempts/1/exit_code").read_text() == "143\n"


@pytest.mark.parametrize("of_site", [True, False])
def test_term_before_the_program_starts_cancels_the_attempt(tmp_path: Path, *, of_site: bool) -> None:
    """Slurm sends it to all processes. The attempt is not done, and no other follows."""
    setup = "touch in-setup && sleep 321"
    site = replace(LOCAL, host_setup=(setup,)) if of_site else LOCAL
    job = shell_job("touch ../started", restart=Restart(script_failure=1), host_setup="" if of_site else setup)
    run = write_run(tmp_path, job, site=site)
    child = subprocess.Popen(("bash", "job.sbatch"), cwd=run, stderr=subprocess.DEVNULL, start_new_session=True)
    until((run / "in-setup").exists)
    os.killpg(child.pid, signal.SIGTERM)
    assert child.wait(600) == 143
    assert [(run / "attempts/1" / name).read_text() for name in ("cause", "exit_code")] == ["cancelled\n", "143\n"]
    assert not (run / "started").exists() and not (run / "attempts/2").exists()


def test_a_program_that_starts_after_the_signal_is_asked_to_save(tmp_path: Path) -> None:
    site = replace(LOCAL, host_setup=("touch in-setup", "until [ -e go ]; do sleep 0.1; done"))
    run = write_run(tmp_path, shell_job('[ -e "$RUNNER_SAVE_AND_EXIT" ] && exit 75'), site=site)
    child = subprocess.Popen(("bash", "job.sbatch"), cwd=run, stderr=subprocess.DEVNULL)
    until((run / "in-setup").exists)
    child.send_signal(signal.SIGUSR2)
    (run / "go").touch()
    assert child.wait(600) == 75
    assert (run / "attempts/1/cause").read_text() == "time_limit\n"


def test_term_spares_what_holds_the_container_up(tmp_path: Path) -> None:
    """bubblewrap and squashfuse could only die of it, and take the saving job along."""
    (tmp_path / "bin").mkdir()
    for name in ("squashfuse", "bwrap", "other"):
        (tmp_path / "bin" / name).write_bytes(Path("/bin/sleep").read_bytes())
        (tmp_path / "bin" / name).chmod(0o755)
    text = """
    cd "$1"; . payload/signals.sh
    bin/squashfuse 2 & a=$!
    bin/bwrap 2 & b=$!
    bin/other 2 & c=$!
    sleep 0.5; tell TERM $$
    wait $a; echo "squashfuse $?"; wait $b; echo "bwrap $?"; wait $c; echo "other $?"
    """
    write_run(tmp_path, command_job("true"))
    for shell in ("bash", "dash"):
        done = subprocess.run((shell, "-c", text, shell, str(tmp_path)), capture_output=True, text=True, timeout=600)
        assert done.stdout == "squashfuse 0\nbwrap 0\nother 143\n", done.stderr


def test_an_image_that_was_replaced_after_the_launch_is_noted(tmp_path: Path) -> None:
    """The lock has what tells it for an image that runner did not make; one that is as it was is not mentioned."""
    image = tmp_path / "my image.sqsh"
    image.write_text("one")
    run = write_run(tmp_path / "run", shell_job("true"))
    (run / "lock.toml").write_text(lock.lock_text({"run": {}, "image": lock._image(LaunchImage(str(image)))}))
    assert "replaced" not in run_locally(run).stderr
    (tmp_path / "new").write_text("two")
    (tmp_path / "new").rename(image)
    assert f"the image {image} was replaced after the launch" in run_locally(run).stderr


@pytest.mark.parametrize(
    ("version", "name"),
    [("2.4.0a0+3bcc3cddb5.nv24.7", "TORCH_NCCL_TRACE_BUFFER_SIZE"), ("2.8.0", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
     ("2.9.0", "TORCH_FR_BUFFER_SIZE"), ("2.13.0+cpu", "TORCH_FR_BUFFER_SIZE"), ("3.0", "TORCH_FR_BUFFER_SIZE")],
)  # fmt: skip
def test_the_flight_recorder_has_the_name_that_this_torch_knows(tmp_path: Path, version: str, name: str) -> None:
    """Both would make torch 2.9 and newer warn in each log. The version is that of a folder: no Python is started."""
    environ = programs(
        tmp_path / "bin", {"python": f'#!/bin/sh\ncase $2 in *torch*) touch "{tmp_path}/started" ;; esac\n'}
    )
    (tmp_path / "lib/python3.12/dist-packages" / f"torch-{version}.dist-info").mkdir(parents=True)
    run = write_run(tmp_path / "run", shell_job("env | grep -E '^TORCH_(NCCL_TRACE|FR)'", hang_seconds=600))
    assert run_locally(run, extra_environ=environ).stdout == f"{name}=2000\n"
    given = run_locally(run, extra_environ={**environ, "TORCH_NCCL_TRACE_BUFFER_SIZE": "7"})
    assert given.stdout == "TORCH_NCCL_TRACE_BUFFER_SIZE=7\n"
    assert not (tmp_path / "started").exists()


def test_a_torch_in_another_place_is_asked_for_its_version(tmp_path: Path) -> None:
    stub = "#!/bin/sh\ncase $1 in -c) echo 2.8.0 ;; *) env | grep -E '^TORCH_(NCCL_TRACE|FR)' ;; esac\n"
    environ = programs(tmp_path / "bin", {"python": stub})
    run = write_run(tmp_path / "run", command_job("x", launcher="torchrun", hang_seconds=600))
    assert run_locally(run, extra_environ=environ).stdout == "TORCH_NCCL_TRACE_BUFFER_SIZE=2000\n"


def test_nccls_pipes_are_in_the_attempts_folder_and_go_with_it(tmp_path: Path) -> None:
    """A name in /tmp may be another user's; torch does not remove its pipes."""
    text = 'echo "$TORCH_NCCL_DEBUG_INFO_PIPE_FILE"; mkfifo "${TORCH_NCCL_DEBUG_INFO_PIPE_FILE}0.pipe"'
    run = write_run(tmp_path / "run", shell_job(text, hang_seconds=600))
    assert run_locally(run).stdout == f"{run}/attempts/1/stacks/nccl-rank-\n"
    assert list((run / "attempts/1/stacks").iterdir()) == []
