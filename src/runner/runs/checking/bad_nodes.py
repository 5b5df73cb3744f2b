"""Nodes that an earlier run has found unfit: left out at the launch, for a day, on the cluster where they were found.

payload/nodes.sh writes the list: `<cache>/bad-nodes/CLUSTER`, lines of NODE, Unix seconds, reason.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path

from runner.errors import RunnerError
from runner.machine import process
from runner.machine.report import Report

FOLDER = "bad-nodes"
_SECONDS = 86_400
_ANSWER_SECONDS = 10.0


def flags(runs: Path, environ: Mapping[str, str], report: Report) -> tuple[str, ...]:
    """The flag of sbatch that leaves them out; none where there are none, or where Slurm does not say who it is."""
    folder = Path(environ.get("RUNNER_CACHE") or runs / ".cache") / FOLDER
    listed = {path.name: found for path in _files(folder) if (found := read(path, time.time()))}
    if not listed:
        return ()
    try:
        shown = process.run(("scontrol", "show", "config"), check=False, timeout_seconds=_ANSWER_SECONDS).stdout
        cluster = re.search(r"^ClusterName\s*=\s*(\S+)", shown, re.MULTILINE)
        bad = listed.get(cluster[1], {}) if cluster else {}
        # a name that the cluster no longer has would make sbatch refuse the job
        argv = ("sinfo", "--noheader", "--Node", "--format=%N")
        known = set(process.run(argv, check=False, timeout_seconds=_ANSWER_SECONDS).stdout.split()) if bad else set()
    except RunnerError:
        return ()
    bad = {name: reason for name, reason in bad.items() if name in known}
    for name, reason in bad.items():
        report.say(f"not on {name}: {reason} (within the last day; {folder})")
    return (f"--exclude={','.join(bad)}",) if bad else ()


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def read(path: Path, now: float) -> dict[str, str]:
    """Node -> why it is not to be used, from the lines of a list that are not too old."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in lines:
        name, _, rest = line.partition(" ")
        seconds, _, reason = rest.partition(" ")
        if name and seconds.isdigit() and now - int(seconds) < _SECONDS:
            found[name] = reason
    return found
