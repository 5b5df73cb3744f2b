"""A training with PyTorch Lightning on two nodes: `torchrun with_lightning.py STEPS SAVE_EVERY SECONDS_PER_STEP`."""

import os
import sys
import time

import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import TQDMProgressBar
from trainer import CHECKPOINTS, RANK, RANKS, after, note

STEPS, SAVE_EVERY, SECONDS = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
NEWEST = CHECKPOINTS / "newest.ckpt"


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        time.sleep(SECONDS)
        loss = (self.layer(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Notes(lightning.Callback):
    """Records the steps, and saves a checkpoint after each epoch: after SAVE_EVERY steps.

    In an epoch that a checkpoint has interrupted, Lightning's progress bar does not show the number of the epoch.
    """

    def __init__(self) -> None:
        self.state = ""

    def state_dict(self) -> dict[str, str]:
        return {"state": self.state}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        self.state = state_dict["state"]

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        note("begins", trainer.global_step)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, outputs: object, batch: object, number: int
    ) -> None:
        self.state = after(self.state, trainer.global_step)
        if RANK == 0:
            note("step", trainer.global_step)

    def on_train_epoch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        trainer.save_checkpoint(NEWEST.with_suffix(".partial"))
        if RANK == 0:
            NEWEST.with_suffix(".partial").replace(NEWEST)
            note("saved", trainer.global_step)


def main() -> None:
    CHECKPOINTS.mkdir(exist_ok=True)
    notes = Notes()
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", strategy="ddp", devices=1, num_nodes=RANKS, logger=False,
        enable_checkpointing=False, callbacks=[notes, TQDMProgressBar()], default_root_dir=CHECKPOINTS,
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(torch.randn(4 * SAVE_EVERY * RANKS, 8))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    trainer.fit(Model(), loader, ckpt_path=str(NEWEST) if NEWEST.exists() else None)
    if RANK == 0:
        note("finished", notes.state)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may end a process with SIGABRT while Python is torn down (pytorch/pytorch#190489)


if __name__ == "__main__":
    main()
