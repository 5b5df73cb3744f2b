"""Run one of Megatron-LM's training programs as it is, so that it resumes, saves in time and restarts.

    runner launch megatron-gpt --env ngc-megatron --nodes 4 -- --size 18.4B --data-path /data/oscar_text_document ...

`megatron_pretrain.py [--benchmark] PROGRAM ARGS`: PROGRAM is relative to MEGATRON_HOME (default: /opt/megatron, as in
the image ngc-megatron). Each rank runs this script. Nothing of Megatron is changed.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import runpy
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

CONTINUE = 75  # not a failure: start again
WARM_UP = 10  # iterations that the benchmark leaves out: compilation, autotuning and the allocator make them slow
RUN = Path(os.environ.get("RUNNER_RUN") or ".").absolute()
ATTEMPT = Path(os.environ.get("RUNNER_ATTEMPT") or RUN / "attempts" / "1")
FLAG = Path(os.environ.get("RUNNER_SAVE_AND_EXIT") or ATTEMPT / "save-and-exit")
FIGURES = (
    "benchmark: {ms_per_iteration:.1f} ms per iteration, {tokens_per_second:,.0f} tokens/s, "
    "{tflops_per_gpu:.1f} TFLOP/s per GPU (median of {iterations} iterations after {warm_up})"
)
TRACKER = "latest_checkpointed_iteration.txt"


def main(argv: Sequence[str]) -> int:
    """Run the program. Return 0 when it is done, or CONTINUE when it has saved because the batch script asked."""
    benchmark, words = argv[:1] == ["--benchmark"], [word for word in argv if word != "--benchmark"]
    home = Path(os.environ.get("MEGATRON_HOME") or "/opt/megatron")
    program = home / words[0]
    if not program.is_file():
        print(
            f"megatron_pretrain.py: there is no {program}\n"
            "  because: the name is wrong, or this image has no Megatron-LM, or an unknown version\n"
            "  try:     --env ngc-megatron, or MEGATRON_HOME=FOLDER",
            file=sys.stderr,
        )
        return 1
    sys.argv = [str(program), *arguments(words[1:])]
    sys.path[:1] = [str(program.parent), str(home)]
    signal.signal(signal.SIGUSR2, lambda *_: leave())  # until Megatron handles it
    report = Report(sys.stdout, number(words, "--seq-length"))
    if benchmark:
        sys.stdout = report
    code: Any = 0
    try:
        runpy.run_path(str(program), run_name="__main__")
    except SystemExit as end:
        code = end.code
    if code in (0, None) and FLAG.exists():
        leave()
    if benchmark:
        show(report)
    return code if isinstance(code, int) else int(code is not None)


def arguments(words: Sequence[str]) -> list[str]:
    """Return the words; after a restart, they resume from the run's own checkpoints."""
    found = list(words)
    has_cache = any(word.partition("=")[0] == "--data-cache-path" for word in found)
    if not has_cache and os.environ.get("RUNNER_CACHE"):
        found += ["--data-cache-path", os.environ["RUNNER_CACHE"] + "/megatron"]
    saved = value(found, "--save")
    if saved and (Path(saved) / TRACKER).is_file():
        if ATTEMPT.name != "1":
            found = without_start(found)
        found += ["--load", saved]
    return found


def without_start(words: Sequence[str]) -> list[str]:
    """Return the words without those that only start from a checkpoint, say of another run, instead of resuming."""
    not_saved = {word.replace("save", "load") for word in words if word.startswith("--no-save-")}
    dropped = {"--ckpt-step", "--finetune", *({"--no-load-optim", "--no-load-rng"} - not_saved)}
    return [
        word
        for before, word in itertools.pairwise(["", *words])
        if before != "--ckpt-step" and word.partition("=")[0] not in dropped
    ]


def leave() -> None:
    """Ask for another attempt, and exit. torchrun turns every exit code of a worker into 1, so the file is needed."""
    saved = value(sys.argv, "--save")
    try:
        step = int((Path(saved or ".") / TRACKER).read_text())
    except (OSError, ValueError):
        step = 0
    partial = ATTEMPT / f".continue.{os.environ.get('RANK', '0')}.partial"
    partial.write_text(json.dumps({"step": step}))
    partial.replace(ATTEMPT / "continue")
    sys.exit(CONTINUE)


class Report:
    """A standard output that also notes the iterations. Megatron prints them in the last rank."""

    LINE = re.compile(
        r"iteration +(\d+)/ *\d+ \|.*elapsed time per iteration \(ms\): ([\d.]+) \|"
        r"(?:.*throughput per GPU \(TFLOP/s/GPU\): ([\d.]+) \|)?.*global batch size: +(\d+) \|"
    )

    def __init__(self, output: TextIO, tokens: int) -> None:
        self.output, self.tokens = output, tokens
        self.iterations: list[tuple[float, float, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.output, name)

    def write(self, text: str) -> int:
        for found in self.LINE.finditer(text):
            self.iterations.append((float(found[2]), float(found[3] or 0), int(found[4])))
        return self.output.write(text)

    def summary(self) -> dict[str, float]:
        """Return the figures after the warm-up: medians, because one slow iteration must not count."""
        rest = self.iterations[WARM_UP:] or self.iterations[-1:]
        milliseconds, teraflops = (statistics.median(each[part] for each in rest) for part in (0, 1))
        return {
            "iterations": len(rest), "warm_up": len(self.iterations) - len(rest), "ms_per_iteration": milliseconds,
            "tokens_per_second": rest[-1][2] * self.tokens / (milliseconds / 1000), "tflops_per_gpu": teraflops,
        }  # fmt: skip


def show(report: Report) -> None:
    """Print the benchmark's figures in rank 0, whose output is in the run's log, and write RUN/benchmark.json."""
    path = ATTEMPT / "benchmark.json"
    if report.iterations:
        path.with_suffix(".partial").write_text(json.dumps(report.summary()) + "\n")
        path.with_suffix(".partial").replace(path)
    for _ in range(30 if os.environ.get("RANK", "0") == "0" else 0):
        if path.is_file():
            found = json.loads(path.read_text())
            print(FIGURES.format(**found), flush=True)
            return
        time.sleep(1)


def value(words: Sequence[str], flag: str) -> str | None:
    """Return the last value of a flag, written as `FLAG VALUE` or `FLAG=VALUE`."""
    found = None
    for word, following in itertools.zip_longest(words, words[1:]):
        if word.startswith(f"{flag}="):
            found = word.partition("=")[2]
        elif word == flag and following is not None:
            found = following
    return found


def number(words: Sequence[str], flag: str) -> int:
    return int(value(words, flag) or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
