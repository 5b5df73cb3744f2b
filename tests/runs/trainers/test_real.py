"""Real trainers, on the CPU, through the whole batch script: what they print and what they save is understood."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.runs import trainer
from runner.runs.job import Job, Resources
from tests.runs.scripts import BARE, run_locally, write_run
from tests.runs.trainers import tiny
from tests.runs.trainers.test_checkpoints import NO_PROJECT, newest
from tests.runs.trainers.test_progress import QUICK, entries

pytestmark = pytest.mark.training
pytest.importorskip("torch")

LIGHTNING = """
import sys, time, torch, pytorch_lightning as lightning
from pytorch_lightning.callbacks import ModelCheckpoint, TQDMProgressBar

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, number):
        loss = (self.layer(batch[0]) - batch[1]).square().mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

inputs = torch.randn(80, 8)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
saver = ModelCheckpoint(dirpath=sys.argv[1], every_n_train_steps=7, save_top_k=-1)
trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", logger=False, callbacks=[saver, TQDMProgressBar()])
trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=8))
"""

# After a training that succeeded, gloo's threads may end a rank of TRL's script with SIGABRT while Python is torn down
# ("terminate called without an active exception", pytorch/pytorch#190489). Ranks end without that, as our own jobs do.
AT_EXIT = """
import atexit, os, sys

def end():
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_initialized() and not hasattr(sys, "last_type"):
        distributed.destroy_process_group()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)

atexit.register(end)
"""


@pytest.fixture(scope="module")
def model_and_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.build(folder)
    return folder


def train(folder: Path, script: str, launcher: str, processes: int, *words: str) -> Path:
    """The run folder of a script that has ended with exit code 0."""
    arguments = tuple(word.replace("{run}", str(folder)) for word in words)
    job = Job("train", BARE, script="jobs/train.py", arguments=arguments, launcher=launcher,
              resources=Resources(tasks_per_node=processes))  # fmt: skip
    run = write_run(folder, job, code={"jobs/train.py": script})
    (run / trainer.FILE).write_text(trainer.render(None, NO_PROJECT, words))
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text(AT_EXIT)
    python = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
              "PYTHONPATH": str(folder / "site")}  # fmt: skip
    with (run / "job.log").open("wb") as log:
        done = run_locally(run, extra_environ={**python, **QUICK, "HF_HUB_OFFLINE": "1"}, capture_output=False,
                           stdout=log, stderr=subprocess.STDOUT, timeout=600)  # fmt: skip
    assert done.returncode == 0, (run / "job.log").read_text()
    return run


@pytest.mark.parametrize(("launcher", "processes"), [("torchrun", 2), ("accelerate", 2)])
def test_sft_of_trl(tmp_path: Path, model_and_data: Path, launcher: str, processes: int) -> None:
    """TRL's own script, with an evaluation, whose progress bar must not count."""
    trl = pytest.importorskip("trl")
    run = train(
        tmp_path, (Path(trl.__file__).parent / "scripts/sft.py").read_text(), launcher, processes,
        f"--model_name_or_path={model_and_data}/model", f"--dataset_name={model_and_data}/data", "--max_steps=12",
        "--logging_steps=4", "--save_steps=5", "--eval_strategy=steps", "--eval_steps=8", "--max_length=64",
        "--per_device_train_batch_size=2", "--output_dir={run}/out", "--report_to=none", "--use_cpu", "--bf16=false",
        "--gradient_checkpointing=false",
        "--gradient_accumulation_steps=8",  # for torchrun, see below
    )  # fmt: skip
    found = [entry for entry in entries(run) if entry["loss"] is not None]
    assert {entry["total_steps"] for entry in found} == {12}
    assert 4 < found[-1]["loss"] < 7 and found[-1]["learning_rate"] < 1e-5
    # torchrun looks for new lines of stdout and of stderr every 0.1 s: losses and progress bar come in any order.
    # A loss has its own step if it is read before the next one is printed, 4 steps (over 0.4 s) later.
    assert [entry["step"] for entry in found] == [4, 8, 12]
    ratios = {entry["step"] / entry["epoch"] for entry in found}
    assert max(ratios) < 1.01 * min(ratios), "each loss has the step at which it was printed"
    assert newest([run]) == ["12"] and (run / "out/checkpoint-12").is_dir()


def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    run = train(tmp_path, LIGHTNING, "none", 1, "{run}/checkpoints")
    found = entries(run)
    assert found[-1]["step"] == 30 and found[0]["step"] <= 10 and found[-1]["epoch"] == 2
    losses = [entry["loss"] for entry in found if entry["loss"] is not None]  # the others only show progress
    assert losses and min(losses) > 0
    assert newest([run]) == ["28"]
