"""Time to the first training step on 100 MB of text: jobs/clm.py beside the way of run_clm, cold and warm.

    python -m bench.training.first_step [--megabytes 100] [--rounds 3]

Same text, tokenizer, model, block size, batch and seed. Wall time runs from the start of the process to the first step
that is reported; CPU time is that of the process and of all it has started, at that moment. Cold: nothing is cached.
Warm: the same again. Each round takes both ways one after the other, so that what else the machine does hits both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LENGTH, MICRO, VOCABULARY = 256, 8, 8192
# the tiny Llama of the demo: 2.9 million parameters
MODEL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": 128,
    "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 1,
}  # fmt: skip
ARGUMENTS = (
    *(f"--per_device_train_batch_size={MICRO}", "--max_steps=1", "--logging_steps=1", "--save_strategy=no"),
    *("--report_to=none", "--use_cpu=true", "--seed=42", "--do_train=true"),
)
SECONDS = 600.0


@dataclass(frozen=True)
class Figure:
    """One start of one way."""

    way: str
    state: str  # cold or warm
    wall_seconds: float
    cpu_seconds: float
    loss: float


def main(argv: Sequence[str]) -> int:
    """Measure, print the table, and return 0."""
    parser = argparse.ArgumentParser(prog="first_step", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="first-step-") as folder:
        print("\n".join(render(measured(Path(folder), arguments.megabytes, arguments.rounds))))
    return 0


def measure(folder: Path, quick: bool) -> dict[str, Any]:
    """Return what `render` shows; `quick` has little text and one round."""
    return measured(folder, *((5, 1) if quick else (100, 3)))


def measured(folder: Path, megabytes: int, rounds: int) -> dict[str, Any]:
    """Return the figures of all starts."""
    text = write_text(folder / "text.jsonl", megabytes)
    model = write_model(folder / "model", text)
    figures: list[Figure] = []
    for number in range(rounds):
        for state in ("cold", "warm"):
            for way in (run_clm, ours):
                home = folder / f"{way.__name__}-{number}"
                figures.append(way(home, text, model, state))
                show(figures[-1])
        for way in (run_clm, ours):
            shutil.rmtree(folder / f"{way.__name__}-{number}")
    return {"megabytes": megabytes, "figures": [asdict(figure) for figure in figures]}


def show(figure: Figure) -> None:
    print(f"  {figure.way:8} {figure.state}: {figure.wall_seconds:6.1f} s wall, {figure.cpu_seconds:6.1f} s CPU,"
          f" loss {figure.loss:.4f}", flush=True)  # fmt: skip


def run_clm(home: Path, text: Path, model: Path, state: str) -> Figure:
    """What run_clm does: see run_clm.py."""
    words = (
        *(str(Path(__file__).with_name("run_clm.py")), f"--train_file={text}", f"--model_name_or_path={model}"),
        *(f"--block_size={LENGTH}", f"--output_dir={home / 'out'}", *ARGUMENTS),
    )
    return start("run_clm", state, words, home, {"HF_HOME": str(home / "hf")})


def ours(home: Path, text: Path, model: Path, state: str) -> Figure:
    """jobs/clm.py by hand, as one process."""
    words = (
        *(str(ROOT / "jobs" / "clm.py"), f"--train_file={text}", f"--config_name={model}", f"--tokenizer_name={model}"),
        *(f"--block_size={LENGTH}", f"--output_dir={home / 'out'}", "--resume_from_checkpoint=false", *ARGUMENTS),
    )
    return start("ours", state, words, home, {"RUNNER_RUN": str(home / "run"), "RUNNER_CACHE": str(home / "cache")})


def start(way: str, state: str, words: Sequence[str], home: Path, variables: Mapping[str, str]) -> Figure:
    """Start a process, and return what it had taken when its first step was reported."""
    home.mkdir(parents=True, exist_ok=True)
    metrics = home / "run" / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RUNNER_ATTEMPT")
    kept = {name: value for name, value in os.environ.items() if name not in outer and not name.startswith("SLURM")}
    environment = {**kept, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", **variables}
    log = home / f"{state}.log"
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen((sys.executable, *words), env=environment, stdout=output, stderr=subprocess.STDOUT)
        seen: tuple[float, float] | None = None
        while process.poll() is None:
            if seen is None and ("first step" in log.read_text() or reported(metrics)):
                seen = time.monotonic() - began, cpu_seconds(process.pid)
            if time.monotonic() - began > SECONDS:
                process.kill()
            time.sleep(0.02)
    if process.returncode or seen is None:
        raise SystemExit(f"{way} ({state}) ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    return Figure(way, state, *seen, first_loss(log, metrics))


def reported(metrics: Path) -> bool:
    return metrics.is_file() and '"loss"' in metrics.read_text()


def first_loss(log: Path, metrics: Path) -> float:
    if metrics.is_file():
        entries = (json.loads(line) for line in metrics.read_text().splitlines())
        return float(next(entry["loss"] for entry in entries if "loss" in entry))
    text = log.read_text()
    return float(text.split("'loss': ")[1].split(",")[0].strip("'\" "))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, of what it has waited for, and of what it has started and still runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(cpu_seconds(int(child)) for child in children)


def render(found: Mapping[str, Any]) -> list[str]:
    """The lines of a table with medians and ratios."""
    figures = [Figure(**figure) for figure in found["figures"]]
    lines = [
        f"Time to first step: {found['megabytes']} MB of text, {VOCABULARY} tokens known, {MICRO} x {LENGTH} a step.",
        "",
        "| cache | run_clm's way, wall | ours, wall | ratio | run_clm's way, CPU | ours, CPU | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for state in ("cold", "warm"):
        cells = []
        for name in ("wall_seconds", "cpu_seconds"):
            middle = [
                statistics.median(getattr(each, name) for each in figures if (each.way, each.state) == (way, state))
                for way in ("run_clm", "ours")
            ]
            cells += [f"{middle[0]:.1f} s", f"{middle[1]:.1f} s", f"**{middle[0] / middle[1]:.1f}**"]
        lines.append(f"| {state} | {' | '.join(cells)} |")
    return lines


def write_text(path: Path, megabytes: int) -> Path:
    """Write JSON lines of Python sources: those of the library and of installed packages, each once while they last."""
    left, number = megabytes * 1_000_000, 0
    with path.open("w", encoding="utf-8") as file:
        while left > 0:
            for text in sources(number):
                line = json.dumps({"text": text}, ensure_ascii=False) + "\n"
                file.write(line)
                left -= len(line.encode())
                if left <= 0:
                    break
            number += 1
    return path


def sources(seed: int) -> Iterator[str]:
    """Yield texts of 200 to 20,000 characters in random order."""
    folders = (sysconfig.get_path("stdlib"), sysconfig.get_path("platlib"))
    paths = sorted({path for folder in folders for path in Path(folder).rglob("*.py")})
    random.Random(seed).shuffle(paths)
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        for at in range(0, len(text), 20_000):
            if len(text) - at >= 200:
                yield text[at : at + 20_000]


def write_model(folder: Path, text: Path) -> Path:
    """Write a configuration, and a byte-level tokenizer trained on the first megabytes of the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|end|>", "<|pad|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    with text.open(encoding="utf-8") as lines:
        core.train_from_iterator((json.loads(line)["text"] for line in itertools.islice(lines, 1500)), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
