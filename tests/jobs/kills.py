"""A training whose processes are killed, again and again: each start has to go on from a checkpoint that is whole.

    python -m tests.jobs.kills              20 kills, every other one while a checkpoint is written: 8 minutes
    python -m tests.jobs.kills --kills 2

kill -9 hits one rank at a random moment. Before each start every checkpoint is read here, by code of its own, and the
newest whole one has to be that from which the job says that it resumes. In the end the losses of all steps, those of
steps taken twice too, have to be bitwise those of a run that nothing interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from tests.figures import table
from tests.jobs.attempts import SMALL, Ranks, Start, entries, losses

STEPS = 150
TRAIN = (*SMALL, "--save_steps=3", "--save_total_limit=2", "--deepspeed=zero2")
RESUMING = re.compile(r"^resuming from (\S+) \(step (\d+)\)$", re.MULTILINE)
START_SECONDS = 240.0


@dataclass(frozen=True)
class Kill:
    """What one kill hit."""

    when: str
    step: int  # the last one in the metrics
    partial: bool  # files were being written
    unmarked: bool  # files were written, but not yet safe
    resumed_from: int  # by this start; 0: it began anew


def newest_whole(folder: Path) -> int:
    """Return the step of the newest checkpoint all of whose bytes are what its marker says; 0 for none."""
    found = [0]
    for path in folder.glob("checkpoint-*"):
        try:
            marker = json.loads((path / "complete.json").read_text())
            files = {name: (path / name).read_bytes() for name in marker["files"]}
        except (OSError, ValueError):
            continue
        sizes = {name: len(content) for name, content in files.items()}
        hashes = {name: xxhash.xxh3_128_hexdigest(content) for name, content in files.items()}
        if (sizes, hashes) == (marker["files"], marker["hashes"]):
            found.append(marker["step"])
    return max(found)


class Killer:
    """Starts a training in `run` and kills one rank of it."""

    def __init__(self, run: Path, cache: Path, arguments: tuple[str, ...], seed: int) -> None:
        self.run, self.cache, self.arguments = run, cache, arguments
        self.chance = random.Random(seed)
        self.checkpoints = run / "checkpoints"

    def kill(self, attempt: int, while_saving: bool) -> Kill:
        whole = newest_whole(self.checkpoints)
        start = Start(self.run, self.arguments, 2, self.cache, attempt)
        ranks = start.begin()
        try:
            self._await_step(attempt, whole + self.chance.randint(1, 6), ranks)
            if while_saving:
                self._await(self._partial, ranks)
            time.sleep(self.chance.uniform(0, 0.12 if while_saving else 0.5))
            state = (self._partial(), self._unmarked())
            os.kill(self.chance.choice(ranks.pids), signal.SIGKILL)
            codes = ranks.wait(600)
        except BaseException:
            ranks.kill()
            raise
        if not any(codes):
            raise RuntimeError("it ended well, though a rank was killed")
        last = max([entry["step"] for entry in entries(self.run)], default=0)
        when = "while saving" if while_saving else "at a step"
        return Kill(when, last, *state, resumed_from=resumed_from(start, whole))

    def finish(self, attempt: int) -> int:
        """Run to the end; return the step from which it went on."""
        whole = newest_whole(self.checkpoints)
        start = Start(self.run, self.arguments, 2, self.cache, attempt)
        start.finish()
        return resumed_from(start, whole)

    def _await_step(self, attempt: int, step: int, ranks: Ranks) -> None:
        self._await(lambda: any(at["step"] >= step and at["attempt"] == attempt for at in entries(self.run)), ranks)

    def _await(self, condition: Callable[[], bool], ranks: Ranks) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            if ranks.ended() or time.monotonic() > deadline:
                raise RuntimeError("it ended, or came to nothing, before the kill")
            time.sleep(0.001)

    def _partial(self) -> bool:
        return any(self.checkpoints.glob(".checkpoint-*.partial"))

    def _unmarked(self) -> bool:
        return any(not (path / "complete.json").exists() for path in self.checkpoints.glob("checkpoint-*"))


def resumed_from(start: Start, whole: int) -> int:
    """Return the step from which a start says that it goes on. Raises RuntimeError where that is not `whole`."""
    said = RESUMING.search(start.output)
    step = int(said[2]) if said else 0
    if step != whole:
        raise RuntimeError(f"the newest whole checkpoint was {whole}, it resumed from {step}:\n{start.output}")
    return step


def measure(folder: Path, quick: bool, kills: int = 20, seed: int = 0, steps: int = STEPS) -> dict[str, Any]:
    """Kill, resume, compare; return what `render` prints. Raises RuntimeError where a start went wrong."""
    shutil.rmtree(folder, ignore_errors=True)
    cache, whole = folder / "cache", folder / "whole"
    arguments = (*TRAIN, f"--max_steps={steps}")
    Start(whole, arguments, 2, cache).finish()
    killer = Killer(folder / "killed", cache, arguments, seed)
    done = []
    for number in range(2 if quick else kills):
        done.append(asdict(killer.kill(number + 1, while_saving=number % 2 == 1)))
        print(f"kill {number + 1}: {done[-1]}", file=sys.stderr, flush=True)
    last = killer.finish(len(done) + 1)
    expected, taken = losses(whole), entries(killer.run)
    return {
        "kills": done,
        "last": last,
        "steps": steps,
        "taken": len(taken),
        "differ": sorted({entry["step"] for entry in taken if entry["loss"] != expected[entry["step"]]}),
        "missing": sorted(expected.keys() - losses(killer.run).keys()),
    }


def render(found: dict[str, Any]) -> list[str]:
    """Return the table in Markdown, and what came of it all."""
    rows = []
    for number, kill in enumerate(found["kills"], 1):
        newest = "being written" if kill["partial"] else "not yet safe" if kill["unmarked"] else "whole"
        went_on = str(kill["resumed_from"]) if kill["resumed_from"] else "the beginning"
        rows.append((str(number), kill["when"], str(kill["step"]), newest, went_on))
    hit = sum(kill["partial"] or kill["unmarked"] for kill in found["kills"])
    return [
        *table(("kill", "when", "last step", "newest checkpoint", "this start went on from"), rows),
        "",
        f"{len(rows)} kills, {hit} of them on an unfinished checkpoint; each start went on from the newest whole one,"
        f" the last from step {found['last']}, and that ended well",
        f"steps taken {found['taken']} for {found['steps']}; losses that differ: {found['differ'] or 'none'};"
        f" missing: {found['missing'] or 'none'}",
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="kills", allow_abbrev=False, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="bench-kills-") as folder:
        found = measure(Path(folder) / "kills", quick=False, kills=arguments.kills, seed=arguments.seed)
    print("\n".join(render(found)))
    return 1 if found["differ"] or found["missing"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
