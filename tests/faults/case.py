"""A run with a fault in it: a private cluster, the folder of a job that goes on by itself, and what became of it."""

from __future__ import annotations

import math
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from runner.project import Project
from runner.runs import account as runner_account
from runner.runs.job import Job, Resources, Restart
from runner.runs.run import Run
from runner.runs.schedulers import slurm_commands as scheduler
from runner.runs.trainer import FILE, NONE, render
from tests.faults import account
from tests.lab import processes
from tests.lab.processes import LabError
from tests.lab.slurm import SlurmLab
from tests.runs.scripts import BARE, SLURM, write_run

TRAINER = Path(__file__).with_name("trainer.py")
STEPS, SAVE_EVERY, STEP_SECONDS = 60, 8, 0.1
CAUSES = ("time_limit", "preemption", "node_failure", "hang", "script_failure")
CONFIG = (
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=high Nodes=ALL PriorityTier=10 State=UP",
    "PartitionName=cancelled Nodes=ALL PriorityTier=1 PreemptMode=CANCEL State=UP",
)
KILL_WAIT = 5  # as in the lab's slurm.conf
GIVEN_UP_AFTER = 10  # seconds without a word of a slurmd
QUICK = {
    **{"RUNNER_WATCH_SECONDS": "1", "RUNNER_STACK_SECONDS": "3"},
    **{"RUNNER_NODE_SECONDS": "3", "RUNNER_CHECK_SECONDS": "5"},
    **{"RUNNER_GUARD_SECONDS": "1", "RUNNER_LOST_SECONDS": "4"},
}
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


interrupted = threading.Event()
"""set when the runs in progress are to end"""


@dataclass(frozen=True)
class Outcome:
    """What one fault cost. Times are in seconds."""

    completed: bool
    checkpoints_lost: int
    steps_repeated: int
    nodes_held: int
    """allocated, or with processes of the job, 10 s after its end"""
    causes: tuple[str, ...]
    """of the attempts, as the run folder has them"""
    seconds: float
    rungs: tuple[str, ...] = ()
    """how each next attempt was started: in_place, requeue, submit, …; `-` if the run folder does not tell"""
    same_job: bool = True
    """all attempts belong to one Slurm job"""
    given_back: int = 0
    """how many times the job gave its nodes back, according to Slurm, although enough of its nodes were healthy"""
    late_steps: int = 0
    """steps and saves of an attempt after a later one had begun"""
    detection: float | None = None
    """from the fault to its detection"""
    to_first_step: float | None = None
    """from the detection to the first step of a later attempt; the longest if there were several detections"""
    stopped: str = ""
    """why no further attempt follows, as the run folder tells"""
    by_hand: bool = False
    """nothing followed by itself; the same file was submitted again"""
    struck: str = ""
    """what the fault hit, where that is random"""
    costs: Mapping[str, account.Cost] = field(default_factory=dict)
    """node seconds, as measured here and as `runner account` has them: held, hang, repeated, restart"""
    trouble: str = ""
    """what can be read about it, for a person"""


