"""Faults of what a job stands on: its ranks, memory, disk, clock; and people who start things twice."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.faults.case import ENDED, Case, Outcome, command
from tests.lab import processes
from tests.lab.processes import LabError

# as slurmd has been seen to write it
OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId={job}.0. Some of the step tasks have been OOM Killed.\n"
FAKETIME = Path("/usr/lib") / f"{os.uname().machine}-linux-gnu" / "faketime" / "libfaketime.so.1"


def rank_killed(case: Case) -> Outcome:
    """By kill -9; the other one waits for it forever."""
    case.keeps = True
    case.start()
    os.kill(case.pid_of(case.chance.randrange(2)), signal.SIGKILL)
    return case.outcome()


def rank_hung(case: Case) -> Outcome:
    """No progress for 15 s, the stacks of all ranks, the end, another attempt; every other time the rank is stopped."""
    case.keeps = True
    case.hang_seconds = 15  # fewer pass without a step where two cores start six clusters
    case.start()
    rank = case.chance.randrange(2)
    if case.number % 2:
        os.kill(case.pid_of(rank), signal.SIGSTOP)
    else:
        (case.folder / f"hang-1-{rank}").touch()
    outcome = case.outcome()
    stacks = [(case.run / f"attempts/1/stacks/rank-{each}.txt").read_text() for each in (rank, 1 - rank)]
    assert "in agree" in stacks[1], f"no stacks of rank {1 - rank}"
    assert "in hang_here" in stacks[0] or case.number % 2, f"no stacks of rank {rank}"
    return outcome


def helper_killed(case: Case) -> Outcome:
    """A process that the job needs but that is no rank: of the batch script, of its steps, of their slurmstepds.

    The first runs kill those of the batch script, each in turn; all others any process at a random moment. Every other
    run kills a rank up to 2 s before, so that the helper dies during the restart. The run's number is the seed.
    """
    case.resources = {"spare_nodes": 1}
    case.start()
    if case.number < HELPERS:
        helpers = below_batch_script(case)
        kill_helper(case, helpers[case.number % len(helpers)])
    else:
        if case.number % 2:
            killed(case.pid_of(case.chance.randrange(2)))
        case.pause(case.chance.uniform(0, 2))
        case.until(lambda: kill_helper(case, case.chance.choice(helpers_of_job(case) or [0])), 60, "a process to kill")
    return case.outcome()


def kill_helper(case: Case, pid: int) -> bool:
    """Whether there was such a process to kill; its words are noted."""
    case.struck = f"{command(pid)} (seed {case.number})" if pid else ""
    case.strike_now()
    return pid > 0 and killed(pid)


HELPERS = 8
"""slurmstepd, the batch script, and what it starts for an attempt"""


def below_batch_script(case: Case) -> list[int]:
    """Of the batch job: slurmstepd, the batch script, then its descendants in the order of their start."""
    tops = [pid for _, pid in case.shepherds() if ".batch]" in command(pid)]
    return [*tops, *sorted(processes.descendants(tops))]


def helpers_of_job(case: Case) -> list[int]:
    """All processes of the job but the ranks, and all slurmstepds, in the order of their start."""
    ranks = {line.pid for line in case.lines() if line.what == "begins"}
    found = {pid for _, pid in (*case.job_processes(), *case.shepherds())}
    return sorted({*found, *below_batch_script(case)} - ranks)


def oom(case: Case) -> Outcome:
    """What the kernel does, and what slurmd writes then."""
    case.policy["in_place"] = False
    job_id = case.start()
    with (case.run / "job.log").open("a") as log:
        log.write(OOM.format(job=job_id))
    os.kill(case.pid_of(1), signal.SIGKILL)
    return case.outcome()


def disk_full(case: Case) -> Outcome:
    """The run folder's disk has no byte left for 10 s."""
    runs = case.run.parent
    runs.mkdir()
    subprocess.run(("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", runs), check=True)
    case.start()
    filler = runs / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    case.pause(10)
    filler.unlink()
    return resumed_by_hand_if_need_be(case)


def resumed_by_hand_if_need_be(case: Case) -> Outcome:
    """Where nothing follows by itself, the same file is submitted again."""
    case.until(lambda: case.finished() or not case.active(), 240, "the end of the job")
    if not case.finished():
        case.by_hand = True
        case.submit()
    return case.outcome()


def unreadable(case: Case) -> Outcome:
    """The run folder's file system does not answer for 30 s, and a hang would be 10 s without progress."""
    parts = {name: case.folder / name for name in ("lower", "upper", "work")}
    for folder in (*parts.values(), case.run.parent):
        folder.mkdir()
    options = f"lowerdir={parts['lower']},upperdir={parts['upper']},workdir={parts['work']}"
    server = subprocess.Popen(("fuse-overlayfs", "-f", "-o", options, case.run.parent))
    case.closing.callback(server.wait)
    case.closing.callback(server.kill)
    case.until(lambda: os.path.ismount(case.run.parent), 120, "the mount")
    case.hang_seconds = 20  # less than the pause, more than a busy machine takes for a step
    case.start()
    server.send_signal(signal.SIGSTOP)
    try:
        case.pause(30)
    finally:
        server.send_signal(signal.SIGCONT)
    return case.outcome()


def clock_jump(case: Case) -> Outcome:
    """The clock of the nodes jumps by a day, there or back; then a rank is killed, and GPU hours are counted."""
    if not FAKETIME.exists():
        raise LabError(f"no {FAKETIME}: apt-get install faketime")
    clock = case.folder / "clock"
    clock.write_text("+0")
    case.environ = {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",  # the file server's clock does not jump
    }
    case.closing.callback(forget_clocks)
    case.hang_seconds, case.gpus, case.gpu_hours = 20, 4, 20
    case.policy["in_place"] = False  # libfaketime 0.9.10 fails in a process that runs another program under the same id
    case.start()
    (case.folder / "next").write_text(case.chance.choice(("+1d", "-1d")))
    (case.folder / "next").rename(clock)
    case.pause(3)
    case.until(lambda: killed(case.pid_of(1)), 60, "a rank to kill")
    return case.outcome()


def killed(pid: int) -> bool:
    """Whether there was such a process to kill: an attempt may just be ending."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def forget_clocks(shared: Path = Path("/dev/shm")) -> None:
    """Remove what libfaketime has left of this user's killed processes."""
    for path in shared.glob("*faketime_*"):
        with suppress(FileNotFoundError):  # somebody else's has just gone
            if path.stat().st_uid == os.geteuid() and not Path(f"/proc/{path.name.rpartition('_')[2]}").exists():
                path.unlink()


def submitted_twice(case: Case) -> Outcome:
    """The same run, by two sbatch at the same moment: one of them may work at a time."""
    case.write()
    ids = case.submit_at_once(2)
    outcome = case.outcome()
    for job_id in ids:
        case.lab.wait_for(job_id, ENDED, 60)
    return outcome
