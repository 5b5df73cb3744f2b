"""What the patterns find in the log of each trainer, and that they find nothing in the logs of other programs.

Logs in logs/ are made from the trainers' own format strings; src/runner/runs/trainers/*.toml names version and file.
lightning.log, trl.log, trl-torchrun.log, llama-factory*.log,
torchtitan-0.3.log and axolotl-0.19.log are recorded from real runs.
"""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from runner.project import Project
from runner.runs import trainer
from runner.runs.patterns import parse
from runner.runs.steps import Piece, Reader, State

HERE = Path(__file__).parent
NO_PROJECT = Project(None, Path("/none"), Path("/none"))
# logs of other tests that are in fact logs of a training
TRAININGS = {"ddp", "retry", "trainer", "wordings"}
OTHERS = sorted(
    path
    for folder in (HERE / "others", HERE.parent / "why/clean", HERE.parent / "why/recorded")
    for path in folder.glob("*.log")
    if path.stem not in TRAININGS
)

Values = dict[str, Any]
# log -> (trainer, number of entries, some of the values of the first and of the last entry)
EXPECTED: dict[str, tuple[str, int, Values, Values]] = {
    "automodel": (
        "automodel",
        3,
        {"step": 0, "loss": 2.3452, "grad_norm": 4.1875, "learning_rate": 1e-5, "tokens_per_second": 1843.9},
        {"step": 2, "loss": 1.7634, "epoch": 0},
    ),
    "axolotl": (
        "axolotl",
        3,
        {"step": 1, "total_steps": 20, "loss": 1.3121, "perplexity": 3.71394, "tokens_per_second": 4938},
        {"step": 3, "total_steps": 20, "loss": None},
    ),
    "axolotl-0.19": (  # include_tokens_per_second
        "axolotl",
        4,
        {"step": 2, "total_steps": 8, "loss": 5.572, "perplexity": 263, "tokens_per_second": 2176},
        {"step": 8, "total_steps": 8, "loss": 5.544, "tokens_per_second_per_process": 110.3},
    ),
    "deepspeed": (
        "deepspeed",
        2,
        {"step": 10, "loss": None, "learning_rate": 1e-4, "samples_per_second": 40.5},
        {"step": 20, "loss": None, "samples_per_second": 50.5},
    ),
    "ms-swift": (
        "ms-swift",
        3,
        {"step": 1, "total_steps": 94, "loss": 0.6931, "grad_norm": 24.1, "step_seconds": 91.743119},
        {"step": 13, "total_steps": 94, "loss": 0.42675275, "epoch": 0.28},
    ),
    "lightning": (
        "lightning",
        30,
        {"step": 1, "loss": 13.0, "epoch": 0},
        {"step": 30, "epoch": 2},
    ),
    "llama-factory": (
        "llama-factory",
        4,
        {"step": 5, "total_steps": 20, "loss": 5.545, "step_seconds": 0.074906367, "learning_rate": 9.045e-05},
        {"step": 20, "total_steps": 20, "loss": 5.458, "epoch": 0.6667},
    ),
    "llama-factory-board": (  # LLAMABOARD_ENABLED=1 and include_num_input_tokens_seen
        "llama-factory",
        4,
        {"step": 5, "total_steps": 20, "loss": 5.537, "tokens_per_second": 32810, "epoch": 5},
        {"step": 20, "loss": 5.457, "tokens_per_second": 20510},
    ),
    "megatron-bridge": (
        "megatron-bridge",
        2,
        {"step": 1, "total_steps": 100, "loss": 11.9, "step_seconds": 9.0001},
        {"step": 2, "loss": 11.7, "batch_size": 8},
    ),
    "megatron-lm": (
        "megatron-lm",
        3,
        {"step": 10, "total_steps": 500000, "loss": 10.87341, "learning_rate": 1.5e-6, "tokens_per_second": 31106.2},
        {"step": 30, "loss": 9.1, "grad_norm": 3.2, "step_seconds": 2.0502, "tflops_per_gpu": 135.4},
    ),
    "nanochat": (
        "nanochat",
        2,
        {"step": 0, "total_steps": 21400, "loss": 11.090355, "tokens_per_second": 104590},
        {"step": 1, "loss": 10.9, "step_seconds": 1.0101},
    ),
    "nanochat-sft": (
        "nanochat",
        2,
        {"step": 1, "loss": 1.5, "tokens_per_second": 500000},
        {"step": 2, "loss": 1.4},
    ),
    "nanogpt": (
        "nanogpt",
        3,
        {"step": 0, "loss": 4.2676},
        {"step": 250, "loss": 1.9871, "step_seconds": 4.1234},
    ),
    "nemo-2": (
        "megatron-bridge",
        2,
        {"step": 9, "total_steps": 99, "loss": 11.03, "batch_size": 512},
        {"step": 19, "loss": 9.871, "step_seconds": 5.1},
    ),
    "torchtitan": (
        "torchtitan",
        3,
        {"step": 1, "total_steps": 1000, "loss": 12.25432, "grad_norm": 4.2812, "tokens_per_second": 2048},
        {"step": 20, "loss": 8.51234, "tokens_per_second_per_process": 6401},
    ),
    "torchtitan-0.3": (
        "torchtitan",
        6,
        {"step": 1, "total_steps": 6, "loss": 8.04226, "grad_norm": 4.8875, "tokens_per_second_per_process": 114},
        {"step": 6, "loss": 2.06576},
    ),
    "trl": (
        "huggingface",
        6,
        {"step": 2, "total_steps": 12, "loss": 5.551, "epoch": 0.125},
        {"step": 12, "loss": 5.535, "epoch": 0.75},
    ),
    "trl-torchrun": (
        "huggingface",
        5,  # of 6: two steps ended between two looks of torchrun at the logs
        {"step": 2, "total_steps": 12, "loss": 5.551},
        {"step": 12, "loss": 5.535},
    ),
    "verl": (
        "verl",
        2,
        {"step": 1, "total_steps": 435, "loss": 0.0123, "learning_rate": 1e-6, "tokens_per_second": 20000},
        {"step": 2, "loss": -0.0042, "reward": 0.31, "step_seconds": 40},
    ),
    "verl-sft": (
        "verl",
        2,
        {"step": 1, "loss": 2.5, "grad_norm": 3.1},
        {"step": 2, "loss": 2.25},
    ),
}

