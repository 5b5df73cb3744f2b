"""The importer's readers on damaged input, for as long as told: taken or refused, in time, in bounded memory.

`python -m bench.fuzz --minutes 30 [--kinds tar,gzip] [--seed N] [--log FILE]`, from the repository's root.
A case that hangs, takes more than 5 s or 300 MiB, or raises anything but a RunnerError is kept in a file and ends it.
"""

from __future__ import annotations

import argparse
import faulthandler
import pickle
import random
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from tests.images.oci import json_mutations, mutations

LONGEST_SECONDS = 5.0
MEMORY_MIB = 300
_EVERY_SECONDS = 60.0

KINDS: dict[str, tuple[Callable[[random.Random], Any], Callable[[Any], bool]]] = {
    **{kind: (case, mutations.taken) for kind, case in mutations.CASES.items()},
    # index.json, nested indexes, manifests and configs
    "layout": (json_mutations.layout_case, json_mutations.layout_taken),
    "archive": (json_mutations.archive_case, json_mutations.archive_taken),
}


def main(argv: list[str] | None = None) -> int:
    """0 where every case was taken or refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="which readers, in turn")
    parser.add_argument("--seed", type=int, default=None, help="to repeat a run; default: a fresh one")
    parser.add_argument("--log", type=Path, default=None, help="a file that the counts are appended to as well")
    given = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    log = given.log.open("a") if given.log else None
    _say(log, f"seed {seed}, {given.minutes} minutes, {given.kinds}")
    return run(given.kinds.split(","), seed, given.minutes * 60, log)


def run(kinds: list[str], seed: int, seconds: float, log: TextIO | None) -> int:
    """Run cases of each kind in turn until the time is over."""
    begun = said = time.monotonic()
    counts: Counter[str] = Counter()
    slowest, number = 0.0, 0
    while time.monotonic() - begun < seconds:
        number += 1
        for kind in kinds:
            make, take = KINDS[kind]
            case = make(random.Random(f"{seed}-{number}"))
            before = time.process_time()  # not the clock's: neighbours take time too, and a hang ends at ten times that
            faulthandler.dump_traceback_later(10 * LONGEST_SECONDS, exit=True)
            try:
                counts[f"{kind} {'taken' if take(case) else 'refused'}"] += 1
            except Exception:
                return _keep(kind, f"{seed}-{number}", case, traceback.format_exc(), log)
            faulthandler.cancel_dump_traceback_later()
            took = time.process_time() - before
            slowest = max(slowest, took)
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            if took > LONGEST_SECONDS or memory > MEMORY_MIB:
                return _keep(kind, f"{seed}-{number}", case, f"{took:.1f} s, {memory} MiB at most so far", log)
        if time.monotonic() - said > _EVERY_SECONDS:
            said = time.monotonic()
            _report(begun, counts, slowest, log)
    _report(begun, counts, slowest, log)
    return 0


def _report(begun: float, counts: Counter[str], slowest: float, log: TextIO | None) -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    told = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    _say(log, f"{time.monotonic() - begun:.0f} s: {told}; slowest {slowest:.2f} s, at most {memory} MiB")


def _keep(kind: str, name: str, case: Any, why: str, log: TextIO | None) -> int:
    path = Path(f"fuzz-{kind}-{name}.pickle").resolve()
    path.write_bytes(pickle.dumps(case))
    _say(log, f"FAILED: {kind} {name}, kept in {path}\n{why}")
    return 1


def _say(log: TextIO | None, text: str) -> None:
    print(text, flush=True)
    if log:
        print(text, file=log, flush=True)


if __name__ == "__main__":
    sys.exit(main())
