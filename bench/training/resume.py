"""How exactly a training goes on: the losses after a resume beside those of the same run, uninterrupted.

    python -m bench.training.resume                                  all: about 15 minutes on two cores
    python -m bench.training.resume --kinds zero2 --precisions fp32 --moves 2-1

With the same number of processes every loss has to be bitwise the same; with another number the sums are taken in
another order, and the difference stays below 1e-5 in fp32 and 2e-4 in bf16 over the steps after the resume. Beside it
stands how far two runs that nothing interrupted, of the one number and of the other, are apart over as many steps.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.figures import table
from tests.jobs.attempts import SMALL, Start, losses

SAVED_AT = 8
# 2048 tokens a step: with few of them bf16 alone moves a loss by 1e-3
SIZES = ("--max_length=256", "--global_batch_size=8")
STEPS = 20
KINDS = ["none", "zero0", "zero1", "zero2", "zero3"]
MOVES = [(2, 2), (1, 2), (2, 1), (2, 4)]
ALLOWED = {"fp32": 1e-5, "bf16": 2e-4}
PRECISION = {"fp32": ("--bf16=false",), "bf16": ("--bf16=true",)}
LORA = ("--use_peft", "--lora_r=4", "--lora_alpha=8", "--lora_dropout=0.1", "--lora_target_modules=all-linear")


@dataclass(frozen=True)
class Case:
    """A run saved by `before` processes at step 8 and resumed by `after` processes."""

    kind: str  # zero0 ... zero3, none
    precision: str
    before: int
    after: int
    lora: bool = False  # with dropout: its random numbers have to go on too

    @property
    def allowed(self) -> float:
        return 0.0 if self.before == self.after else ALLOWED[self.precision]

    @property
    def name(self) -> str:
        return f"{self.kind.replace('zero', 'ZeRO-')}{', LoRA with dropout' if self.lora else ''}"


def cases(kinds: list[str], precisions: list[str], moves: list[tuple[int, int]]) -> Iterator[Case]:
    for precision in precisions:
        for kind in kinds:
            yield from (Case(kind, precision, before, after) for before, after in moves)
    if (2, 2) in moves:
        yield from (Case(kind, "fp32", 2, 2, lora=True) for kind in kinds if kind == "zero2")


class Bench:
    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.last = folder, SAVED_AT + steps

    def arguments(self, case: Case) -> tuple[str, ...]:
        saves = (f"--max_steps={self.last}", f"--save_steps={SAVED_AT}", f"--deepspeed={case.kind}")
        return (*SMALL, *SIZES, *saves, *PRECISION[case.precision], *(LORA if case.lora else ()))

    def uninterrupted(self, case: Case) -> Path:
        """Return the run of one start by the processes that saved; made once for all cases that begin with it."""
        run = self.uninterrupted_folder(case)
        if not run.exists():
            Start(run, self.arguments(case), case.before, self.folder / "cache").finish()
        return run

    def uninterrupted_folder(self, case: Case) -> Path:
        return self.folder / f"{case.kind}-{case.precision}-{case.before}{'-lora' if case.lora else ''}"

    def difference(self, case: Case) -> float:
        """Return the greatest difference of a loss over the steps after the resume."""
        whole = self.uninterrupted(case)
        run = self.folder / "resumed"
        shutil.rmtree(run, ignore_errors=True)
        saved = f"checkpoint-{SAVED_AT}"
        shutil.copytree(whole / "checkpoints" / saved, run / "checkpoints" / saved)
        start = Start(run, self.arguments(case), case.after, self.folder / "cache", attempt=2)
        start.finish()
        if f"/{saved} (step {SAVED_AT})" not in start.output:
            raise RuntimeError(f"it did not resume:\n{start.output}")
        expected, found = losses(whole), losses(run)
        steps = range(SAVED_AT + 1, self.last + 1)
        if sorted(found) != list(steps):
            raise RuntimeError(f"steps {sorted(found)} were taken, not {list(steps)}")
        return max(abs(expected[step] - found[step]) for step in steps)

    def inherent(self, case: Case) -> float | None:
        """Return how far apart runs of the one number of processes and of the other are, where both have been made."""
        other = self.uninterrupted_folder(replace(case, before=case.after))
        if case.before == case.after or not other.exists():
            return None
        one, two = losses(self.uninterrupted(case)), losses(other)
        return max(abs(one[step] - two[step]) for step in range(1, self.last - SAVED_AT + 1))


def measured(folder: Path, steps: int, wanted: Sequence[Case]) -> list[tuple[str, ...]]:
    """Return one row per case; each is printed on stderr as soon as it is there."""
    bench, rows = Bench(folder, steps), []
    for case in wanted:
        try:
            difference = bench.difference(case)
            good, text = difference <= case.allowed, "0 (bitwise)" if difference == 0 else f"{difference:.1e}"
        except RuntimeError as error:
            good, text = False, "failed"
            print(error, file=sys.stderr)
        allowed = "0" if case.allowed == 0 else f"{case.allowed:.0e}"
        apart, move = bench.inherent(case), f"{case.before} -> {case.after}"
        noise = "-" if apart is None else f"{apart:.1e}"
        rows.append((case.name, case.precision, move, text, allowed, "yes" if good else "NO", noise))
        print(*rows[-1], flush=True, file=sys.stderr)
    return rows


def measure(folder: Path, quick: bool) -> dict[str, Any]:
    """Return what `render` prints; all cases, or few of them. For `nox -s bench -- train`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kinds, precisions, moves = (["zero2"], ["fp32"], [(2, 1)]) if quick else (KINDS, list(PRECISION), MOVES)
    steps = 4 if quick else STEPS
    return {"steps": steps, "rows": measured(folder, steps, list(cases(kinds, precisions, moves)))}


def render(found: dict[str, Any]) -> list[str]:
    """Return the table in Markdown."""
    heads = ("state", "precision", "processes", "difference", "allowed", "holds", "never interrupted")
    about = f"greatest difference of a loss over the {found['steps']} steps after the resume, saved at step {SAVED_AT}"
    return [about, "", *table(heads, found["rows"])]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="resume", allow_abbrev=False, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISION), default=list(PRECISION))
    parser.add_argument("--moves", nargs="+", default=[f"{before}-{after}" for before, after in MOVES])
    parser.add_argument("--steps", type=int, default=STEPS, help="steps after the resume")
    parser.add_argument("--folder", type=Path, help="kept; default: a temporary one")
    arguments = parser.parse_args(argv)
    moves = [(int(word.split("-")[0]), int(word.split("-")[1])) for word in arguments.moves]
    wanted = list(cases(arguments.kinds, arguments.precisions, moves))
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="bench-resume-"))
    try:
        rows = measured(folder, arguments.steps, wanted)
    finally:
        if not arguments.folder:
            shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(render({"steps": arguments.steps, "rows": rows})), flush=True)
    return 1 if any("NO" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
