"""Saves, resumes and prints as Megatron-LM does, without its model: `like_megatron.py --train-iters N --save DIR …`.

Each rank writes its own part of a checkpoint; rank 0 names the newest complete one in a tracker file.
"""

import argparse
import json
import os
import time
from pathlib import Path

from trainer import RANK, Others, after, note, write

TRACKER = "latest_checkpointed_iteration.txt"
LINE = (
    " [2026-11-23 13:12:04.123456] iteration {step:8}/{steps:8} | consumed samples: {samples:12} | elapsed time per "
    "iteration (ms): {milliseconds:.1f} | learning rate: 1.000000E-03 | global batch size: {batch:5} | "
    "lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 1.000 | number of skipped iterations:   0 | "
    "number of nan iterations:   0 |"
)


def part(folder: Path, step: int) -> Path:
    """What this rank saves."""
    return folder / f"iter_{step:07}" / f"mp_rank_{RANK:02}" / "model_optim_rng.pt"


def load(folder: Path) -> tuple[int, str]:
    """Step and state of the checkpoint that the tracker names."""
    if not (folder / TRACKER).exists():
        return 0, ""
    step = int((folder / TRACKER).read_text())
    state: str = json.loads(part(folder, step).read_text())["state"]
    return step, state


def save(folder: Path, step: int, state: str, others: Others) -> None:
    path = part(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps({"iteration": step, "state": state}))
    others.agree(b"-")
    if RANK == 0:
        write(folder / f"{TRACKER}.partial", str(step))
        (folder / f"{TRACKER}.partial").replace(folder / TRACKER)
        note("saved", step)
        print(f"  successfully saved checkpoint from iteration {step:7} to {folder}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-iters", type=int, required=True)
    parser.add_argument("--save-interval", type=int, required=True)
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--load", type=Path, required=True)
    parser.add_argument("--seconds-per-step", type=float, required=True)
    options = parser.parse_args()
    others = Others()
    step, state = load(options.load)
    note("begins", step)
    while step < options.train_iters:
        time.sleep(options.seconds_per_step)
        others.agree(b"-")
        step, state = step + 1, after(state, step + 1)
        if RANK == 0:
            note("step", step)
            steps, milliseconds = options.train_iters, options.seconds_per_step * 1000
            numbers = {"samples": 4 * step, "batch": 4, "loss": 10 / step}
            print(LINE.format(step=step, steps=steps, milliseconds=milliseconds, **numbers), flush=True)
        if step % options.save_interval == 0 or step == options.train_iters:
            save(options.save, step, state, others)
    others.agree(b"-")
    if RANK == 0:
        note("finished", state)
    os._exit(0)


if __name__ == "__main__":
    main()
