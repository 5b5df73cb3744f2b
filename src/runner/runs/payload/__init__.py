"""The files that a batch script needs at run time. Each launch copies them into the run folder.

The scripts need bash and coreutils on the host, and only `/bin/sh` inside the container. preflight.py and
preflight_worker.py run with the container's Python. They are not modules of this package: nothing here imports runner.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

FOLDER = "payload"


_OF_TASKS = ("after.sh", "inside.sh", "preflight.py", "preflight_worker.py", "processes.sh", "task.sh", "usage.sh")


def files(*, batch: bool = False) -> Mapping[str, str]:
    """Path relative to the run folder -> text, for all files that job.sbatch, or a user's own `batch` script, needs."""
    here = Path(__file__).resolve().parent
    unused = ("__init__.py", *(_OF_TASKS if batch else ("batch.sh",)))
    found = (
        path for path in sorted(here.iterdir()) if path.suffix in (".sh", ".awk", ".py") and path.name not in unused
    )
    return {f"{FOLDER}/{path.name}": path.read_text(encoding="utf-8") for path in found}
