"""Run folders of a job without containers, as a launch would write them: what the tests of the batch script start."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.environments.environment import Attachment, Environment
from runner.runs import payload
from runner.runs.job import Job, Layer, Resources, command_line
from runner.runs.schedulers.scheduler import scheduler_of
from runner.site import Site

NOTHING = Attachment()
BARE = Environment("bare", None, "")
LOCAL = Site("local", "this machine", "local", "host", "/images")
SLURM = Site("generic-slurm", "any Slurm", "slurm", "host", "/images")

# what the corpus of the specification names, for arguments and values alike
CORPUS = (
    "",
    "'",
    '"',
    "$HOME",
    "$(id)",
    "`id`",
    "line\nbreak",
    "\n",
    "trailing\n",
    "#",
    "# comment",
    "%j",
    ":",
    "\\:",
    "\\\\:",
    "\\",
    "a\\",
    "-",
    "--nodes=7",
    "-x",
    "😀 é",
    "x" * 100_000,
    "${HOME}",
    "$${HOME}",
    "a\r\nb",
    "\t",
    "*",
    "~",
    "!",
    "a b",
    ";id",
    "&& id",
    "> /dev/null",
    "\x1b[31m",
    "\x7f",
    "\u2028",
    "{a,b}",
    "END",
)


def script(job: Job, attachment: Attachment = NOTHING, site: Site = LOCAL) -> str:
    return scheduler_of(site.scheduler).script(job, attachment, site)


def write_run(
    folder: Path,
    job: Job,
    attachment: Attachment = NOTHING,
    site: Site = LOCAL,
    code: Mapping[str, str] | None = None,
) -> Path:
    """A run folder of the job; `code` is the snapshot, path -> text."""
    files = {**payload.files(), **attachment.files, "job.sbatch": script(job, attachment, site)}
    files |= {f"code/{name}": text for name, text in (code or {}).items()}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    (folder / "code").mkdir(exist_ok=True)
    return folder


def run_locally(folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """`cd RUN && bash job.sbatch`, without anything of a Slurm around it."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RUNNER_"))}
    settings: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "timeout": 180, **options}
    extra: Mapping[str, str] = settings.pop("extra_environ", {})
    words: Sequence[str] = settings.pop("argv", ())
    try:
        return subprocess.run(("bash", "job.sbatch", *words), cwd=folder, env={**environ, **extra}, **settings)
    except subprocess.TimeoutExpired as error:
        log = (folder / "job.log").read_text(errors="replace") if (folder / "job.log").exists() else ""
        raise AssertionError(f"{error}\n{error.stdout}\n{error.stderr}\n{log}") from None


def command_job(*words: str, launcher: str = "none", tasks: int = 1, nodes: int = 1, **fields: Any) -> Job:
    """A job that runs a command."""
    resources = Resources(nodes=nodes, tasks_per_node=tasks)
    return Job("test", BARE, command=words, launcher=launcher, resources=resources, **fields)


def shell_job(text: str, *arguments: str, **fields: Any) -> Job:
    """A job that runs `sh -c TEXT` with arguments."""
    return command_job("sh", "-c", text, "sh", *arguments, **fields)


def given(**settings: Any) -> Layer:
    """What a command line says."""
    return command_line(settings)


def overrides(command: Sequence[str] = ("true",), **fields: Any) -> Layer:
    return given(command=tuple(command), **fields)
