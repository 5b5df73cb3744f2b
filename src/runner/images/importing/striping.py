"""Lustre: spread a file that many nodes read at once over many servers, and keep its beginning on one."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from runner.machine import process

# one server for the first 4 MiB, four up to 64 MiB, then all, as CSCS advises for image folders
LAYOUT = "-E 4M -c 1 -E 64M -c 4 -E -1 -c -1 -S 4M"


def stripe(unfinished: Path, layout: str) -> Iterator[str]:
    """Make the empty file with that layout (`lfs setstripe`) if its folder is on Lustre; yields lines for the user."""
    if not process.which("lfs"):
        return
    if process.run(("lfs", "getstripe", "-d", str(unfinished.parent)), check=False).exit_code != 0:
        return  # not on Lustre
    done = process.run(("lfs", "setstripe", *shlex.split(layout), str(unfinished)), check=False)
    if done.exit_code == 0:
        yield f"Lustre: the file is striped with {layout}"
        return
    words = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    yield f"Lustre: the file is not striped ({words}); for images: lfs setstripe {layout} FOLDER"
