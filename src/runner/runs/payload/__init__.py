"""The files that a batch script needs at run time. Each launch copies them into the run folder.

The scripts need bash and coreutils on the host, and only `/bin/sh` inside the container. The preflight runs with the
container's Python, so its two files are among the jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from runner.project import shipped_folder

FOLDER = "payload"


_OF_RENDERED = (
    "after.sh",
    "inside.sh",
    "processes.sh",
    "save.sh",
    "step.sh",
    "task.sh",
    "usage.sh",
)


def files(*, own_script: bool = False) -> Mapping[str, str]:
    """Path relative to the run folder -> text, for all files that job.sbatch, or a user's own batch script, needs."""
    here = Path(__file__).resolve().parent
    unused = _OF_RENDERED if own_script else ("batch.sh",)
    found = [
        path
        for path in here.iterdir()
        if path.suffix in (".sh", ".awk") and path.name not in unused
    ]
    found += () if own_script else (shipped_folder() / "jobs/training").glob("preflight*.py")
    by_name = {path.name: path.read_text(encoding="utf-8") for path in found}
    return {f"{FOLDER}/{name}": by_name[name] for name in sorted(by_name)}
