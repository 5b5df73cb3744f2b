"""The files that a batch script needs at run time. Each launch copies them into the run folder.

The scripts need bash and coreutils on the host, and only `/bin/sh` inside the container. preflight.py and
preflight_worker.py run with the container's Python. They are not modules of this package: nothing here imports runner.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

FOLDER = "payload"


def files() -> Mapping[str, str]:
    """Path relative to the run folder -> text, for every file of the payload."""
    here = Path(__file__).resolve().parent
    found = [path for path in sorted(here.iterdir()) if path.suffix in (".sh", ".awk", ".py")]
    return {f"{FOLDER}/{path.name}": path.read_text(encoding="utf-8") for path in found if path.name != "__init__.py"}
