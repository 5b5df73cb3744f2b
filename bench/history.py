"""How long `runner history` takes of many runs: folders as a launch leaves them, made from one real launch.

`python bench/history.py [RUNS]` (10,000 unless said): five calls, JSON of all and of those that failed.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KEPT = ("run.json", "lock.toml", "environment.toml", "attempts/1/exit_code")


def runner(runs: Path, *words: str) -> str:
    """What the command prints; ends the bench where it fails."""
    environment = {**os.environ, "RUNNER_RUNS": str(runs), "RUNNER_SITE": "local"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    argv = (sys.executable, "-m", "runner", *words)
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=runs.parent).stdout


def processor_seconds() -> float:
    """Of all commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def copies(runs: Path, name: str, count: int) -> None:
    """Folders like that of the run `name`, each third one with another exit code."""
    stem = name.rpartition("-")[0]
    texts = {file: (runs / name / file).read_text() for file in KEPT}
    for number in range(2, count + 1):
        folder = runs / f"{stem}-{number:04}"
        (folder / "attempts/1").mkdir(parents=True)
        for file, text in texts.items():
            (folder / file).write_text(text.replace(name, folder.name))
        if number % 3 == 0:
            (folder / "attempts/1/exit_code").write_text("1\n")


def main() -> None:
    """Make the folders, then ask five times each."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "plain.toml").write_text("")
        runs = Path(place) / "runs"
        words = ("launch", "--engine", "host", "--env", "./plain.toml", "--wait", "--", "true")
        copies(runs, runner(runs, *words).strip(), count)
        for more, expected in (((), count), (("--state", "failed"), count // 3)):
            taken, worked = [], []
            for _ in range(5):
                start, before = time.perf_counter(), processor_seconds()
                found = json.loads(runner(runs, "history", "--json", *more))
                taken.append(time.perf_counter() - start)
                worked.append(processor_seconds() - before)
                assert len(found) == expected, (len(found), expected)
            wall, work = (f"{min(each):.2f} to {max(each):.2f}" for each in (taken, worked))
            print(f"history of {count:,} runs {' '.join(more)}: {wall} s, {work} processor seconds")


if __name__ == "__main__":
    main()
