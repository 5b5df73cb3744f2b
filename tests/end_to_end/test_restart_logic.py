"""On a real Slurm: scripts that restart themselves do under `runner launch` what they do under plain sbatch.

Each script of `LOGIC` runs twice, and writes what happens to it into the file `seen` of its folder. All of them run at
the same time: Slurm looks at time limits only every 30 s.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.end_to_end.conftest import Runner, write
from tests.lab.slurm import SlurmLab
from tests.waiting import until

HEAD = """\
count=${SLURM_RESTART_COUNT:-0}
me=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
seen() { echo "${SLURM_ARRAY_TASK_ID:-one} $*" >>seen; }
"""

ARRAY = """\
#!/bin/bash
#SBATCH --array=1-2 --time=5 --signal=B:USR1@60 --output=out-%a --open-mode=append
. ./head
[ "$count" = 0 ] || { seen "start $count"; exit 0; }
again() { seen signal; scancel --signal=INT "$me"; wait "$step"; seen "step $?"; scontrol requeue "$me"; exit 0; }
trap again USR1
srun -n 1 bash -c 'trap "exit 3" INT; echo "$SLURM_ARRAY_TASK_ID up" >>seen; while :; do sleep 0.1; done' &
step=$!
wait "$step"
"""
PIPE = """\
#!/bin/bash
#SBATCH --array=7 --time=5 --signal=B:USR1@60 --output=out
. ./head
trap 'seen "after the program"; scontrol requeue "$me"; sleep 100' USR1
seen "start $count"
[ "$count" = 0 ] || exit 0
seen up
python3 -c 'import time; time.sleep(45); print("the last line", flush=True)' | tee log
seen "the end of the script"
"""
HOLD = """\
#!/bin/bash
#SBATCH --time=5 --output=out --open-mode=append
. ./head
hold() {
  trap "" TERM  # the requeue sends it again
  seen held
  scontrol requeuehold "$me"
  scontrol update JobId="$me" Comment=held
  scontrol release "$me"
  sleep 100
}
trap hold TERM
seen "start $count"
[ "$count" = 0 ] || exit 0
seen up
while :; do sleep 0.1; done
"""
CHILD = """\
#!/bin/bash
#SBATCH --time=5 --signal=B:USR1@60 --output=out --open-mode=append
. ./head
[ ! -e next ] || { seen "the next job, $count"; exit 0; }
trap 'seen "the end"; touch next; sbatch --dependency=afterany:$SLURM_JOB_ID script.sh' EXIT
trap 'seen signal; kill -USR1 $child' USR1
bash -c 'trap "exit 5" USR1; echo "one up" >>seen; while :; do sleep 0.1; done' &
child=$!
wait $child
wait $child
seen "child $?"
"""
AFTER = """\
#!/bin/bash
#SBATCH --time=5 --signal=B:USR1@60 --output=out --open-mode=append
. ./head
[ ! -e next ] || { seen "the next job, $count"; exit 0; }
trap 'seen signal; touch next; sbatch --dependency=afterany:$SLURM_JOB_ID "$0"; exit 6' USR1
seen up
while :; do sleep 0.1; done
"""
STEPS = """\
#!/bin/bash --login
#SBATCH --time=5 --nodes=2 --ntasks=2 --signal=SIGNAL@60 --output=out --open-mode=append
. ./head
seen "start $count"
[ "$count" = 0 ] || exit 0
srun bash -c 'trap "exit 7" SIGNAL; echo "one up" >>seen; while :; do sleep 0.1; done'
seen "steps $?"
scontrol requeue "$me"
sleep 100
"""
NUMBER = """\
#!/bin/bash
#SBATCH --time=5 --signal=B:10@60 --output=out --open-mode=append
. ./head
trap 'seen "signal 10"; exit 8' 10
seen up
while :; do sleep 0.1; done
"""
TRAP = """\
#!/bin/bash
#SBATCH --time=5 --output=out --open-mode=append
. ./head
trap 'seen TERM; BEFORE; kill -USR2 $child; wait $child; seen "child $?"; exit 9' TERM
bash -c 'trap "echo child TERM >>seen" TERM; trap "exit 4" USR2; echo "one up" >>seen; while :; do sleep 0.1; done' &
child=$!
wait $child
"""
TRAP_OF_ALL = TRAP.replace("BEFORE", 'until grep -q "child TERM" seen; do sleep 0.1; done')


@dataclass(frozen=True)
class Logic:
    text: str
    what: Callable[[SlurmLab, str], object]
    """what is done to each job when it is up"""
    up: int = 1
    tasks: tuple[str, ...] = ("",)
    states: tuple[str, ...] = ("COMPLETED",)
    more: tuple[str, ...] = ()
    """the file `seen` holds all of these lines in the end"""


def scontrol(*words: str) -> Callable[[SlurmLab, str], object]:
    return lambda slurm, job: slurm.run(("scontrol", *(word.replace("JOB", job) for word in words)))


def scancel(*words: str) -> Callable[[SlurmLab, str], object]:
    return lambda slurm, job: slurm.run(("scancel", *words, job))


SOON = scontrol("update", "JobId=JOB", "TimeLimit=1")  # the signal comes at Slurm's next look
NOW = scontrol("update", "JobId=JOB", "EndTime=now+1")
TASKS = ("_1", "_2")
LOGIC: Mapping[str, Logic] = {
    "array": Logic(ARRAY, SOON, 2, TASKS, more=("1 step 3", "2 start 1")),
    "requeued from outside": Logic(ARRAY, scontrol("requeue", "JOB"), 2, TASKS, more=("2 start 1",)),
    "pipe": Logic(PIPE, SOON, tasks=("_7",), more=("7 after the program", "7 start 1")),
    "hold": Logic(HOLD, scancel("--batch", "--signal=TERM"), more=("one held", "one start 1")),
    "hold at the limit": Logic(HOLD, NOW, more=("one held", "one start 1")),
    "child and the next job": Logic(CHILD, SOON, more=("one child 5", "one the next job, 0")),
    "the next job": Logic(AFTER, SOON, states=("FAILED",), more=("one the next job, 0",)),
    "USR1 to the steps": Logic(STEPS.replace("SIGNAL", "USR1"), SOON, 2, more=("one steps 7", "one start 1")),
    "HUP to the steps": Logic(STEPS.replace("SIGNAL", "HUP"), SOON, 2, more=("one steps 7", "one start 1")),
    "a signal's number": Logic(NUMBER, SOON, states=("FAILED",), more=("one signal 10",)),
    "TERM to the script": Logic(
        TRAP.replace("BEFORE", ":"), scancel("--batch", "--signal=TERM"), states=("FAILED",), more=("one child 4",)
    ),
    "TERM to all": Logic(TRAP_OF_ALL, scancel("--full", "--signal=TERM"), states=("FAILED",), more=("one child 4",)),
}


def lines_of(folder: Path) -> dict[str, list[str]]:
    """Task -> its lines in the file `seen`, in their order."""
    found: dict[str, list[str]] = {}
    path = folder / "seen"
    for line in path.read_text().splitlines() if path.exists() else ():
        task, _, what = line.partition(" ")
        found.setdefault(task, []).append(what)
    return found


def wait_until_up(folder: Path, count: int) -> None:
    until(lambda: sum(lines.count("up") for lines in lines_of(folder).values()) == count, f"the jobs of {folder}")


def has_ended(slurm: SlurmLab, logic: Logic, folder: Path, jobs: list[str]) -> bool:
    seen, wanted = lines_of(folder), [line.partition(" ") for line in logic.more]
    return all(slurm.job(job).get("JobState") in logic.states for job in jobs) and all(
        what in seen.get(task, ()) for task, _, what in wanted
    )


def test_scripts_that_restart_themselves_do_so(cluster: Runner, slurm: SlurmLab, project: Path) -> None:
    started: dict[str, list[tuple[Path, list[str]]]] = {}
    for name, logic in LOGIC.items():
        for kind in ("plain", "runner"):
            folder = project / kind / name.replace(" ", "-").replace("'", "")
            write(folder, {"script.sh": logic.text, "head": HEAD})
            if kind == "plain":
                argv = ("sbatch", "--parsable", "script.sh")
                job = slurm.run(argv, cwd=folder, env={**cluster.environ, "PWD": str(folder)}).stdout.strip()
            else:
                run = cluster("launch", "./script.sh", cwd=folder).stdout.split()[0]
                job = cluster.status(run)["job_id"].partition("_")[0]
            started.setdefault(name, []).append((folder, [job + task for task in logic.tasks]))
    for name, pair in started.items():
        for folder, jobs in pair:
            wait_until_up(folder, LOGIC[name].up)
            for job in jobs:
                LOGIC[name].what(slurm, job)
    for name, pair in started.items():
        for folder, jobs in pair:
            ended = partial(has_ended, slurm, LOGIC[name], folder, jobs)
            until(ended, f"the end of the jobs of {folder}", seconds=300)
        (plain, plain_jobs), (ours, our_jobs) = pair
        assert lines_of(ours) == lines_of(plain), name
        for key in ("JobState", "ExitCode", "Restarts", "Comment"):
            found = [[slurm.job(job).get(key) for job in jobs] for jobs in (plain_jobs, our_jobs)]
            assert found[1] == found[0], (name, key)


PYTHON = """\
#!/usr/bin/env python3
#SBATCH --time=5 --output=out --open-mode=append
import os, pathlib, time
pathlib.Path("seen").open("a").write("one up\\n")
while not int(os.environ.get("SLURM_RESTART_COUNT", 0)):
    time.sleep(0.1)
