"""Spare nodes and min_nodes: what a launch accepts, what the script requests, and which nodes an attempt uses."""

import os
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.errors import RunnerError
from runner.runs.budget import estimate
from runner.runs.job import Job, Restart
from runner.runs.plan import RenderedPlan
from runner.runs.resolve import resolve
from runner.runs.schedulers.template import restart_words
from runner.site import Site
from tests.runs.scripts import BARE, LOCAL, SLURM, command_job, overrides, script, write_run
from tests.runs.test_payload import on_host, programs

POLICY = ("node_failure=3",)


def resolved(site: Site = SLURM, **settings: Any) -> Job:
    return resolve((overrides(**settings),), BARE, site)


def refusal(site: Site = SLURM, **settings: Any) -> str:
    """The error of a launch, whole."""
    with pytest.raises(RunnerError) as caught:
        script(resolved(site, **settings), site=site)
    return f"{caught.value.what}: {caught.value.why}: {caught.value.fix}"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"spare_nodes": -1}, "spare_nodes cannot be -1 (command line)"),
        ({"nodes": 2, "min_nodes": 0}, "min_nodes cannot be 0"),
        ({"nodes": 2, "min_nodes": 3, "restart": POLICY}, "min_nodes = 3 is larger than nodes = 2"),
        ({"min_nodes": 1, "restart": POLICY}, "a job on one node has no other node"),
        ({"nodes": 2, "spare_nodes": 1}, "[restart] does not allow a restart after a node failure"),
        ({"nodes": 2, "spare_nodes": 1, "restart": ("hang=1",)}, "add node_failure = 3 to [restart]"),
        ({"spare_nodes": 1, "restart": (*POLICY, "in_place=false")}, "in_place = false gives the nodes back"),
        ({"nodes": 2, "spare_nodes": 1, "chain": 3}, "[restart] does not allow a restart after a node failure"),
        ({"spare_nodes": 1, "restart": POLICY, "srun": ("--nodelist=a",)}, "--nodelist comes from spare_nodes"),
        ({"sbatch": ("--no-kill",)}, "do nothing until its time limit: use --spare"),
    ],
)
def test_numbers_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    assert words in refusal(**settings)


def test_a_site_without_a_scheduler_has_no_spare_nodes() -> None:
    assert "the job requests 2 nodes (command line), but the site 'local' has only one node" in refusal(
        LOCAL, spare_nodes=1, restart=POLICY
    )


def test_a_site_that_forbids_no_kill_is_told_before_the_submission() -> None:
    site = replace(SLURM, refused={"--no-kill": "its Slurm has no such thing"})
    assert "refuses --no-kill: its Slurm has no such thing" in refusal(site, nodes=2, spare_nodes=1, restart=POLICY)


def test_the_loss_of_the_first_node_is_explained_before_the_submission() -> None:
    (note,) = [each for each in resolved(nodes=2, spare_nodes=1, restart=POLICY).notes if "first node" in each]
    assert "queued again" in note
    assert not any("first node" in each for each in resolved(nodes=2, restart=POLICY).notes)


def test_the_job_requests_and_pays_for_the_spare_nodes() -> None:
    job = resolved(nodes=4, spare_nodes=2, gpus_per_node=4, time_minutes="60", restart=POLICY)
    assert job.gpus == 16
    cost = estimate(job)
    assert cost is not None and cost.attempt == 24
    text = script(job, site=SLURM)
    assert "#SBATCH --nodes=6\n#SBATCH --no-kill\n" in text and "next_attempt 24 " in text
    assert re.search(r"srun .*--nodelist=\$\{RUNNER_NODELIST\}", text)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"spare_nodes": 1}, "nodes=2 spare=1 min_nodes=2"),
        ({"min_nodes": 1}, "nodes=2 spare=0 min_nodes=1"),
    ],
)
def test_the_script_names_the_numbers(settings: dict[str, Any], words: str) -> None:
    job = resolved(nodes=2, tasks_per_node=4, launcher="torchrun", restart=POLICY, **settings)
    assert restart_words(job, SLURM).endswith(f"{words} tasks_per_node=1 processes_per_node=4")


