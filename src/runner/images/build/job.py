"""Build and import in one Slurm job, for sites where podman's storage is in the memory of a compute node.

Source: CSCS documentation, "Building container images on Alps": graphroot below /dev/shm, and import in the same
allocation.
"""

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.errors import RunnerError
from runner.machine import files, process, secrets
from runner.machine.report import Report
from runner.site import Site

_POLL_SECONDS = 2.0
_LATE_SECONDS = (
    20.0  # a shared file system may show the job's last files only after squeue reports its end
)
_DEFAULT_MINUTES = 60


@dataclass(frozen=True)
class BuildJob:
    """A build job; its files are in `folder`, which all nodes see."""

    name: str
    folder: Path
    project: Path
    words: tuple[str, ...]
    """the command that builds and imports, and prints the squashfs file's path"""
    storage: str
    """where podman stores its images on the node; the node expands variables such as `${USER}`"""
    images: Path


def goes_to_a_job(site: Site, environ: Mapping[str, str]) -> bool:
    """Whether images for this site are built in a job: the site sets podman's storage on a node, and this is not such a
    node."""
    return (
        not site.is_local and site.container_storage is not None and "SLURM_JOB_ID" not in environ
    )


def script(job: BuildJob) -> str:
    """The batch script, in plain bash. It depends only on `job`. Pure."""
    import jinja2

    path = Path(__file__).with_name("job.sbatch.j2")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    values = {
        name: shlex.quote(str(getattr(job, name))) for name in ("folder", "images", "project")
    }
    template = environment.from_string(path.read_text(encoding="utf-8"))
    return template.render(values, storage=job.storage, words=shlex.join(job.words))


def submission(job: BuildJob, site: Site, flags: Sequence[str]) -> tuple[str, ...]:
    """The sbatch command line. The user's flags come last and take precedence. The job gets the environment."""
    minutes = site.time_minutes or _DEFAULT_MINUTES
    asked: dict[str, object] = {"partition": site.partition, "account": site.account}
    asked |= {"cpus-per-task": site.cpus_per_node, "mem": site.memory}
    own = (f"--{name}={value}" for name, value in asked.items() if value)
    log = str(job.folder / "log").replace("%", "%%")
    fixed = (
        f"--job-name=build-{job.name}",
        "--nodes=1",
        "--ntasks=1",
        "--no-requeue",  # a preempted build has failed: its user no longer waits, so it must not run again
        f"--time={minutes}",
        f"--output={log}",
    )
    return (
        "sbatch",
        "--parsable",
        *fixed,
        *own,
        *site.sbatch,
        *flags,
        str(job.folder / "build.sbatch"),
    )


def check_account(site: Site, flags: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise RunnerError if the site requires an account and none is given."""
    if site.lacks_account(site.account or environ.get("SBATCH_ACCOUNT"), flags):
        raise RunnerError(
            f"site {site.name} requires an account for the build job",
            "no account is set",
            "--sbatch=--account=PROJECT",
        )


def run(job: BuildJob, site: Site, flags: Sequence[str], report: Report) -> Path:
    """Submit the job, show its log while it runs, and return the squashfs file's path.

    Ctrl-C cancels the job. Raises RunnerError if sbatch rejects the job or the job fails; its log is kept.
    """
    process.need(("sbatch", "squeue", "scancel"))
    text = script(job)
    secrets.refuse(text.encode(), "the build job's script")
    files.write(job.folder / "build.sbatch", text)
    done = process.run(submission(job, site, flags), check=False)
    if done.exit_code != 0:
        raise RunnerError(
            "sbatch rejected the build job",
            done.stderr.strip(),
            "change what sbatch rejects, for example: --sbatch=--partition=NAME",
        )
    job_id = done.stdout.strip().partition(";")[0]
    report.say(f"build job {job_id} on {site.name}; its log: {job.folder}/log")
    try:
        _follow(job, job_id, report)
    except BaseException:
        process.run(("scancel", job_id), check=False)
        raise
    return _result(job, job_id)


def _follow(job: BuildJob, job_id: str, report: Report) -> None:
    """Report the lines of the log until Slurm reports the job as ended, or no longer knows it."""
    shown, state = 0, ""
    while True:
        now = _state(job_id)
        if now == "PENDING" and now != state:
            report.say(f"build job {job_id} is waiting for a node")
        state = now
        shown = _say_new_lines(job.folder / "log", shown, report)
        if state == "" or (job.folder / "exit_code").exists():
            return
        time.sleep(_POLL_SECONDS)


def _state(job_id: str) -> str:
    """The job's state; empty if it has ended. A controller that does not answer is asked again."""
    asked = (
        *process.without("SQUEUE_"),
        "squeue",
        "--noheader",
        f"--jobs={job_id}",
        "--states=PENDING,RUNNING,COMPLETING,CONFIGURING,SUSPENDED",
    )
    done = process.run((*asked, "--format=%T"), check=False)
    if done.exit_code != 0:
        return "" if "Invalid job id" in done.stderr else "unknown"
    return done.stdout.strip()


def _say_new_lines(log: Path, shown: int, report: Report) -> int:
    if not log.exists():
        return shown
    with log.open("rb") as stream:
        stream.seek(shown)
        whole, _, _ = stream.read().rpartition(b"\n")
    for line in whole.decode(errors="replace").splitlines():
        report.say(f"  {line}")
    return shown + len(whole) + (1 if whole else 0)


def _result(job: BuildJob, job_id: str) -> Path:
    deadline = time.monotonic() + _LATE_SECONDS
    while not (job.folder / "exit_code").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    log = job.folder / "log"
    fix = f"read the log {log}"
    if not (job.folder / "exit_code").exists():
        raise RunnerError(
            f"build job {job_id} ended without a result",
            "Slurm ended it: it was cancelled, reached its time limit, used too much memory, or its node failed",
            f"sacct -j {job_id} -o State,Reason; if the job had started, {fix}",
        )
    code = (job.folder / "exit_code").read_text().strip()
    path = (job.folder / "path").read_text().strip() if (job.folder / "path").exists() else ""
    if code != "0" or not path:
        tail = log.read_text(errors="replace").strip().splitlines()[-12:] if log.exists() else []
        what = f"failed with exit code {code}" if code != "0" else "printed no path of an image"
        why = "\n".join(tail) or "its log is empty"
        raise RunnerError(f"build job {job_id} {what}", why, fix)
    return Path(path)
