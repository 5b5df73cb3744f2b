"""With parts of DeepSpeed, a folder of Hugging Face is complete by the rules of both, because both load it."""

import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.project import Project
from runner.runs import payload, trainer

NO_PROJECT = Project(None, Path("/none"), Path("/none"))


def text(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def saved(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 500)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints, as Trainer with DeepSpeed's ZeRO-2 writes them."""
    for name, content in payload.files().items():
        text(tmp_path / name, content)
    text(tmp_path / trainer.FILE, trainer.render(None, NO_PROJECT))
    for step in (300, 600):
        folder = tmp_path / f"checkpoints/checkpoint-{step}"
        saved(folder / f"global_step{step}/mp_rank_00_model_states.pt")
        saved(folder / f"global_step{step}/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
        saved(folder / "rng_state_0.pth")
        text(folder / "latest", f"global_step{step}")
        text(folder / "zero_to_fp32.py", "import torch\n")
        text(folder / "trainer_state.json", json.dumps({"global_step": step}))
    return tmp_path


def newest(run: Path) -> int:
    script = ". ./payload/checkpoints.sh; newest_complete"
    return int(subprocess.run(("bash", "-uc", script), cwd=run, capture_output=True, text=True, check=True).stdout)


def test_both_parts_together_are_complete(run: Path) -> None:
    assert newest(run) == 600


def no_latest(folder: Path) -> None:
    (folder / "latest").unlink()


def empty_latest(folder: Path) -> None:
    (folder / "latest").write_text("")


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder / "global_step600")


def no_model(folder: Path) -> None:
    (folder / "global_step600/mp_rank_00_model_states.pt").unlink()


def no_optimizer(folder: Path) -> None:
    (folder / "global_step600/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()


def only_the_script(folder: Path) -> None:
    no_latest(folder)
    no_folder(folder)


def other_step(folder: Path) -> None:
    (folder / "latest").write_text("global_step601")


def no_state(folder: Path) -> None:
    (folder / "trainer_state.json").unlink()


@pytest.mark.parametrize(
    "damage",
    [no_latest, empty_latest, no_folder, no_model, no_optimizer, only_the_script, other_step, no_state],
)
def test_a_folder_that_deepspeed_or_trainer_refuses_is_not_complete(run: Path, damage: Callable[[Path], None]) -> None:
    damage(run / "checkpoints/checkpoint-600")
    assert newest(run) == 300


def test_without_zero_the_optimizer_is_in_the_file_of_the_model(run: Path) -> None:
    folder = run / "checkpoints/checkpoint-600"
    no_optimizer(folder)
    (folder / "zero_to_fp32.py").unlink()
    assert newest(run) == 600
