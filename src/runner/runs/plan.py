"""The plan of a run: everything about it except its number.

What differs between programs is behind the methods of RunPlan: RenderedPlan has the batch script that runner writes,
and own_script.OwnScriptPlan has the user's own.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from runner.environments.environment import Attachment, Environment
from runner.runs import payload
from runner.runs.budget import Budget, estimate
from runner.runs.image import LaunchImage
from runner.runs.job import KEYS, Job, Layer
from runner.runs.program import Program
from runner.runs.run import Dependencies
from runner.runs.schedulers.scheduler import scheduler_of
from runner.runs.snapshot import Snapshot
from runner.site import Site

TYPE_CHECKING = False  # not typing's: importing it costs a millisecond
if TYPE_CHECKING:
    from runner.machine.report import Report

SCRIPT = "job.sbatch"
EDF = "environment.toml"
NOTIFY = "notify"
"""the file of the run folder that lists the events for payload/notify.sh"""


@dataclass(frozen=True)
class Request:
    """What the user requested on the command line."""

    job: str | None = None
    env: str | None = None
    script: str | None = None
    words: tuple[str, ...] = ()
    """the words after the first bare `--`: the script's arguments, or the command"""
    site: str | None = None
    engine: str | None = None
    given: Layer = field(default_factory=dict)
    """the name, resources, launcher and flags from the command line"""
    after: tuple[str, ...] = ()
    """runs that must have ended with exit code 0"""
    after_any: tuple[str, ...] = ()
    """runs that must have ended"""
    dry_run: bool = False
    from_snapshot: bool = False
    """run the user's own batch script from RUN/code"""
    furnished: Callable[[Environment], Environment] = lambda environment: environment
    """changes the environment, for example by adding mounts"""


class Row(NamedTuple):
    """A value that a dry run shows."""

    name: str
    value: str
    source: str


class Trial(NamedTuple):
    """An `sbatch --test-only` command, which submits nothing."""

    argv: tuple[str, ...]
    folder: Path
    """where it runs"""
    script: str | None = None
    """its stdin"""