class Case:
    """One run on a cluster of its own, between `with` and its end."""

    def __init__(
        self,
        number: int = 0,
        *,
        steps: int = STEPS,
        config: Sequence[str] = (),
        nodes: int = 2,
        plugins: Sequence[str] = (),
    ) -> None:
        """`nodes`: what the job asks for, with its spare nodes; `plugins`: of the lab's Slurm, for containers."""
        self.chance = random.Random(number)
        self.number, self.steps, self.nodes = number, steps, nodes
        self.policy: dict[str, int | bool] = dict.fromkeys(CAUSES, 9)
        self.resources: dict[str, int] = {}
        """spare_nodes and min_nodes, where the job file has them"""
        self.launcher = "srun"
        self.trainer: str | None = NONE
        """whose log the batch script reads; None: any"""
        self.code: dict[str, str] = {}
        """files of the program beside trainer.py; the first one is started; empty: trainer.py"""
        self.arguments: tuple[str, ...] = ()
        """of the program; empty: steps, steps between saves, seconds per step"""
        self.keeps = False
        """whether enough nodes of the job stay healthy, so that it may not give its nodes back"""
        self.read_lines = lambda: account.read(self.account)
        self.struck_at: float | None = None
        """Unix time of the fault"""
        self.struck = ""
        self.hang_seconds = self.gpus = self.gpu_hours = 0
        self.by_hand = False
        self.closing = ExitStack()
        """what ends before the folder is removed"""
        self.environ: dict[str, str] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="runner-fault-"))
        self.run = self.folder / "runs" / "x-1"
        self.account = self.folder / "account"
        self.lab = SlurmLab(nodes=nodes + 1, plugins=plugins, extra_config=(*CONFIG, *config))
        self.began, self.created = time.monotonic(), time.time()

    def __enter__(self) -> Self:
        self.lab.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lab.stop()
        self.closing.close()
        processes.remove(self.folder)

    def write(self) -> None:
        """The run folder, as a launch would write it."""
        policy = Restart(**self.policy, gpu_hours=self.gpu_hours)
        nodes = self.nodes - self.resources.get("spare_nodes", 0)
        job = Job(
            "test",
            BARE,
            script=next(iter(self.code), TRAINER.name),
            arguments=self.arguments or (str(self.steps), str(SAVE_EVERY), str(STEP_SECONDS)),
            launcher=self.launcher,
            resources=Resources(nodes=nodes, gpus_per_node=self.gpus, **self.resources),
            restart=policy,
            hang_seconds=self.hang_seconds,
        )
        write_run(self.run, job, site=SLURM, code={**self.code, TRAINER.name: TRAINER.read_text()})
        (self.run / FILE).write_text(render(self.trainer, Project(None, self.folder, self.folder)))

    def submit(self, *flags: str) -> str:
        """The job id of the run folder's script, submitted."""
        done = self.lab.run(scheduler.submit(self.run, flags), cwd=self.run, extra_environ=self.told)
        return scheduler.parse_submit(done.stdout)

    def submit_at_once(self, count: int) -> tuple[str, ...]:
        """The job ids of so many submissions at the same moment."""
        with ThreadPoolExecutor(count) as pool:
            return tuple(pool.map(lambda _: self.submit(), range(count)))

    @property
    def told(self) -> dict[str, str]:
        """What the job finds in its environment."""
        return {"FAULTS_ACCOUNT": str(self.account), **QUICK, **self.environ}

    def start(self, *flags: str) -> str:
        """The job id of the run, when it has come to a step between the first checkpoint and the last but one."""
        self.write()
        job_id = self.submit(*flags)
        self.reach_any()
        return job_id

    def reach_any(self) -> None:
        """Wait for a step between the first checkpoint and the last but one; a fault may follow at once."""
        self.reach(self.chance.randint(SAVE_EVERY + 1, min(self.steps, STEPS) - SAVE_EVERY))
        self.pause(self.chance.uniform(0, STEP_SECONDS))
        self.strike_now()

    def strike_now(self) -> None:
        """Note the moment of the fault."""
        self.struck_at = time.time()

    def ask_rank(self, what: str, rank: int, text: str) -> None:
        """Make a rank of the first attempt print a text, and exit or abort."""
        (self.folder / "request").write_text(text)
        (self.folder / "request").rename(self.folder / f"{what}-1-{rank}")

    def lines(self) -> tuple[account.Line, ...]:
        """What the ranks have done."""
        return self.read_lines()

    def begun(self) -> bool:
        """Whether the training has reported a step to runner."""
        return (self.run / "metrics.jsonl").exists()

    def reach(self, step: int) -> None:
        self.until(lambda: account.newest_step(self.lines()) >= step, 240, f"step {step}")

    def pid_of(self, rank: int) -> int:
        """The process of a rank in the newest attempt."""
        return next(line.pid for line in reversed(self.lines()) if line.what == "begins" and line.rank == rank)

    def node(self, rank: int) -> str:
        """The node on which a rank of the newest attempt runs."""
        return next(line.node for line in reversed(self.lines()) if line.what == "begins" and line.rank == rank)

    def nodes_of(self, attempt: int) -> frozenset[str]:
        """The nodes on which the ranks of an attempt began."""
        return frozenset(line.node for line in self.lines() if line.what == "begins" and line.attempt == attempt)

    def held_nodes(self) -> list[str]:
        """The nodes of all jobs, in Slurm's order: spare nodes last."""
        shown = self.lab.run(("squeue", "--noheader", "--states=R,CG,S", "--format=%N"), check=False).stdout
        return self.lab.run(("scontrol", "show", "hostnames", ",".join(shown.split())), check=False).stdout.split()

    def pause(self, seconds: float) -> None:
        """Let time pass. Raises LabError where the runs in progress are to end."""
        if interrupted.wait(seconds):
            raise LabError("interrupted")

    def until(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise LabError(f"waited {seconds:g} s in vain for {what}")
            self.pause(0.05)

    def finished(self) -> bool:
        return account.finished(self.lines(), self.steps)

    def over(self) -> bool:
        """Whether the training is done, or given up, and no job is left that could take a node."""
        return (self.finished() or bool(self.stopped())) and not self.active()

    def stopped(self) -> str:
        """Why no further attempt follows; empty where one may."""
        path = self.run / "stopped"
        return path.read_text().strip() if path.exists() else ""

    def active(self) -> tuple[str, ...]:
        """What squeue lists: jobs that wait, run or complete."""
        return tuple(self.lab.run(("squeue", "--noheader", "--format=%i %T"), check=False).stdout.splitlines())

    def outcome(self, seconds: float = 300) -> Outcome:
        """What became of the run, when it is over or `seconds` have passed."""
        trouble = ""
        try:
            self.until(self.over, seconds, "the end of the run")
        except LabError as error:
            trouble = f"{error}\n{self.story()}"
        lines, held, detected = self.lines(), self.held(), self.moments("detected")
        lost, repeated = account.lost(lines), account.repeated(lines)
        costs = self.costs(lines)
        noticed = [moment for moment in detected.values() if self.struck_at and moment >= self.struck_at]
        jobs = self.job_ids()
        trouble = trouble or self.story()
        return Outcome(
            completed=self.finished(),
            checkpoints_lost=lost,
            steps_repeated=repeated,
            nodes_held=held,
            causes=self.causes(),
            seconds=time.monotonic() - self.began,
            rungs=self.rungs(),
            same_job=len(jobs) == 1,
            given_back=(len(jobs) - 1 + sum(map(self.restarts, jobs))) if self.keeps else 0,
            late_steps=account.late(lines),
            detection=min(noticed) - self.struck_at if noticed and self.struck_at else None,
            to_first_step=account.to_first_step(lines, detected),
            stopped=self.stopped(),
            by_hand=self.by_hand,
            struck=self.struck,
            costs=costs,
            trouble=trouble,
        )

    def costs(self, lines: Sequence[account.Line]) -> dict[str, account.Cost]:
        """What the run and its faults cost, in node seconds: as measured here, and as `runner account` has it."""
        folders = self.attempts()
        if not folders:
            return {}
        created = datetime.fromtimestamp(self.created, UTC).isoformat()
        jobs = tuple(sorted(self.job_ids(), key=int))
        record = Run(self.run.name, self.run, "x", "lab", "slurm", created, "submitted", jobs, nodes=self.nodes)
        found = runner_account.account(record, time.time())
        start = dict(line.partition(" ")[::2] for line in text_of(folders[0] / "started").splitlines())
        weight = self.gpus or float(start["cpus"])
        allocations = [each for job in jobs for each in self.allocations(job)]
        tells = any("train" in text_of(each / "times-rank-0").split() for each in folders)
        ended = None if tells else self.moments("step_end").get(len(folders))
        moments = self.moments("started"), self.moments("detected")
        from_log = not (self.run / "metrics.jsonl").exists()  # the growth of a log is recorded once a second
        measured = account.costs(lines, allocations, *moments, self.causes(), ended, from_log=from_log)
        charged = account.charged([each.classes for each in found.attempts])
        return {
            name: account.Cost(round(seconds, 2), round(charged[name] / weight, 2), grain)
            for name, (seconds, grain) in measured.items()
        }

    def allocations(self, job_id: str) -> list[account.Allocation]:
        """When the job got its nodes, and when it gave back or lost each, according to Slurm."""
        log = text_of(self.lab.folder / "slurmctld.log")
        begun = re.findall(rf"\[(\S+)\] sched.*(?:Allocate|Started) JobId={job_id} .*?(nid\S+)", log)
        lost = re.findall(rf"\[(\S+)\] error: Removing failed node (\S+) from JobId={job_id}\n", log)
        # the nodes are free when the job has completed; where the log does not tell, Slurm's end has to do
        words = (
            "_job_complete: JobId={} done",
            "Requeuing JobId={}",
        )
        done = re.findall(rf"\[(\S+)\] (?:{'|'.join(words).format(*[job_id] * 2)})\n", log)
        ended = re.findall(
            rf"JobId={job_id} .*JobState=(?!RESIZING).*EndTime=(\S+)", text_of(self.lab.folder / "jobcomp.log")
        )
        limits = [*(unix(moment) for moment, _ in begun[1:]), math.inf]
        ends = [
            max([unix(at) for at in (*done, *ended) if unix(begin) <= unix(at) < limit], default=time.time())
            for (begin, _), limit in zip(begun, limits, strict=True)
        ]
        found = []
        for (moment, nodes), until in zip(begun, ends, strict=True):
            begin = unix(moment)
            names = self.lab.run(("scontrol", "show", "hostnames", nodes)).stdout.split()
            gone = {name: unix(at) for at, name in lost if begin <= unix(at) <= until}
            grace = 0 if until in map(unix, done) else KILL_WAIT
            found.append(account.Allocation(begin, until, {name: gone.get(name, until) for name in names}, grace))
        return found

    def attempts(self) -> list[Path]:
        """The folders of all attempts, in order."""
        return sorted(self.run.glob("attempts/[0-9]*"), key=lambda path: int(path.name))

    def causes(self) -> tuple[str, ...]:
        return tuple(first_word(each / "cause") for each in self.attempts())

    def rungs(self) -> tuple[str, ...]:
        return tuple(first_word(each / "next") for each in self.attempts()[:-1])

    def moments(self, wanted: str) -> dict[int, float]:
        """When an event happened first in each attempt, as the run folder tells."""
        found = {}
        for folder in self.attempts():
            words = (line.split() for line in text_of(folder / "times").splitlines())
            if moments := [float(moment) for moment, event, *_ in words if event == wanted]:
                found[int(folder.name)] = min(moments)
        return found

    def job_ids(self) -> frozenset[str]:
        """The jobs to which the attempts belong."""
        lines = (line for each in self.attempts() for line in text_of(each / "started").splitlines())
        return frozenset(line.split()[1] for line in lines if line.startswith("job "))

    def restarts(self, job_id: str) -> int:
        """How many times Slurm has started the job again."""
        return int(self.lab.job(job_id).get("Restarts", 0))

    def held(self) -> int:
        """The nodes that still have a job, or processes of one, when 10 s have passed at most."""
        with suppress(LabError):
            self.until(lambda: not self._held(), 10, "free nodes")
        return len(self._held())

    def _held(self) -> frozenset[str]:
        return frozenset(self.held_nodes()) | frozenset(node for node, _ in self.job_processes())

    def job_processes(self) -> list[tuple[str, int]]:
        """Node and process id of everything that a job of this cluster has started."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                around = (process / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            told = dict(word.partition("=")[::2] for word in around)
            if told.get("FAULTS_ACCOUNT") == str(self.account) and "SLURMD_NODENAME" in told:
                found.append((told["SLURMD_NODENAME"], int(process.name)))
        return found

    def set_down(self, node: str) -> None:
        self.lab.run(("scontrol", "update", f"nodename={node}", "state=down", "reason=fault"))

    def kill_node(self, node: str) -> None:
        """What a crash of the node leaves: nothing of slurmd, of the jobs' shepherds, of their processes."""
        self.lab.stop_node(node)
        self.kill_step(node)

    def kill_step(self, node: str) -> None:
        """Kill the jobs' processes on a node, and their shepherds, so that nothing cleans up behind them."""
        found = [pid for name, pid in (*self.shepherds(), *self.job_processes()) if name == node]
        for pid in sorted(found, key=place_in_crash):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def shepherds(self) -> set[tuple[str, int]]:
        """Node and process id of each slurmstepd of the job."""
        return {
            (node, above)
            for node, pid in self.job_processes()
            for above in ancestors(pid)
            if command(above).startswith("slurmstepd:")
        }

    def story(self) -> str:
        """The ends of what is written about the run, for a person to read."""
        log = self.run / "job.log"
        told = log.read_text(errors="replace")[-3000:] if log.exists() else ""
        queue = self.lab.run(("scontrol", "show", "jobs", "--oneliner"), check=False).stdout
        lines = [f"{each.attempt} {each.rank} {each.what} {each.word}" for each in self.lines()[-8:]]
        processes_left = [f"{node} {pid} {command(pid)}" for node, pid in self.job_processes()]
        return "\n".join((self.struck, told, queue, *lines, *self.active(), *processes_left))


def unix(moment: str) -> float:
    """Unix time of a moment in Slurm's logs."""
    return datetime.fromisoformat(moment).timestamp()


def text_of(path: Path) -> str:
    """The content of a file; empty if there is none."""
    return path.read_text() if path.exists() else ""


def first_word(path: Path) -> str:
    """The first word of a file; `-` if there is none."""
    return next(iter(text_of(path).split()), "-")


def place_in_crash(pid: int) -> int:
    """The lowest is killed first, so that no other process of the node can still report its end to Slurm.

    The second process of an srun ends the step when the first has gone, and srun ends it when a slurmstepd has gone.
    """
    program, _, words = command(pid).partition(" ")
    if program == "slurmstepd:":
        return 0 if ".batch]" in words else 4
    if program.endswith("bash"):
        return 1
    if program.endswith("srun"):
        return 2 if "srun" in command(next(iter(ancestors(pid)), 1)).partition(" ")[0] else 3
    return 5


def ancestors(pid: int) -> list[int]:
    """The processes above one, the nearest first."""
    found: list[int] = []
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        found.append(pid)
    return found


def command(pid: int) -> str:
    """The words of a process; empty where it has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