def test_a_sweep_is_an_array_of_jobs_that_keep_their_nodes() -> None:
    text = script(resolved(nodes=2, spare_nodes=1, restart=POLICY), site=SLURM)
    plan: Any = SimpleNamespace(script=text)
    array = RenderedPlan.array_script(plan, "array.sbatch", 3, None)
    assert "#SBATCH --nodes=3\n#SBATCH --no-kill\n" in array and "#SBATCH --array=0-2\n" in array


def test_a_chain_with_restarts_after_node_failures_may_have_spare_nodes() -> None:
    job = resolved(nodes=2, spare_nodes=1, chain=3, restart=("time_limit=2", *POLICY))
    assert restart_words(job, SLURM).startswith(
        "by=chain time_limit=2 node_failure=3 without_checkpoint=3 nodes=2 spare=1"
    )


QUEUE = "#!/bin/sh\nprintf '%s\\n' \"$ALLOCATED\"\n"
NODES = "#!/bin/sh\nprintf '%s\\n' \"$STATES\"\n"
HOSTS = """#!/bin/sh
case "$2 $3" in "hostnames "*) printf '%s\\n' "$3" | tr ',' '\\n' ;; *) printf '%s\\n' "$3" ;; esac
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run on a and b, with c as its spare node."""
    job = command_job("true", nodes=2, restart=Restart(node_failure=3))
    run = write_run(tmp_path / "run", replace(job, resources=replace(job.resources, spare_nodes=1)), site=SLURM)
    (run / "attempts/1").mkdir(parents=True)
    (run / "attempts/1/started").write_text("job 7\nnodes a,b\nheld a,b,c\ngpus 0\n")
    return run


def asked(run: Path, text: str, **environ: str) -> str:
    """What the functions print, on a stand-in for a Slurm that gives these answers."""
    stand_ins = programs(run / "bin", {"squeue": QUEUE, "sinfo": NODES, "scontrol": HOSTS})
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b,c", "ALLOCATED": "a,b,c", "STATES": "", **environ}
    prefix = "export RUNNER_ATTEMPT=$PWD/attempts/1; restarts nodes=2 spare=1 min_nodes=2 tasks_per_node=1;"
    return on_host(run, f"{prefix} {text}", {**stand_ins, **slurm})


@pytest.mark.parametrize(
    ("states", "present"),
    [
        ("a allocated\nb allocated\nc allocated", "a b c"),
        ("a allocated\nb down\nb down\nc mixed", "a c"),
        ("a draining\nb allocated*\nc failing", ""),
        ("a drained\nb completing\nc down*", "b"),
        ("", "a b c"),
    ],
)
def test_nodes_that_slurm_has_given_up_do_not_count(run: Path, states: str, present: str) -> None:
    assert asked(run, "present_nodes", STATES=states) == present


def test_a_node_that_has_left_the_job_does_not_count(run: Path) -> None:
    assert asked(run, "present_nodes", ALLOCATED="a,c") == "a c"


def test_a_controller_that_does_not_answer_leaves_the_nodes_as_they_were(run: Path) -> None:
    assert asked(run, "present_nodes", ALLOCATED="") == "a b c"


@pytest.mark.parametrize(
    ("nodes", "unfit", "suspects", "chosen"),
    [
        ("a b c", "", "", "a,b"),
        ("a b c", "b", "", "a,c"),
        ("a b c", "", "a", "b,c"),  # a suspect is swapped
        ("a b", "", "a", "a,b"),  # if another node is left
        ("c b a", "", "c", "b,a"),  # in the order of the allocation
        ("a c", "a", "", "healthy nodes: 1, needed: 2"),
        ("a b c", "a b c", "", "healthy nodes: 0, needed: 2"),
    ],
)
def test_the_next_attempt_keeps_its_healthy_nodes_and_fills_up_with_spares(
    run: Path, nodes: str, unfit: str, suspects: str, chosen: str
) -> None:
    (run / "attempts/1/fit").mkdir()
    for node in unfit.split():
        (run / "attempts/1/fit" / node).write_text("nvidia-smi fails\n")
    (run / "attempts/1/suspects").write_text("".join(f"{node}\n" for node in suspects.split()))
    assert asked(run, f"choose_nodes '{nodes}' || true") == chosen