"""
LIMIT = """\
#!/bin/bash
#SBATCH --array=1-2 --time=5 --output=out-%a --open-mode=append
. ./head
seen up
while [ "$count" = 0 ]; do sleep 0.1; done
"""
REQUEUES = """\
#!/bin/bash
#SBATCH --time=5 --output=out --open-mode=append
. ./head
trap 'scontrol requeue "$me"; sleep 100' USR1
seen up
while [ "$count" = 0 ]; do sleep 0.1; done
"""


def test_restarts_on_request_come_beside_the_scripts_own(cluster: Runner, slurm: SlurmLab, project: Path) -> None:
    """A script in Python and each task of an array restart at the limit; a script that requeues itself still does."""
    cases = (
        ("python", PYTHON, ("",), NOW, "time_limit"),
        ("array", LIMIT, ("_1", "_2"), NOW, "time_limit"),
        ("own", REQUEUES, ("",), scancel("--batch", "--signal=USR1"), "requeued"),
    )
    runs: list[tuple[str, str]] = []
    for name, text, tasks, what, cause in cases:
        folder = project / name
        write(folder, {"script.sh": text, "head": HEAD})
        first = cluster("launch", "--restart", "time_limit=3", "./script.sh", cwd=folder).stdout.split()[0]
        rows = json.loads(cluster("status", "--json", first).stdout)
        wait_until_up(folder, len(tasks))
        for row in rows:
            what(slurm, row["job_id"])
            runs.append((row["run"], cause))
    for run, cause in runs:
        last = cluster.wait(run, lambda status: status["state"] == "COMPLETED", seconds=300)
        assert last["causes"] == [cause, "done"], run
