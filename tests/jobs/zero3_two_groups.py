"""A ZeRO-3 training of two parameter groups, saved, converted and loaded; prints what came of it as JSON.

Started by test_zero3_faults.py in a process of its own: python zero3_two_groups.py FOLDER PORT
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "jobs"))
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
os.environ["MASTER_PORT"] = sys.argv[2]

import torch

import deepspeed
from training import deepspeed as deepspeed_config
from training import universal, zero3_faults
from training.job import end_process
from training.processes import Processes
from training.resume import Checkpoint


def engine(load_universal: bool = False) -> deepspeed.DeepSpeedEngine:
    """Weights are decayed, biases are not, as transformers' Trainer has it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    parameters = list(model.parameters())
    weights, biases = ([each for each in parameters if each.ndim == dimensions] for dimensions in (2, 1))
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": load_universal},
    }
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=0.05), config=config)[0]


def train(started: deepspeed.DeepSpeedEngine, first: int, last: int) -> list[float]:
    """Return the losses of some steps; each step's data follows from its number."""
    losses = []
    for step in range(first, last + 1):
        data = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = (started(data) - 1).square().mean()
        started.backward(loss)
        started.step()
        losses.append(float(loss))
    return losses


def resumed(folder: Path, expected: list[float]) -> dict[str, object]:
    """Load the universal checkpoint, look at the optimizer, go on."""
    started = engine(load_universal=True)
    started.load_checkpoint(str(folder))
    optimizer = started.optimizer.optimizer
    steps = [id(state["step"]) for state in optimizer.state.values() if "step" in state]
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    found = train(started, 4, 9)
    difference = max(abs(one - other) for one, other in zip(found, expected, strict=True))
    return {"states": len(steps), "steps": len(set(steps)), "decays": decays, "difference": difference}


def main(folder: Path) -> None:
    deepspeed_config.skip_unbuilt_shm_comm()
    started = engine()
    train(started, 1, 3)
    started.save_checkpoint(str(folder))
    expected = train(started, 4, 9)
    if not zero3_faults.is_supported():
        print(json.dumps({"version": deepspeed.__version__, "supported": False}))
        return
    universal.convert(Checkpoint(folder, 3, 1), Processes(0, 0, 1, 1, "alone"))
    stock = resumed(folder, expected)
    zero3_faults.work_around()
    corrected = resumed(folder, expected)
    print(json.dumps({"version": deepspeed.__version__, "supported": True, "stock": stock, "corrected": corrected}))


main(Path(sys.argv[1]))
end_process(0)
