"""Lustre: a file that many nodes read at once lies on many servers; its beginning, and small files, on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from runner.machine import process

# one server for the first 4 MiB, four up to 64 MiB, then all, as CSCS advises for image folders
LAYOUT = ("-E", "4M", "-c", "1", "-E", "64M", "-c", "4", "-E", "-1", "-c", "-1", "-S", "4M")


def stripe(unfinished: Path) -> Iterator[str]:
    """Make the empty file with that layout where its folder lies on Lustre; yields what is to be said."""
    if not process.which("lfs"):
        return
    if process.run(("lfs", "getstripe", "-d", str(unfinished.parent)), check=False).exit_code != 0:
        return  # not on Lustre
    done = process.run(("lfs", "setstripe", *LAYOUT, str(unfinished)), check=False)
    if done.exit_code == 0:
        yield "Lustre: the file is striped over all servers beyond 64 MiB"
        return
    words = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    yield f"Lustre: the file is not striped ({words}); for images: lfs setstripe {' '.join(LAYOUT)} FOLDER"