def test_fewer_nodes_are_enough_where_min_nodes_allows_it(run: Path) -> None:
    assert asked(run, "limit[min_nodes]=1; choose_nodes 'b'") == "b"


def test_without_spare_nodes_all_nodes_of_the_attempt_are_needed(run: Path) -> None:
    text = "unset 'limit[nodes]' 'limit[min_nodes]'; choose_nodes 'a b'; choose_nodes 'a' || true"
    assert asked(run, text) == "a,bhealthy nodes: 1, needed: 2"


SHOWN = (
    'echo "$RUNNER_NODELIST $RUNNER_NODES/$RUNNER_REQUESTED_NODES $RUNNER_TASKS $RUNNER_WORLD_SIZE $SLURM_JOB_NODELIST '
    '$SLURM_NNODES $SLURM_TASKS_PER_NODE ${SLURM_JOB_CPUS_PER_NODE-} $held_nodes"; cat "$RUNNER_ATTEMPT/started"'
)


def test_an_attempt_sees_only_its_own_nodes(run: Path) -> None:
    """Programs find each other by Slurm's variables, which describe the whole job."""
    text = f"limit[tasks_per_node]=2; limit[processes_per_node]=4; place_ranks 2>/dev/null; {SHOWN}"
    assert asked(run, text, SLURM_JOB_CPUS_PER_NODE="8(x3)").splitlines() == [
        "a,b 2/2 4 8 a,b 2 2(x2) 8(x2) a,b,c",
        *("job 7", "nodes a,b", "held a,b,c", "gpus 0"),
    ]


@pytest.mark.parametrize(
    ("rung", "chosen", "nodes"),
    [
        ("in_place", "a,c", "a,c"),
        ("requeue", "a,c", "a,b"),  # of an earlier allocation
        ("in_place", "a,d", "a,b"),  # as are nodes that the job does not have
    ],
)
def test_a_restart_in_place_uses_the_nodes_that_were_chosen(run: Path, rung: str, chosen: str, nodes: str) -> None:
    (run / "attempts/1/next").write_text(f"{rung}\nb is lost\n{chosen}\n")
    (run / "attempts/2").mkdir()
    (run / "attempts/2/started").write_text("job 7\nnodes a,b,c\ngpus 12\n")
    text = f'RUNNER_ATTEMPT=$PWD/attempts/2; place_ranks 2>/dev/null; {{ {SHOWN}; }} | grep -E "^(nodes|held|gpus)"'
    assert asked(run, text).splitlines() == [f"nodes {nodes}", "held a,b,c", "gpus 12"]


def test_the_first_line_of_an_attempt_names_its_own_nodes(run: Path) -> None:
    """Slurm's variable still names a node that the job has lost."""
    (run / "attempts/1/next").write_text("in_place\nb is lost\na,c\n")
    (run / "attempts/1/exit_code").write_text("137\n")
    assert "job.sbatch: attempt 2 on a,c\n" in asked(run, "next_attempt 0 2>&1")


def test_the_gpus_of_nodes_that_have_left_no_longer_count(run: Path) -> None:
    (run / "attempts/1/started").write_text("job 7\nnodes a,b,c\ngpus 12\n")
    assert "gpus 8\n" in asked(run, f"place_ranks 2>/dev/null; {SHOWN}", ALLOCATED="a,c")


CHECK = Path(__file__).parents[2] / "src/runner/runs/payload/check.sh"
WHOLE = "0, 0\n1, 0"
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
UNFIT = "nvidia-smi does not answer"
BUS = "NVRM: Xid (PCI:0000:44:00): 79, pid=1, GPU has fallen off the bus."


