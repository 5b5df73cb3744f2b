"""A checkpoint counts once it is complete: it has the files that its trainer needs, and none of them is cut off."""

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.project import Project
from runner.runs import payload, trainer

pytestmark = pytest.mark.training
pytest.importorskip("torch")

NO_PROJECT = Project(None, Path("/none"), Path("/none"))
CUTS = 50


def save(path: Path, size: int = 1000) -> Path:
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": torch.rand(size), "step": 7}, path)
    return path


def text(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def distributed(folder: Path) -> list[Path]:
    """What torch.distributed.checkpoint writes; .metadata is the last file."""
    import torch
    import torch.distributed.checkpoint as dcp

    state = {f"layers.{n}.weight": torch.rand(50, 4) for n in range(30)} | {"step": 7}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return [*sorted(folder.glob("*.distcp")), folder / ".metadata"]


def state_text() -> str:
    history = [{"epoch": n / 10, "loss": 2.5, "note": 'a "quoted" [text]', "step": n} for n in range(20)]
    return json.dumps({"global_step": 7, "log_history": history}, indent=2)


# Each function makes the checkpoint of step 7, and returns its files in the order in which the trainer writes them.


def huggingface(folder: Path) -> list[Path]:
    import torch
    from safetensors.torch import save_file

    place = folder / "checkpoint-7"
    place.mkdir()
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for number, name in enumerate(shards):
        save_file({f"weight.{number}": torch.rand(30, 30), f"bias.{number}": torch.rand(7)}, place / name)
    index = {"metadata": {}, "weight_map": {f"weight.{number}": name for number, name in enumerate(shards)}}
    return [
        *(place / name for name in shards),
        text(place / "model.safetensors.index.json", json.dumps(index, indent=2)),
        text(place / "config.json", json.dumps({"hidden_size": 32, "rope": {"theta": 1e4}}, indent=2)),
        *(save(place / name, 50) for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")),
        text(place / "trainer_state.json", state_text()),
    ]


def lightning(folder: Path) -> list[Path]:
    return [save(folder / "epoch=0-step=7.ckpt")]


def plain(folder: Path) -> list[Path]:
    return [save(folder / "step-7.pt")]


def torchtitan(folder: Path) -> list[Path]:
    return distributed(folder / "step-7")


def megatron_torch(folder: Path) -> list[Path]:
    ranks = [save(folder / f"iter_0000007/mp_rank_0{rank}/model_optim_rng.pt") for rank in range(2)]
    return [*ranks, text(folder / "latest_checkpointed_iteration.txt", "7")]


def megatron_dist(folder: Path) -> list[Path]:
    place = folder / "iter_0000007"
    common = save(place / "common.pt")
    names = text(place / "metadata.json", json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return [*distributed(place), common, names, text(folder / "latest_checkpointed_iteration.txt", "7")]


def megatron_bridge(folder: Path) -> list[Path]:
    place = folder / "iter_0000007"
    files = distributed(place)
    return [
        *files,
        save(place / "common.pt"),
        text(place / "run_config.yaml", "model:\n"),
        save(place / "train_state.pt"),
    ]


def verl(folder: Path) -> list[Path]:
    place = folder / "global_step_7"
    names = ("model_world_size_1_rank_0.pt", "optim_world_size_1_rank_0.pt", "extra_state_world_size_1_rank_0.pt")
    files = [save(place / "actor" / name) for name in names]
    return [*files, save(place / "data.pt"), text(folder / "latest_checkpointed_iteration.txt", "7")]


def deepspeed(folder: Path) -> list[Path]:
    place = folder / "global_step7"
    names = ("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return [*(save(place / name) for name in names), text(folder / "latest", "global_step7")]


def nanogpt(folder: Path) -> list[Path]:
    text(folder.parent / "attempts/1/saved", f"7 {folder}\n")
    return [save(folder / "ckpt.pt")]


def nanochat(folder: Path) -> list[Path]:
    model = save(folder / "model_000007.pt")
    meta = text(folder / "meta_000007.json", json.dumps({"step": 7, "model_config": {"n_layer": 20}}, indent=2))
    return [model, meta, save(folder / "optim_000007_rank0.pt")]


KINDS: tuple[Callable[[Path], list[Path]], ...] = (
    huggingface, lightning, plain, torchtitan, megatron_torch, megatron_dist, megatron_bridge, verl, deepspeed,
    nanogpt, nanochat,
)  # fmt: skip


def run_folder(folder: Path) -> Path:
    for name, content in payload.files().items():
        text(folder / name, content)
    text(folder / trainer.FILE, trainer.render(None, NO_PROJECT))
    (folder / "checkpoints").mkdir()
    return folder


def newest(folders: list[Path], function: str = "newest_complete") -> list[str]:
    """The step of the newest complete checkpoint in each of these run folders, or what another function prints."""
    script = f'. "$0"/payload/checkpoints.sh; for run; do cd "$run" && {function}; echo; done'
    words = ("bash", "-uc", script, folders[0], *folders)
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_a_checkpoint_that_is_cut_off_does_not_count(tmp_path: Path, make: Callable[[Path], list[Path]]) -> None:
    """Either the trainer is killed while it writes, or one file ends too early, for example on a full disk."""
    whole = run_folder(tmp_path / "whole")
    files = [path.relative_to(whole) for path in make(whole / "checkpoints")]
    assert newest([whole]) == ["7"] and newest([whole], "newest_complete known") == ["0" if make is plain else "7"]
    cuts = []
    choose = random.Random(make.__name__)
    sizes = [(whole / path).stat().st_size for path in files]
    sure = [
        number for number, path in enumerate(files) if path.suffix not in (".txt", ".yaml") and path.name != "latest"
    ]
    for cut in range(CUTS):
        copy = Path(shutil.copytree(whole, tmp_path / str(cut)))
        for saved in copy.glob("attempts/1/saved"):
            saved.write_text(saved.read_text().replace(str(whole), str(copy)))
        killed = cut % 2 == 0
        number = choose.choices(range(len(files)), sizes)[0] if killed else choose.choice(sure)
        with (copy / files[number]).open("r+b") as file:
            file.truncate(choose.randrange(sizes[number]))
        for path in files[number + 1 :] if killed else ():
            (copy / path).unlink()
        cuts.append(copy)
    found = newest([whole], "checkpoint_candidates | cut -d ' ' -f 3-")[0].replace(f"{whole}/", "")
    answers = newest([whole, *cuts], f"{{ complete_checkpoint ./{found} && printf yes || printf no; }}")
    assert answers == ["yes", *["no"] * CUTS]


def test_the_newest_complete_checkpoint_counts(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    huggingface(run / "checkpoints")
    for step in (3, 12, 20):
        shutil.copytree(run / "checkpoints/checkpoint-7", run / f"checkpoints/checkpoint-{step}")
    (run / "checkpoints/checkpoint-20/optimizer.pt").write_bytes(b"PK")
    (run / "checkpoints/tmp-checkpoint-30").mkdir()
    (run / "checkpoints/checkpoint-40").mkdir()
    assert newest([run]) == ["12"]


def test_a_folder_that_the_arguments_or_the_log_name(tmp_path: Path) -> None:
    """Outside of the run folder."""
    for number, words in enumerate(([], ["--save", f"{tmp_path}/out"], [f"--save={tmp_path}/out"])):
        run = run_folder(tmp_path / str(number))
        text(run / trainer.FILE, trainer.render("megatron-lm", NO_PROJECT, words))
        megatron_torch(tmp_path / "out")
        assert newest([run]) == ["7" if words else "0"]
    text(tmp_path / "0/attempts/1/saved", f"7 {tmp_path}/out\n")
    assert newest([tmp_path / "0"]) == ["7"]


def test_a_tracker_of_an_earlier_step(tmp_path: Path) -> None:
    """Megatron-LM writes the tracker when all ranks have saved."""
    run = run_folder(tmp_path)
    megatron_torch(run / "checkpoints")
    shutil.copytree(run / "checkpoints/iter_0000007", run / "checkpoints/iter_0000010")
    assert newest([run]) == ["7"]
    text(run / "checkpoints/latest_checkpointed_iteration.txt", "10\n")
    assert newest([run]) == ["10"]


def test_a_file_in_another_format(tmp_path: Path) -> None:
    """A pickle that is not a zip archive cannot be checked, and counts, unless it is empty or full of zeros."""
    run = run_folder(tmp_path)
    for step, content in ((1, b"\x80\x02" + b"x" * 100), (2, b""), (3, bytes(4096))):
        (run / f"checkpoints/step-{step}.pt").write_bytes(content)
    assert newest([run]) == ["1"]
