"""A run with a fault in it: a private cluster, the folder of a job that goes on by itself, and what became of it."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from runner.runs.job import Restart
from runner.runs.schedulers import slurm_commands as scheduler
from tests.faults import account
from tests.lab import processes
from tests.lab.processes import LabError
from tests.lab.slurm import SlurmLab
from tests.runs.scripts import SLURM, command_job, write_run

TRAINER = Path(__file__).with_name("trainer.py")
STEPS, SAVE_EVERY, STEP_SECONDS = 60, 8, 0.1
CAUSES = ("time_limit", "preemption", "node_failure", "hang", "script_failure")
CONFIG = (
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=high Nodes=ALL PriorityTier=10 State=UP",
    "PartitionName=cancelled Nodes=ALL PriorityTier=1 PreemptMode=CANCEL State=UP",
)
GIVEN_UP_AFTER = 10  # seconds without a word of a slurmd
QUICK = {"RUNNER_WATCH_SECONDS": "1", "RUNNER_STACK_SECONDS": "3"}
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


interrupted = threading.Event()
"""set when the runs in progress are to end"""


@dataclass(frozen=True)
class Outcome:
    """What one fault has cost."""

    completed: bool
    checkpoints_lost: int
    steps_repeated: int
    nodes_held: int
    """allocated, or with processes of the job, 10 s after its end"""
    causes: tuple[str, ...]
    """of the attempts, as the run folder has them"""
    seconds: float
    by_hand: bool = False
    """nothing followed by itself; the same file was submitted again"""
    trouble: str = ""
    """what can be read about it, for a person"""


class Case:
    """One run on a cluster of its own, between `with` and its end."""

    def __init__(self, number: int = 0, *, steps: int = STEPS, config: Sequence[str] = ()) -> None:
        self.chance = random.Random(number)
        self.number, self.steps = number, steps
        self.policy = dict.fromkeys(CAUSES, 9)
        self.hang_seconds = self.gpus = self.gpu_hours = 0
        self.by_hand = False
        self.closing = ExitStack()
        """what ends before the folder is removed"""
        self.environ: dict[str, str] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="runner-fault-"))
        self.run = self.folder / "runs" / "x-1"
        self.account = self.folder / "account"
        self.lab = SlurmLab(nodes=3, plugins=(), extra_config=(*CONFIG, *config))
        self.began = time.monotonic()

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
        words = ("python3", "trainer.py", str(self.steps), str(SAVE_EVERY), str(STEP_SECONDS))
        policy = Restart(**self.policy, gpu_hours=self.gpu_hours)
        job = command_job(*words, launcher="srun", nodes=2, restart=policy, hang_seconds=self.hang_seconds)
        job = replace(job, resources=replace(job.resources, gpus_per_node=self.gpus))
        write_run(self.run, job, site=SLURM, code={"trainer.py": TRAINER.read_text()})

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
        self.reach(self.chance.randint(SAVE_EVERY + 1, min(self.steps, STEPS) - SAVE_EVERY))
        self.pause(self.chance.uniform(0, STEP_SECONDS))
        return job_id

    def lines(self) -> tuple[account.Line, ...]:
        return account.read(self.account)

    def reach(self, step: int) -> None:
        self.until(lambda: account.newest_step(self.lines()) >= step, 240, f"step {step}")

    def pid_of(self, rank: int) -> int:
        """The process of a rank in the newest attempt."""
        return next(line.pid for line in reversed(self.lines()) if line.what == "begins" and line.rank == rank)

    def node(self, rank: int) -> str:
        """The node on which a rank of the newest attempt runs."""
        around = Path(f"/proc/{self.pid_of(rank)}/environ").read_bytes().decode(errors="replace").split("\0")
        return next(word.partition("=")[2] for word in around if word.startswith("SLURMD_NODENAME="))

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
        """Whether the training is done and no job is left that could take a node."""
        return self.finished() and not self.active()

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
        lines, held = self.lines(), self.held()
        lost, repeated = account.lost(lines), account.repeated(lines)
        trouble = trouble or self.story()
        return Outcome(
            completed=self.finished(),
            checkpoints_lost=lost,
            steps_repeated=repeated,
            nodes_held=held,
            causes=self.causes(),
            seconds=time.monotonic() - self.began,
            by_hand=self.by_hand,
            trouble=trouble,
        )

    def causes(self) -> tuple[str, ...]:
        folders = sorted(self.run.glob("attempts/[0-9]*"), key=lambda path: int(path.name))
        return tuple((each / "cause").read_text().strip() if (each / "cause").exists() else "-" for each in folders)

    def held(self) -> int:
        """The nodes that still have a job, or processes of one, when 10 s have passed at most."""
        with suppress(LabError):
            self.until(lambda: not self._held(), 10, "free nodes")
        return len(self._held())

    def _held(self) -> frozenset[str]:
        shown = self.lab.run(("squeue", "--noheader", "--states=R,CG,S", "--format=%N"), check=False).stdout
        names = self.lab.run(("scontrol", "show", "hostnames", ",".join(shown.split())), check=False).stdout.split()
        return frozenset(names) | frozenset(node for node, _ in self.job_processes())

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

    def kill_node(self, node: str) -> None:
        """What a crash of the node leaves: nothing of slurmd, of the jobs' shepherds, of their processes."""
        self.lab.stop_node(node)
        jobs = [pid for name, pid in self.job_processes() if name == node]
        shepherds = {above for pid in jobs for above in ancestors(pid) if command(above).startswith("slurmstepd:")}
        for pid in (*shepherds, *jobs):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def story(self) -> str:
        """The ends of what is written about the run, for a person to read."""
        log = self.run / "job.log"
        told = log.read_text(errors="replace")[-3000:] if log.exists() else ""
        queue = self.lab.run(("scontrol", "show", "jobs", "--oneliner"), check=False).stdout
        lines = [f"{each.attempt} {each.rank} {each.what} {each.word}" for each in self.lines()[-8:]]
        processes_left = [f"{node} {pid} {command(pid)}" for node, pid in self.job_processes()]
        return "\n".join((told, queue, *lines, *self.active(), *processes_left))


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