@dataclass(frozen=True, kw_only=True)
class RunPlan(ABC):
    """Everything about a run except its number."""

    site: Site
    environment: Environment
    """the environment for the job: image by content, run folder mounted"""
    image: LaunchImage
    engine: str
    attachment: Attachment
    job: Job
    program: Program
    snapshot: Snapshot
    script: str
    """the text of the batch script"""
    files: Mapping[str, str]
    """relative path -> text, for the files of the run folder, including the script"""
    notes: tuple[str, ...]
    """warnings"""
    waits: Dependencies = field(default_factory=Dependencies)
    """the runs to wait for"""
    budget: Budget = field(default_factory=Budget)
    """the limits for what a user's runs may use together"""

    rows_title = "settings"
    """what `rows` shows"""

    @property
    def own_script(self) -> str | None:
        """The path of the user's own batch script."""
        return None

    @property
    def array_tasks(self) -> tuple[int, ...]:
        """The tasks, if the batch script is an array itself: each is a run."""
        return ()

    @property
    def in_snapshot(self) -> bool:
        """Whether the program starts in RUN/code."""
        return True

    @property
    def tried(self) -> bool:
        """Whether a dry run asks Slurm if it accepts the job."""
        return False

    @property
    def most_gpu_hours(self) -> float:
        """The GPU hours that the run may use; 0 without GPUs or a known time limit."""
        cost = estimate(self.job)
        return cost.most if cost else 0.0

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the program, which may name the folder of its checkpoints."""
        return (*self.job.command, *self.job.arguments)

    @abstractmethod
    def payload(self) -> Mapping[str, str]:
        """Path in the run folder -> text, for the files that the batch script needs at run time."""

    @abstractmethod
    def by_hand(self, runs: str) -> tuple[str, ...]:
        """Lines for a dry run: the command that submits the job, and the image. `runs`: the folder of the runs."""

    @abstractmethod
    def rows(self) -> Iterator[Row]:
        """The values that determine the batch script, each with its source."""

    @abstractmethod
    def options(self) -> Iterable[str]:
        """The long names of the options of sbatch that the job has."""

    @abstractmethod
    def trial(self) -> Trial:
        """The command that asks Slurm whether it accepts the job."""

    @abstractmethod
    def with_values(self, job: Job, values: Mapping[str, str]) -> RunPlan:
        """The plan for one combination of a sweep: for `job`, and with the values that its command does not name."""

    @abstractmethod
    def array_script(self, name: str, count: int, at_once: int | None) -> str:
        """The text of the file `name` in the folder of a sweep of `count` runs: the batch script of its array."""

    def without_secrets(self, report: Report) -> RunPlan:
        """The plan, without copies that would contain a secret if it can do without them."""
        return self


@dataclass(frozen=True, kw_only=True)
class RenderedPlan(RunPlan):
    """The plan of a run whose batch script is rendered from its job."""

    choose_offline: Callable[[Job], tuple[Job, tuple[str, ...]]] = lambda job: (job, ())
    """decides again, for other arguments, whether the job is offline; also returns notes (hub.choose_offline)"""

    hub_notes: tuple[str, ...] = ()
    """those of `notes` that speak of the models and datasets of this job"""

    def payload(self) -> Mapping[str, str]:
        return payload.files()

    def by_hand(self, runs: str) -> tuple[str, ...]:
        command = " ".join((*self._removed, scheduler_of(self.site.scheduler).BY_HAND))
        image = self.image.reference or "none (no container)"
        return f"would run: cd {runs}/{self.job.name}-NNNN && {command}", f"image: {image}"

    def rows(self) -> Iterator[Row]:
        job = self.job
        for name, key in KEYS.items():
            owner = job.resources if hasattr(job.resources, name) else job
            value = getattr(owner, name, None)
            parts: dict[str, object] = {name: value}
            if name == "restart" and job.restart:
                parts = {f"restart.{cause}": text for cause, text in job.restart.words.items()}
            for part, shown in parts.items():
                is_set = shown is not None and (key.kind is int or shown)
                if is_set and key.kind is not dict and name != "environment":
                    text = " ".join(shown) if isinstance(shown, tuple) else str(shown)
                    yield Row(part, text.partition("\n")[0], str(job.origins[name]))
        values = self.environment.values()
        for name, origin in self.environment.origins.items():
            yield Row(name, values.get(name, ""), str(origin))
        for name in _OF_SITE:
            if value := getattr(self.site, name):
                text = " ".join(value) if isinstance(value, tuple) else str(value)
                source = str(self.site.origins.get(name, self.site.name))
                yield Row(f"site {name}", text, source)

    def options(self) -> Iterable[str]:
        return re.findall(r"^#SBATCH --([\w-]+)", self.script, re.MULTILINE)

    def trial(self) -> Trial:
        return Trial((*self._removed, "sbatch", "--test-only"), Path.cwd(), self.script)

    @property
    def _removed(self) -> tuple[str, ...]:
        """The words before sbatch, as in a submission."""
        from runner.runs.schedulers import slurm  # a local site does not need it

        return () if self.site.is_local else slurm.without_overriding(self.script)

    def with_values(self, job: Job, values: Mapping[str, str]) -> RunPlan:
        added = [word for name, value in values.items() for word in (f"--{name}", value)]
        job, hub_notes = self.choose_offline(replace(job, arguments=(*job.arguments, *added)))
        others = [note for note in self.notes if note not in self.hub_notes]
        script = scheduler_of(self.site.scheduler).script(job, self.attachment, self.site)
        return replace(
            self,
            job=job,
            script=script,
            files={**self.files, SCRIPT: script},
            notes=(*others, *hub_notes),
            hub_notes=hub_notes,
        )

    def array_script(self, name: str, count: int, at_once: int | None) -> str:
        """Task N starts the run behind the link N. The script has the directives of the runs."""
        own = "\n".join(
            line for line in self.script.splitlines() if re.match("#SBATCH (?!--output=)", line)
        )
        limit = f"%{at_once}" if at_once else ""
        return f"""\
#!/bin/bash
{own}
#SBATCH --output=%a/job.log
#SBATCH --array=0-{count - 1}{limit}
#
# A sweep: task N is the run behind the link N in this folder. The whole submission: cd SWEEP && sbatch {name}
cd "$SLURM_ARRAY_TASK_ID" || exit 1
exec bash {SCRIPT}
"""


# the values of a site that the batch script is rendered from
_OF_SITE = (
    "scheduler",
    "gpu_request",
    "restart_by",
    "image_folder",
    "run_folder",
    "modules",
    "sbatch",
    "srun",
)
