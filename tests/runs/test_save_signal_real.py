"""Real transformers and Lightning save on their signal, in any phase, and resume from what they saved."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.runs.job import Job, Resources, Restart
from runner.runs.schedulers import slurm_commands as scheduler
from tests.conftest import need
from tests.lab import parts
from tests.lab.slurm import SlurmLab
from tests.runs.savers import PYTHON, asked, log_of, saver_run, started, time_is_over, wait_for_text
from tests.runs.scripts import BARE, SLURM, write_run
from tests.runs.test_restart import causes
from tests.waiting import until

pytestmark = pytest.mark.training
torch = pytest.importorskip("torch")

# Waits in the phase that PHASE names until the test creates the file `go`; only in the first attempt.
HOLD = r"""
import os, time
from pathlib import Path

run, here = Path(os.environ["RUNNER_RUN"]), int(os.environ["RUNNER_ATTEMPT"].rsplit("/", 1)[1])
phase = os.environ["PHASE"]

def hold(name):
    if name == phase and here == 1 and not (run / "go").exists():
        print(f"holds in {name}", flush=True)
        while not (run / "go").exists():
            time.sleep(0.02)
"""
HUGGING_FACE = (
    HOLD
    + r"""
hold("start")
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

class Data(torch.utils.data.Dataset):
    def __init__(self, name):
        self.name = name
    def __len__(self):
        return 8
    def __getitem__(self, number):
        hold(self.name)
        words = torch.arange(8) + number
        return {"input_ids": words, "labels": words}

class Model(LlamaForCausalLM):
    def save_pretrained(self, *words, **settings):
        hold("save")
        super().save_pretrained(*words, **settings)

class Steps(TrainerCallback):
    def on_train_begin(self, arguments, state, control, **others):
        print(f"from step {state.global_step}", flush=True)
    def on_step_begin(self, arguments, state, control, **others):
        hold("step")
        time.sleep(0.1)

folder = str(run / "checkpoints")
last = get_last_checkpoint(folder) if os.path.isdir(folder) else None
arguments = TrainingArguments(
    folder, max_steps=400 if here == 1 else int(last.rsplit("-", 1)[1]) + 2, per_device_train_batch_size=2,
    logging_steps=1, save_steps=3, eval_strategy="steps", eval_steps=4, use_cpu=True, report_to=[],
    dataloader_num_workers=int(os.environ.get("WORKERS", "0")), enable_jit_checkpoint=True)
model = Model(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                          num_attention_heads=2))
Trainer(model, arguments, train_dataset=Data("training"), eval_dataset=Data("evaluation"),
        callbacks=[Steps()]).train(resume_from_checkpoint=last)
"""
)
LIGHTNING = (
    HOLD
    + r"""
hold("start")
import torch, pytorch_lightning as lightning

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def on_fit_start(self):
        print("fits", flush=True)
    def on_train_start(self):
        print(f"from step {self.trainer.global_step}", flush=True)
    def training_step(self, batch, number):
        if number == 3:
            hold("step")
        time.sleep(0.1)
        return self.layer(batch[0]).square().mean()
    def validation_step(self, batch, number):
        hold("evaluation")
    def on_save_checkpoint(self, checkpoint):
        hold("save")
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(80, 8)), batch_size=8)
saver = lightning.callbacks.ModelCheckpoint(dirpath=run / "checkpoints", every_n_train_steps=7, save_top_k=-1)
trainer = lightning.Trainer(max_steps=2000 if here == 1 else -1, max_time="00:00:00:01" if here > 1 else None,
                            accelerator="cpu", logger=False, default_root_dir=run, num_sanity_val_steps=0,
                            val_check_interval=5, callbacks=[saver, lightning.callbacks.TQDMProgressBar()])
trainer.fit(Model(), data, data)
"""
)
PHASES = ("step", "evaluation", "save", "start")


def second(run: Path) -> str:
    return log_of(run).partition("attempt 2 on")[2]


@pytest.mark.parametrize("phase", PHASES)
def test_transformers(tmp_path: Path, phase: str) -> None:
    pytest.importorskip("transformers")
    env = {"PHASE": phase, "WORKERS": "1" if phase == "step" else "0", "HF_HUB_OFFLINE": "1"}
    launcher = "torchrun" if phase == "step" else "none"
    run = saver_run(tmp_path, HUGGING_FACE, save_signal=("TERM",), env=env, launcher=launcher)
    with started(run) as script:
        wait_for_text(run, f"holds in {phase}")
        time_is_over(script)
        if phase == "start":
            wait_for_text(run, "asking the program to save and exit")
        else:
            until(lambda: asked(run), "the signal")
        (run / "go").touch()
        assert script.wait(300) == 0, log_of(run)
    assert causes(run) == ["time_limit", "done"], log_of(run)
    steps = [int(path.name.rpartition("-")[2]) for path in run.glob("checkpoints/checkpoint-*")]
    resumed = int(re.findall(r"from step (\d+)", second(run))[0])
    assert resumed in steps and resumed == max(steps) - 2, log_of(run)


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    need(*parts.SLURM)
    with SlurmLab(nodes=1, plugins=()) as made:
        yield made


@pytest.mark.parametrize("phase", PHASES)
def test_lightning(lab: SlurmLab, tmp_path: Path, phase: str) -> None:
    """It saves, and requeues the job itself."""
    pytest.importorskip("pytorch_lightning")
    job = Job("train", BARE, script="train.py", launcher="srun", save_signal=("USR1",),
              env={**PYTHON, "PHASE": phase, "PATH": f"{PYTHON['PATH']}:{os.environ['PATH']}"},
              resources=Resources(time_minutes=60), restart=Restart(time_limit=1))  # fmt: skip
    run = write_run(tmp_path, job, site=SLURM, code={"train.py": LIGHTNING})
    job_id = scheduler.parse_submit(lab.run(scheduler.submit(run, ()), cwd=run).stdout)
    wait_for_text(run, f"holds in {phase}")
    lab.run(("scancel", "--batch", "--signal=USR2", job_id))
    if phase == "start":
        wait_for_text(run, "asking the program to save and exit")
    else:
        until(lambda: asked(run), "the signal")
    (run / "go").touch()
    until((run / "attempts/2/exit_code").exists, log_of(run), seconds=300)
    assert causes(run) == ["requeued", "done"], log_of(run)
    assert (run / "hpc_ckpt_1.ckpt").exists()
    resumed = int(re.findall(r"from step (\d+)", second(run))[0])
    saved = torch.load(run / "hpc_ckpt_1.ckpt", weights_only=False)["global_step"]
    assert resumed == saved and (saved > 0 or phase == "start"), log_of(run)