# log -> the steps of the checkpoints that the trainer reported
SAVED = {"megatron-bridge": [2], "megatron-lm": [20], "nanochat": [1], "nanogpt": [250], "verl": [1], "verl-sft": [2]}


def read(log: bytes, patterns: str, part_bytes: int | None = None) -> tuple[str, list[Values]]:
    """The trainer whose lines were found, and the entries. The log is read at once, or in parts of so many bytes."""
    trainers, _ = parse(patterns)
    parts = [log] if part_bytes is None else in_parts(log, part_bytes)
    entries: list[Values] = []
    reader = Reader(trainers, processes=4)
    for number, part in enumerate(parts):
        if number:  # as another process that goes on
            reader = Reader(trainers, 4, State.from_record(json.loads(json.dumps(reader.state.record()))))
        begun, ended = 1 + number / len(parts), 1 + (number + 1) / len(parts)
        reader.read(Piece("job.log", part.decode("latin-1"), begun, ended))
        entries = [*([] if reader.discarded else entries), *reader.entries]
    return reader.reported, [*entries, *reader.newest(ended=True)]


def in_parts(log: bytes, size: int) -> list[bytes]:
    """Parts of at least so many bytes that end with a line."""
    lines = re.findall(rb"[^\r\n\0]*[\r\n\0]|[^\r\n\0]+$", log)
    parts = [b""]
    for line in lines:
        if len(parts[-1]) > size:
            parts.append(b"")
        parts[-1] += line
    return parts


def saved_steps(entries: list[Values]) -> list[int]:
    return [entry["saved_step"] for entry in entries if "saved_step" in entry]


