"""JSON lines to .bin and .idx: jobs/megatron_data.py beside the two tools of Megatron-LM, one after the other.

    python -m bench.megatron_data --input text.jsonl --tokenizer FOLDER --megatron-lm FOLDER [--rounds 3]

FOLDER of the tokenizer has vocab.json, merges.txt and the files that AutoTokenizer reads; FOLDER of Megatron-LM is a
checkout. Run it with a Python that has megatron-core, transformers, gigatoken and orjson. Each round takes all tools in
turn, so that what else the machine does hits all of them. Memory is the largest sum over all processes of the tool, of
pages that they share only once. All outputs are compared byte by byte.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.figures import machine, table

ROOT = Path(__file__).resolve().parents[1]
WORKERS = "2"


@dataclass(frozen=True)
class Figure:
    """One run of one tool."""

    tool: str
    wall_seconds: float
    cpu_seconds: float
    memory_mib: float


def main(argv: Sequence[str]) -> int:
    """Measure, print the table, and return 0 if all files are equal."""
    parser = argparse.ArgumentParser(prog="bench.megatron_data", description=(__doc__ or "").split("\n")[0])
    for flag in ("--input", "--tokenizer", "--megatron-lm"):
        parser.add_argument(flag, type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--tools", default="ours,fast,ordinary", help="some of ours,fast,ordinary; the first is compared"
    )
    parser.add_argument("--work", type=Path, help="folder for the output, on the disk to measure")
    options = parser.parse_args(argv)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        for number in range(options.rounds):
            for tool in options.tools.split(","):
                prefix = Path(work) / str(number) / tool / "x"
                prefix.parent.mkdir(parents=True)
                figures.append(measured(tool, command(tool, options, prefix), options.megatron_lm))
                print(json.dumps(asdict(figures[-1])), flush=True)
        made = [sorted(Path(work).glob(f"*/*/*{end}")) for end in (".bin", ".idx")]
        equal = all(filecmp.cmp(paths[0], path, shallow=False) for paths in made for path in paths)
        host = machine(Path(work))
    print(f"\n{options.input.stat().st_size / 1e6:,.0f} MB, {host['processor']}, {host['cores']} cores; "
          f"the files are {'equal' if equal else 'DIFFERENT'}\n")  # fmt: skip
    print("\n".join(rendered(figures)))
    return 0 if equal else 1


def command(tool: str, options: argparse.Namespace, prefix: Path) -> tuple[str, ...]:
    common = (f"--input={options.input.absolute()}", f"--output-prefix={prefix}", "--append-eod")
    if tool == "ours":
        files = (f"--vocab-file={options.tokenizer / 'vocab.json'}", f"--merge-file={options.tokenizer / 'merges.txt'}")
        script = str(ROOT / "jobs" / "megatron_data.py")
        return (sys.executable, script, *common, "--tokenizer-type=GPT2BPETokenizer", *files, f"--workers={WORKERS}")
    kind = ("--tokenizer-type=HuggingFaceTokenizer", f"--tokenizer-model={options.tokenizer.absolute()}")
    if tool == "fast":
        return (sys.executable, "tools/preprocess_data_fast.py", *common, *kind, "--use-gigatoken")
    interval = "--log-interval=100000"
    return (sys.executable, "tools/preprocess_data.py", *common, *kind, f"--workers={WORKERS}", interval)


def measured(tool: str, words: Sequence[str], folder: Path) -> Figure:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(folder.absolute()) if tool != "ours" else ""}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    process = subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peaks = [0]
    watcher = threading.Thread(target=watch, args=(process.pid, peaks), daemon=True)
    watcher.start()
    _, errors = process.communicate()
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{tool}: {errors.decode()[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Figure(tool, round(wall, 1), round(cpu, 1), round(max(peaks) / 1024))


def watch(root: int, peaks: list[int]) -> None:
    """Append the kilobytes of the process and all its descendants until it ends."""
    while total := sum(kilobytes(pid) for pid in tree(root)):
        peaks.append(total)
        time.sleep(0.2)


def tree(pid: int) -> list[int]:
    try:
        children = [
            int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()
        ]
    except OSError:
        return [pid]
    return [pid, *(below for child in children for below in tree(child))]


def kilobytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")), 0)


def rendered(figures: Sequence[Figure]) -> list[str]:
    tools = list(dict.fromkeys(figure.tool for figure in figures))
    of = {tool: [figure for figure in figures if figure.tool == tool] for tool in tools}
    wall = {tool: statistics.median(figure.wall_seconds for figure in of[tool]) for tool in tools}
    cpu = {tool: statistics.median(figure.cpu_seconds for figure in of[tool]) for tool in tools}
    rows = [
        (tool, ", ".join(f"{each.wall_seconds:.1f}" for each in of[tool]), f"{wall[tool] / wall[tools[0]]:.1f}",
         ", ".join(f"{each.cpu_seconds:.1f}" for each in of[tool]), f"{cpu[tool] / cpu[tools[0]]:.1f}",
         f"{max(each.memory_mib for each in of[tool]):.0f}")
        for tool in tools
    ]  # fmt: skip
    return table(("tool", "seconds", "ratio of medians", "CPU seconds", "ratio of medians", "peak memory, MiB"), rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
