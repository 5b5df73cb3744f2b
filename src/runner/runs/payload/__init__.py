"""What a batch script needs at run time: plain files that are copied into the run folder.

bash and coreutils on the host, `/bin/sh` alone inside the container; its Python too where a preflight is wanted, which
is why two files here are cargo, and no modules of runner. Nothing here imports runner.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

FOLDER = "payload"


def files() -> Mapping[str, str]:
    """Path relative to the run folder -> text, for every file of the payload."""
    here = Path(__file__).resolve().parent
    found = (path for path in sorted(here.iterdir()) if path.suffix in (".sh", ".py") and path.name != "__init__.py")
    return {f"{FOLDER}/{path.name}": path.read_text(encoding="utf-8") for path in found}