@pytest.mark.parametrize("log", EXPECTED)
def test_the_steps_of_each_trainer(log: str) -> None:
    """Whether the trainer is named or not, and wherever the log is cut into parts."""
    name, count, first, last = EXPECTED[log]
    text = (HERE / f"logs/{log}.log").read_bytes()
    for chosen, part_bytes in ((None, None), (name, None), (None, 0), (None, 300)):
        found, entries = read(text, trainer.readable(trainer.render(chosen, NO_PROJECT)), part_bytes)
        assert saved_steps(entries) == SAVED.get(log, [])
        entries = [entry for entry in entries if "step" in entry]
        assert (found, len(entries)) == (name, count), entries
        assert first.items() <= entries[0].items()
        assert last.items() <= entries[-1].items()
        assert all(one["step"] <= two["step"] for one, two in pairwise(entries))
        assert all(1 <= entry["time"] <= 2 for entry in entries)


@pytest.mark.parametrize("late", range(-1, 3))
def test_a_loss_has_its_step_whichever_of_stdout_and_stderr_torchrun_reads_first(late: int) -> None:
    """It looks for new lines of each every 0.1 s: a loss comes some lines of the progress bar too early or too late.

    The losses of this log are only three such lines apart.
    """
    text = (HERE / "logs/trl.log").read_text().replace("{'", "\r{'")
    lines: list[tuple[float, str]] = []  # (place, line)
    bars = 0
    for line in (line for line in re.split("[\r\n]", text) if line):
        bars += not line.startswith("{")
        lines.append((bars + late + 0.5 if line.startswith("{") else bars, f"[default0]:{line}\n"))
    merged = "".join(line for _, line in sorted(lines, key=lambda each: each[0])).encode()
    _, entries = read(merged, trainer.readable(trainer.render(None, NO_PROJECT)))
    found = [(entry["step"], entry["loss"], entry["epoch"]) for entry in entries]
    losses = (5.551, 5.541, 5.523, 5.566, 5.531, 5.535)
    assert found == [(2 * n, loss, n / 8) for n, loss in enumerate(losses, 1)]


def test_every_trainer_has_a_log() -> None:
    shipped = {path.stem for path in Path(trainer.__file__).with_name("trainers").glob("*.toml")}
    assert shipped - {name for name, *_ in EXPECTED.values()} == {"generic", "bars"}


def test_no_step_in_the_logs_of_other_programs() -> None:
    assert len(OTHERS) > 100 and len(list((HERE / "others").iterdir())) >= 30
    patterns = trainer.readable(trainer.render(None, NO_PROJECT))
    for path in OTHERS:
        assert read(path.read_bytes(), patterns) == ("", []), path


@pytest.mark.parametrize(
    ("line", "step", "total", "loss"),
    [
        ("step 3/10 loss 2.5", 3, 10, 2.5),
        ("Step: 3, Loss: 2.5", 3, None, 2.5),
        ("[INFO] iteration 3 of 10 | train_loss=2.5e-1", 3, 10, 0.25),
        ("global_step=3 total loss = nan", 3, None, float("nan")),
        ('{"step": 3, "lr": 0.1, "loss": 2.5}', 3, None, 2.5),
        ("iter: 1,250 / 20,000 loss: -0.5", 1250, 20000, -0.5),
        ("INFO ot_train.py:641 step:12K smpl:48K ep:3 loss:2.806 grdn:14.2", 12000, None, 2.806),  # LeRobot
        ("step:1.2M loss:2.5", 1200000, None, 2.5),
        ("0: step 3/10 loss 2.5", 3, 10, 2.5),  # srun --label
        ("(worker1, rank=1, pid=4711, ip=10.0.0.2) step 3/10 loss 2.5", 3, 10, 2.5),  # SkyPilot
        ("[default0]:step 3/10 loss 2.5", 3, 10, 2.5),  # torchrun
        ("\x1b[32mstep 3/10\x1b[0m loss 2.5", 3, 10, 2.5),
        ("step 3/2 loss 2.5", None, None, None),
        ("step 3 of the recipe has no losses", None, None, None),
        ("footstep 3 loss 2", None, None, None),
        ("timestep 3: lossless compression 4", None, None, None),
        ("step 0.5 loss 2", None, None, None),
    ],
)
def test_generic_lines(line: str, step: int | None, total: int | None, loss: object) -> None:
    _, entries = read(line.encode() + b"\n", trainer.readable(trainer.render(None, NO_PROJECT)))
    found = [(entry["step"], entry.get("total_steps"), entry["loss"]) for entry in entries]
    assert str(found) == str([(step, total, loss)] if step is not None else [])