def checked(tmp_path: Path, smi: str = f"echo '{WHOLE}'", messages: str = "", seconds: int = 60) -> str:
    """What check.sh prints about a node with two GPUs."""
    tools = programs(
        tmp_path / "bin", {"nvidia-smi": f"#!/bin/sh\n{smi}\n", "dmesg": f"#!/bin/sh\necho '{messages}'\n"}
    )
    words = ("bash", str(CHECK), str(tmp_path / "run"), "2", "2", str(seconds))
    environ = {**os.environ, **tools, "SLURMD_NODENAME": "nid007"}
    return subprocess.run(words, env=environ, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize(
    ("smi", "answer"),
    [
        (f"echo '{WHOLE}'", "fit"),
        (f"echo '{WHOLE}'; exit 14", "fit"),  # a warning
        ("echo '0, 0'", "nvidia-smi lists 1 of 2 GPUs"),
        ("echo '0, 0'; echo '1, [Unknown Error]'", "nvidia-smi: 1, [Unknown Error]"),
        ("echo 'No devices were found'; exit 6", "nvidia-smi fails with exit code 6: No devices were found"),
        ("exit 124", "nvidia-smi does not answer"),
    ],
)
def test_a_node_whose_gpus_do_not_answer_is_unfit(tmp_path: Path, smi: str, answer: str) -> None:
    assert checked(tmp_path, smi) == f"nid007 {answer}\n"


@pytest.mark.parametrize(
    ("message", "age", "answer"),
    [
        (BUS, 1, "Xid (PCI:0000:44:00): 79"),
        (BUS, 600, "fit"),  # before this attempt
        (BUS.replace("79,", "31,"), 1, "fit"),  # an error of the program
        (BUS.replace("79,", "45,") + " previous Xid 31", 1, "fit"),
        (BUS.replace("79,", "45,") + " previous Xid 79", 1, "Xid (PCI:0000:44:00): 45"),
    ],
)
def test_a_driver_error_since_the_attempt_began_makes_a_node_unfit(
    tmp_path: Path, message: str, age: int, answer: str
) -> None:
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    assert checked(tmp_path, messages=f"[{uptime - age:12.6f}] {message}") == f"nid007 {answer}\n"


def test_processes_of_earlier_attempts_on_this_node_end(tmp_path: Path) -> None:
    """Those of the step; not the batch script's, another run's, a later attempt's or another node's."""
    attempt = f"{tmp_path}/run/attempts"
    step = {"RUNNER_ATTEMPT": f"{attempt}/1", "SLURM_STEPID": "0", "SLURMD_NODENAME": "nid007"}
    others = (
        {**step, "SLURM_STEPID": "4294967291"},
        {name: value for name, value in step.items() if name != "SLURM_STEPID"},
        {**step, "RUNNER_ATTEMPT": f"{attempt}/3"},
        {**step, "RUNNER_ATTEMPT": f"{tmp_path}/run2/attempts/1"},
        {**step, "SLURMD_NODENAME": "nid008"},
    )
    ending, *living = (subprocess.Popen(("sleep", "300"), env={**os.environ, **each}) for each in (step, *others))
    try:
        assert checked(tmp_path) == "nid007 fit\n"
        assert ending.wait(60) == -signal.SIGKILL
        assert [each.poll() for each in living] == [None] * len(others)
    finally:
        for each in (ending, *living):
            each.kill()
            each.wait()


def test_a_node_that_was_unfit_in_this_allocation_is_not_tested_again(run: Path) -> None:
    """Nor one that is known to be lost; all others that do not answer are unfit too."""
    (run / "attempts/1/fit").mkdir()
    (run / "attempts/1/fit/b").write_text("nvidia-smi does not answer\n")
    (run / "attempts/1/next").write_text("in_place\nx\na,c\n")
    (run / "attempts/2/fit").mkdir(parents=True)
    (run / "attempts/2/fit/c").write_text("no sign of life\n")
    (run / "attempts/2/started").write_text("job 7\nnodes a,c\nheld a,b,c\ngpus 0\n")
    programs(run / "bin", {"srun": '#!/bin/sh\necho "$*" >>asked\n'})
    text = "RUNNER_ATTEMPT=$PWD/attempts/2; check_nodes 'a b c' 2>/dev/null; cd attempts/2/fit; tail -n 1 *"
    assert asked(run, text, PATH=f"{run / 'bin'}:{os.environ['PATH']}").split("\n\n") == [
        "==> a <==\ndid not answer",
        "==> b <==\nnvidia-smi does not answer",
        "==> c <==\nno sign of life\n",
    ]
    assert "--nodelist=a " in (run / "asked").read_text() and (run / "asked").read_text().count("\n") == 1


@pytest.mark.parametrize(("answer", "reason", "bad"), [("fit", ECC, ""), (UNFIT, UNFIT, f"b {UNFIT}\n")])
def test_a_line_in_a_log_counts_for_the_next_attempt_and_a_failed_check_for_all_runs(
    run: Path, answer: str, reason: str, bad: str
) -> None:
    programs(run / "bin", {"srun": f"#!/bin/sh\nprintf '%s\\n' 'a fit' 'b {answer}' 'c fit'\n"})
    (run / "attempts/1/first_failure").write_text("1 rank 1 node 1\n")
    (run / "attempts/1/rank-1.log").write_text(f"{ECC}\n")
    text = """end_ranks() { :; }; RUNNER_NODELIST=a,b; cause_in_logs; note_bad_nodes node_failure
        find_nodes node_failure; echo "$next_nodes"; cat attempts/1/fit/b; cat "$bad_nodes" | cut -d ' ' -f 1,3-"""
    assert asked(run, f"{{ {text}; }} 2>/dev/null") == f"node_failure\na,c\n{reason}\n{bad}"


def test_a_node_that_a_log_names_is_checked_before_a_job_gives_its_nodes_back(run: Path) -> None:
    """Once, and not if the job is about to end."""
    programs(run / "bin", {"srun": f"#!/bin/sh\necho x >>asked\necho 'b {UNFIT}'\n"})
    (run / "attempts/1/busy-node-1").write_text(f"{ECC}\n")
    text = """RUNNER_NODELIST=a,b; limit[in_place]=false; RUNNER_SAVE_AND_EXIT=attempts/1/save-and-exit
        for ending in yes ''; do stay node_failure 1; done; stay node_failure 1
        echo "$obstacle"; cat "$bad_nodes" | cut -d ' ' -f 1,3-; cat asked"""
    assert asked(run, f"{{ {text}; }} 2>/dev/null") == f"in_place = false\nb {UNFIT}\nx\n"


def test_a_job_that_slurm_ends_does_not_wait_for_a_signal_that_came_earlier(run: Path) -> None:
    """The log tells it, too."""
    (run / "job.log").write_text("slurmstepd: error: *** JOB 7 ON a CANCELLED AT 2026-11-23T20:00:00 ***\n")
    assert asked(run, 'await_term; echo "$ending $SECONDS"').split()[0] == "yes"


def test_lines_that_a_site_prints_before_each_task_are_no_answers(run: Path) -> None:
    """A TaskProlog may print; no node is unfit for it, and none is cut off before it has answered."""
    programs(
        run / "bin", {"srun": "#!/bin/sh\nprintf 'Welcome to nid\\n\\nTo a\\n'; sleep 1; echo a fit; echo b fit\n"}
    )
    text = "{ check_nodes 'a b'; } 2>&1; cd attempts/1/fit; tail -n 1 *"
    assert asked(run, text) == "==> a <==\nfit\n\n==> b <==\nfit\n"


def test_an_srun_that_does_not_end_when_asked_to_is_killed() -> None:
    """It handles TERM: where a node does not answer, that may take for ever."""
    for path in CHECK.parent.glob("*.sh"):
        assert not re.search(r"timeout [0-9]+ srun", path.read_text()), path


def test_the_guard_avoids_nodes_that_later_attempts_have_found_unfit(run: Path) -> None:
    """The process that starts it is as old as the first attempt of the allocation."""
    (run / "attempts/1/fit").mkdir()
    (run / "attempts/1/fit/b").write_text("no sign of life\n")
    (run / "attempts/1/next").write_text("in_place\nx\na,c\n")
    (run / "attempts/2").mkdir()
    text = """is_child() { ((n++ < 1)); }; run_guard() { echo "on $1"; }; n=0; keep_guard
        until [ -s .guard-ready ]; do sleep 0.05; done; cat .guard-ready"""
    assert asked(run, text, SLURMD_NODENAME="a", RUNNER_GUARD_SECONDS="0") == "on c\n"


def test_where_slurm_refuses_the_step_each_node_is_asked_alone(run: Path) -> None:
    """One of them may just have gone down."""
    srun = '#!/bin/sh\ncase "$*" in *=a,*) exit 1 ;; *=b\\ *) echo "error" >&2; exit 1 ;; *=a\\ *) echo a fit ;; esac\n'
    programs(run / "bin", {"srun": srun})
    text = "check_nodes 'a b' 2>/dev/null; cd attempts/1/fit; tail -n 1 *"
    assert asked(run, text) == "==> a <==\nfit\n\n==> b <==\ndid not answer\n"


@pytest.fixture
def guarded(tmp_path: Path) -> Path:
    """A run whose first attempt is running."""
    run = write_run(tmp_path / "run", command_job("true"), site=SLURM)
    (run / "attempts/1").mkdir(parents=True)
    (run / "attempts/1/started").write_text("job 7\n")
    return run


def guard(run: Path, squeue: str = "nid[001-002]", **commands: str) -> "subprocess.Popen[str]":
    """The guard, ready, with commands in the place of Slurm's."""
    texts = {
        "scontrol": "case $1:$2 in *:config) echo 'KillWait = 3' ;; *:hostnames) printf 'nid00%d\\n' 1 2 ;; esac",
        "squeue": f"case $* in *RestartCnt*) echo 0 ;; *) echo '{squeue}' ;; esac",
        "scancel": "",
        **commands,
    }
    path = programs(run / "bin", {name: f"#!/bin/bash\n{text}\n" for name, text in texts.items()})["PATH"]
    words = ("timeout", "50", "bash", "payload/guard.sh", "7", "nid001", "by=requeue", "node_failure=1")
    environ = {**os.environ, "PATH": path, "RUNNER_RUN": str(run), "SLURM_JOB_ID": "7", "RUNNER_GUARD_SECONDS": "1"}
    found = subprocess.Popen(words, cwd=run, env=environ, stdout=subprocess.PIPE, text=True)
    assert found.stdout is not None and found.stdout.readline() == "ready\n"
    return found


@pytest.mark.parametrize(
    ("cause", "rung", "explained"),
    [
        ("", "", False),
        ("script_failure", "", False),
        ("script_failure", "in_place", False),
        ("script_failure", "requeue", True),
        ("done", "", True),
    ],
)
def test_a_batch_script_that_was_killed_is_named_whatever_it_had_written(
    guarded: Path, cause: str, rung: str, *, explained: bool
) -> None:
    """It may be killed between the cause of an attempt and the start of the next one."""
    for name, word in (("cause", cause), ("next", rung)):
        if word:
            (guarded / "attempts/1" / name).write_text(f"{word}\n")
    process = guard(guarded)
    process.terminate()
    assert process.wait(60) == 0
    stopped = guarded / "stopped"
    assert explained != stopped.exists()
    assert explained or stopped.read_text() == "the batch script was killed\n"
    assert (guarded / "attempts/1/cause").read_text() == f"{cause or 'script_failure'}\n"


def test_the_guard_frees_the_nodes_although_the_controller_does_not_answer_at_once(guarded: Path) -> None:
    (guarded / "attempts/1/cause").write_text("done\n")
    tried = "echo tried >>tried; [ $(wc -l <tried) = 2 ]"
    process = guard(guarded, "nid002", scontrol="[ $1:$2 = show:config ] || echo nid002", scancel=tried)
    assert process.wait(60) == 0
    assert (guarded / "tried").read_text() == "tried\ntried\n"
    assert "ended" in (guarded / "attempts/1/times").read_text(), "the nodes were idle until then"


def test_the_guard_ends_when_the_job_has_ended(guarded: Path) -> None:
    """Where its slurmstepd was killed, nobody else ends it."""
    (guarded / "attempts/1/cause").write_text("done\n")
    assert guard(guarded, "").wait(60) == 0
    assert not (guarded / "attempts/1/guarded").exists()
