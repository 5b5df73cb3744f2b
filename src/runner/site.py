"""A site: what differs between clusters, as data. Every value has a source and a date."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from runner.expansion import expand
from runner.located_toml import Place
from runner.project import Project

LOCAL = "local"
"""the `scheduler` of a site that has none"""


@dataclass(frozen=True)
class Origin:
    """Where a value came from: its source, the date of that source, and the line of the file."""

    source: str
    date: str = ""
    place: Place | None = None

    def __str__(self) -> str:
        source = ", ".join(part for part in (self.source, self.date) if part)
        return f"{source} ({self.place})" if source and self.place else source or str(self.place)


@dataclass(frozen=True)
class Site:
    """One cluster, or this machine. None means not known; if the value is needed, an error asks for it."""

    name: str
    summary: str
    scheduler: str
    """`slurm` or `local`"""
    engine: str
    """a name from environments.engines.ENGINES, or `auto`: the first one that this machine supports"""
    image_folder: str
    """the folder of squashfs files; `${VAR}` is expanded when it is used"""
    image_striping: str | None = None
    """arguments of `lfs setstripe` that make the folder fast to read from many nodes; None: not on Lustre"""
    run_folder: str | None = None
    """the folder of run folders; None: PROJECT/runs"""
    container_storage: str | None = None
    """where podman must store its images on a compute node; None: podman's default works. The build script puts it
    in double quotes on purpose, so that the node expands `${USER}`. site_files refuses quotes, backticks and `$(`."""
    architecture: str | None = None
    """of the compute nodes, as OCI names it: amd64, arm64"""
    machine_type: str | None = None
    """of the compute nodes; sets architecture, GPUs, CPUs and memory per node from machine_types.toml"""
    gpu: str | None = None
    """the GPU model, as the vendor names it"""
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    """the largest number that a job may request"""
    cpus_per_gpu: int | None = None
    """the limit per GPU; None: a job may use all CPUs of a node"""
    memory: str | None = None
    """requested per node, in sbatch's format: 450G"""
    memory_per_gpu: str | None = None
    """the limit per GPU, in sbatch's format"""
    gpu_request: str = "gpus-per-node"
    """`gpus-per-node`, `gres` or `none`: the flag that requests GPUs"""
    partition: str | None = None
    """the default partition"""
    partitions: Mapping[str, str] = field(default_factory=dict)
    """name -> its purpose and limits"""
    account: str | None = None
    account_required: bool = False
    time_minutes: int | None = None
    """time limit of a job that does not set one"""
    launcher: str = "torchrun"
    restart_by: str = "requeue"
    """how a job is restarted: `requeue`, `submit` (submit the same file as a new job, if requeue is forbidden),
    `chain` (jobs submitted in advance, if compute nodes may not submit jobs either)"""
    nccl_network: str | None = None
    """the network that NCCL must report between nodes (`Using network …`); with any other, NCCL has fallen back to
    TCP"""
    netstack_source: str | None = None
    """where the network hooks of the Container Engine take their libraries from, unless an EDF says so: `host` or
    `artifact`"""
    allreduce_within: int | None = None
    """the minimum bus bandwidth, in GB/s, of an all-reduce over the GPUs of a node"""
    allreduce_across: int | None = None
    """the minimum bus bandwidth, in GB/s, of an all-reduce across nodes"""
    network_gbps: int | None = None
    """the speed of a node's network in Gbit/s, all its network cards together"""
    failure_hours: int | None = None
    """node-hours until a node fails; None: a published figure, and what earlier runs have measured"""
    confirm_gpu_hours: int | None = None
    """`launch` asks for confirmation if a run may use more GPU hours; None: never"""
    budget_gpu_hours_per_day: int | None = None
    """`launch` refuses a run if the runs of the last 24 hours may then use more GPU hours together; None: no limit"""
    budget_jobs_at_once: int | None = None
    """`launch` refuses a run if more runs would then wait or run; None: no limit"""
    sbatch: tuple[str, ...] = ()
    """flags for every sbatch"""
    srun: tuple[str, ...] = ()
    """flags for every srun"""
    refused: Mapping[str, str] = field(default_factory=dict)
    """flag that the site's Slurm refuses -> why, and what to use instead"""
    env: Mapping[str, str] = field(default_factory=dict)
    """variables for every container, unless the environment sets them, such as those that the network needs"""
    mounts: tuple[str, ...] = ()
    """mounts for every container, unless the environment mounts something at the same target"""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """annotations for every environment, unless it sets them; for the Container Engine's hooks"""
    modules: tuple[str, ...] = ()
    """modules to load on the host, before the step"""
    host_setup: tuple[str, ...] = ()
    """lines of bash on the host, after the modules and before the step"""
    inside: tuple[str, ...] = ()
    """prefixes of variable names: variables of host_setup with these prefixes override the image's in every task"""
    task_setup: tuple[str, ...] = ()
    """lines of sh that every task runs inside the container, before the job's task_prolog"""
    prolog: str | None = None
    """what the site's own prolog and epilog do on a node before and after a job"""
    versions: Mapping[str, str] = field(default_factory=dict)
    """program -> version on the site, with its date"""
    quirks: Mapping[str, str] = field(default_factory=dict)
    """keyword -> a sentence about a peculiarity of this site"""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """`key`, and `key.NAME` or `key.INDEX` for each item of a table or list"""

    @property
    def is_local(self) -> bool:
        """Whether there is no scheduler, and jobs run on this machine."""
        return self.scheduler == LOCAL

    def lacks_account(self, account: str | None, flags: Iterable[str]) -> bool:
        """Whether the site requires an account, and neither `account` nor a flag of sbatch names one."""
        named = account or any(
            word == "--account" or word.startswith(("--account=", "-A"))
            for word in (*self.sbatch, *flags)
        )
        return self.account_required and not named

    def images(self, environ: Mapping[str, str]) -> Path:
        """The folder of squashfs files: RUNNER_IMAGES or the site's. Raises RunnerError for an undefined variable."""
        text = environ.get("RUNNER_IMAGES") or expand(
            self.image_folder, environ, f"the image folder of {self.name}"
        )
        return Path(text).absolute()

    def runs(self, environ: Mapping[str, str], project: Project) -> Path:
        """The folder of runs: RUNNER_RUNS, or else the site's, or else the project's."""
        text = environ.get("RUNNER_RUNS") or (
            self.run_folder and expand(self.run_folder, environ, f"the run folder of {self.name}")
        )
        return Path(text).absolute() if text else project.runs


VALUES = tuple(
    item.name for item in fields(Site) if item.name not in {"name", "summary", "origins"}
)
"""the keys of a site file's [values]"""
