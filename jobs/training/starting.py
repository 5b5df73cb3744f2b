"""What every script does first: folders, caches and threads are settled before anything slow is imported."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from training import errors, imports, processes, transformers_names
from training import run as run_folder
from training.processes import Processes
from training.run import RunFolder


@contextlib.contextmanager
def training(script: str, unused: Iterable[str] = ()) -> Iterator[tuple[RunFolder, Processes]]:
    """Give the run and who this process is; `unused` packages are not there for libraries. Report what is raised."""
    with errors.reported(script):
        peers = processes.from_environment(os.environ)
        run = run_folder.from_environment(os.environ, script)
        run_folder.make(run)
        run_folder.point_caches(run, os.environ)
        threads = processes.set_threads(os.environ, peers)
        # From here on the slow imports: they read what has been set above.
        transformers_names.remember(run.cache)
        imports.prepare(unused)
        if peers.first:
            told = f"{peers.world_size} processes by {peers.launcher}, {threads} threads each, run {run.path}"
            print(f"{script}: {told}", flush=True)
        yield run, peers
        processes.leave_group()


def alone(script: str) -> bool:
    """Settle caches and threads of a script that is one process; a second one of the same launch is told False."""
    run = run_folder.from_environment(os.environ, script)
    run_folder.point_caches(run, os.environ)
    if int(os.environ.get("RANK", "0")) > 0:
        return False
    processes.set_threads(os.environ, Processes(0, 0, 1, 1, "alone"))
    transformers_names.remember(run.cache)
    return True
