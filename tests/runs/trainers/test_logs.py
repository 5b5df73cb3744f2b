"""What the patterns find in the log of each trainer, and that they find nothing in the logs of other programs.

Logs in logs/ are made from the trainers' own format strings; src/runner/runs/trainers/*.toml names version and file.
lightning.log, trl.log, trl-torchrun.log, llama-factory*.log,
torchtitan-0.3.log and axolotl-0.19.log are recorded from real runs.
"""

import json
import os
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from runner.project import Project
from runner.runs import payload, trainer

HERE = Path(__file__).parent
NO_PROJECT = Project(None, Path("/none"), Path("/none"))
AWKS = [each for each in (("mawk",), ("gawk",), ("busybox", "awk"), ("original-awk",)) if shutil.which(each[0])]
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


def read(
    log: bytes, awk: tuple[str, ...], patterns: str, folder: Path, written: float = 2.0, state: bytes | None = None
) -> tuple[str, list[Values]]:
    """The trainer whose lines were found, and the entries.

    `state`: of the call before; FOLDER/state gets the new one.
    """
    (folder / "trainer.awk").write_text(payload.files()["payload/trainer.awk"])
    (folder / "trainers").write_text(patterns)
    text = log.translate(bytes.maketrans(b"\r\0\1", b"\n\n "))
    done = subprocess.run(
        (*awk, "-v", "now=2", "-v", "before=1", "-v", "attempt=1", "-v", "world=4",
         "-v", f"last={int(state is None)}", "-f", folder / "trainer.awk", folder / "trainers", "-"),
        input=(state or b"") + b"\1f 0 %.3f job.log\n" % written + text + b"\1e\n", capture_output=True, check=True,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
    )  # fmt: skip
    assert done.stderr == b""
    lines = done.stdout.decode().splitlines()
    (folder / "state").write_text("".join(f"\1{line}\n" for line in lines if line.startswith("s ")))
    names = [line.removeprefix("trainer ") for line in lines if line.startswith("trainer ")]
    return (names or [""])[-1], [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("awk", AWKS, ids=lambda awk: awk[0])
@pytest.mark.parametrize(("written", "last"), [(1.5, 1.5), (0.5, 2.0), (9.0, 2.0)])
def test_the_last_step_was_taken_when_the_log_was_written(
    tmp_path: Path, awk: tuple[str, ...], written: float, last: float
) -> None:
    """Not when it was read, one second after the reading before; but the file server's clock may be wrong."""
    patterns = trainer.render(None, Project(None, tmp_path, tmp_path))
    _, found = read(b"step 1 loss 2\nstep 2 loss 2\n", awk, patterns, tmp_path, written)
    assert [entry["time"] for entry in found] == [1 + (last - 1) / 2, last]


@pytest.mark.parametrize("awk", AWKS, ids=lambda awk: awk[0])
@pytest.mark.parametrize("log", EXPECTED)
def test_the_steps_of_each_trainer(tmp_path: Path, log: str, awk: tuple[str, ...]) -> None:
    """Whether the trainer is named or not."""
    name, count, first, last = EXPECTED[log]
    text = (HERE / f"logs/{log}.log").read_bytes()
    for chosen in (None, name):
        found, entries = read(text, awk, trainer.render(chosen, NO_PROJECT), tmp_path)
        assert (found, len(entries)) == (name, count), entries
        assert first.items() <= entries[0].items()
        assert last.items() <= entries[-1].items()
        assert all(one["step"] <= two["step"] for one, two in pairwise(entries))
        assert all(entry["attempt"] == 1 and 1 <= entry["time"] <= 2 for entry in entries)


@pytest.mark.parametrize("awk", AWKS, ids=lambda awk: awk[0])
@pytest.mark.parametrize("late", range(-1, 3))
def test_a_loss_has_its_step_whichever_of_stdout_and_stderr_torchrun_reads_first(
    tmp_path: Path, late: int, awk: tuple[str, ...]
) -> None:
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
    _, entries = read(merged, awk, trainer.render(None, NO_PROJECT), tmp_path)
    found = [(entry["step"], entry["loss"], entry["epoch"]) for entry in entries]
    losses = (5.551, 5.541, 5.523, 5.566, 5.531, 5.535)
    assert found == [(2 * n, loss, n / 8) for n, loss in enumerate(losses, 1)]


def test_every_trainer_has_a_log() -> None:
    shipped = {path.stem for path in Path(trainer.__file__).with_name("trainers").glob("*.toml")}
    assert shipped - {name for name, *_ in EXPECTED.values()} == {"generic", "bars"}


def test_no_step_in_the_logs_of_other_programs(tmp_path: Path) -> None:
    assert len(OTHERS) > 100 and len(list((HERE / "others").iterdir())) >= 30
    patterns = trainer.render(None, NO_PROJECT)
    for path in OTHERS:
        assert read(path.read_bytes(), AWKS[0], patterns, tmp_path) == ("", []), path


@pytest.mark.parametrize(
    ("line", "step", "total", "loss"),
    [
        ("step 3/10 loss 2.5", 3, 10, 2.5),
        ("Step: 3, Loss: 2.5", 3, None, 2.5),
        ("[INFO] iteration 3 of 10 | train_loss=2.5e-1", 3, 10, 0.25),
        ("global_step=3 total loss = nan", 3, None, float("nan")),
        ('{"step": 3, "lr": 0.1, "loss": 2.5}', 3, None, 2.5),
        ("iter: 1,250 / 20,000 loss: -0.5", 1250, 20000, -0.5),
        ("0: step 3/10 loss 2.5", 3, 10, 2.5),  # srun --label
        ("[default0]:step 3/10 loss 2.5", 3, 10, 2.5),  # torchrun
        ("\x1b[32mstep 3/10\x1b[0m loss 2.5", 3, 10, 2.5),
        ("step 3/2 loss 2.5", None, None, None),
        ("step 3 of the recipe has no losses", None, None, None),
        ("footstep 3 loss 2", None, None, None),
        ("timestep 3: lossless compression 4", None, None, None),
        ("step 0.5 loss 2", None, None, None),
    ],
)
def test_generic_lines(tmp_path: Path, line: str, step: int | None, total: int | None, loss: object) -> None:
    for awk in AWKS:
        _, entries = read(line.encode() + b"\n", awk, trainer.render(None, NO_PROJECT), tmp_path)
        found = [(entry["step"], entry.get("total_steps"), entry["loss"]) for entry in entries]
        assert str(found) == str([(step, total, loss)] if step is not None else []), awk
