"""A plain PyTorch training loop: `torchrun plain_loop.py STEPS SAVE_EVERY SECONDS_PER_STEP`."""

import os
import sys
import time

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from trainer import CHECKPOINTS, RANK, after, note


def main() -> None:
    steps, every, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    newest, partial = CHECKPOINTS / "newest.pt", CHECKPOINTS / "newest.partial"
    CHECKPOINTS.mkdir(exist_ok=True)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    step, state = 0, ""
    if newest.exists():
        saved = torch.load(newest)
        step, state = saved["step"], saved["state"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    note("begins", step)
    while step < steps:
        time.sleep(seconds)
        inputs = torch.randn(4, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step, state = step + 1, after(state, step + 1)
        if RANK != 0:
            continue
        note("step", step)
        print(f"step {step}/{steps} loss {loss.item():.4f}", flush=True)
        if step % every == 0 or step == steps:
            content = {"step": step, "state": state, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(content, partial)
            partial.replace(newest)
            note("saved", step)
    torch.distributed.barrier()
    if RANK == 0:
        note("finished", state)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may end a process with SIGABRT while Python is torn down (pytorch/pytorch#190489)


if __name__ == "__main__":
    main()
