"""A job resumes from the newest checkpoint that is whole to the last byte, and says which it has passed over."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.training

from training import (  # noqa: E402
    checkpoints,
    files,
    marker,
    resume,
    same_model,
)
from training.errors import JobError  # noqa: E402
from training.heartbeat import Heartbeat  # noqa: E402
from training.job import Job  # noqa: E402
from training.processes import Processes  # noqa: E402
from training.run import RunFolder  # noqa: E402

ALONE = Processes(0, 0, 1, 1, "alone")


def written(path: Path, step: int) -> None:
    found = marker.digests(path, files.sizes(path), sync=True)
    marker.write(path, found, {"step": step, "world_size": 2, "zero_stage": 2, "sequences": 4})


def expected(folder: Path, step: int) -> resume.Checkpoint:
    return resume.Checkpoint(folder / f"checkpoint-{step}", step, world_size=2, zero_stage=2, sequences=4)


def found(
    folder: Path, wanted: str | None = None, automatic: bool = True, verify: bool = False
) -> resume.Checkpoint | None:
    return resume.find(folder, wanted, automatic, ALONE, verify)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three whole checkpoints: 2, 9 and 10."""
    for step in (2, 9, 10):
        shards = tmp_path / f"checkpoint-{step}" / f"global_step{step}"
        shards.mkdir(parents=True)
        (shards / "rank_0.pt").write_bytes(b"x" * 100)
        (shards.parent / "trainer_state.json").write_text("{}")
        written(shards.parent, step)
    return tmp_path


def test_the_newest_is_that_of_the_highest_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert found(folder) == expected(folder, 10)
    assert "skipped" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            lambda path: (path / "global_step10" / "rank_0.pt").write_bytes(b"x" * 99),
            "has 99 bytes, but 100 were written",
        ),
        (lambda path: (path / "global_step10" / "rank_0.pt").unlink(), "rank_0.pt is missing"),
        (lambda path: (path / "global_step10" / "rank_0.pt").write_bytes(b"x" * 99 + b"y"), "has changed"),
        (
            lambda path: (path / marker.MARKER).unlink(),
            "is missing: the checkpoint is incomplete, or another program wrote it",
        ),
        (lambda path: (path / marker.MARKER).write_text('{"files": '), "cannot read"),
        (lambda path: (path / marker.MARKER).write_text("[]"), "cannot read"),
    ],
    ids=["truncated", "missing", "flipped", "unmarked", "half a marker", "no marker"],
)
def test_a_damaged_one_is_passed_over_and_said(
    folder: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], object], reason: str
) -> None:
    damage(folder / "checkpoint-10")
    assert found(folder, verify=True) == expected(folder, 9)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("skipped")]
    assert str(folder / "checkpoint-10") in line
    assert reason in line


def test_hashes_are_compared_on_request_only(folder: Path) -> None:
    """To read a checkpoint of a large model twice takes minutes; sizes find what a killed job leaves."""
    (folder / "checkpoint-10" / "global_step10" / "rank_0.pt").write_bytes(b"x" * 99 + b"y")
    assert found(folder) == expected(folder, 10)
    assert found(folder, verify=True) == expected(folder, 9)


def test_every_byte_is_looked_at_by_exactly_one_rank(tmp_path: Path) -> None:
    """Whatever the number of ranks, a flipped bit anywhere is found by one of them."""
    names = [f"global_step1/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(4)]
    names += ["model.safetensors", "rng_state_0.pth", "rng_state_3.pth", "trainer_state.json"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    written(tmp_path, 1)
    for world_size in (1, 2, 4, 8):
        for name in names:
            whole = (tmp_path / name).read_bytes()
            (tmp_path / name).write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
            faults = [marker.damaged(tmp_path, rank, world_size, local_world_size=2) for rank in range(world_size)]
            assert [fault.split()[0] for fault in faults if fault] == [name]
            (tmp_path / name).write_bytes(whole)


def test_without_any_the_job_begins_anew(tmp_path: Path) -> None:
    assert found(tmp_path / "nothing") is None


def test_by_hand_nothing_resumes_unless_asked(folder: Path) -> None:
    assert found(folder, None, automatic=False) is None
    assert found(folder, "false", automatic=True) is None
    assert found(folder, "true", automatic=False) == expected(folder, 10)
    assert found(folder, str(folder / "checkpoint-2"), automatic=True) == expected(folder, 2)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda file: file.unlink(), r"trainer_state\.json is missing"),
        (lambda file: file.write_text("[]"), r"trainer_state\.json has changed"),
    ],
)
def test_a_damaged_one_that_is_asked_for_by_name_is_an_error(
    folder: Path, damage: Callable[[Path], object], reason: str
) -> None:
    """The user has named it: another one in its place would be a surprise."""
    damage(folder / "checkpoint-2" / "trainer_state.json")
    with pytest.raises(JobError, match=reason):
        found(folder, str(folder / "checkpoint-2"), verify=True)


def test_old_checkpoints_go_and_the_last_whole_one_always_stays(folder: Path) -> None:
    (folder / "checkpoint-10" / marker.MARKER).unlink()
    checkpoints.remove_old(folder, keep=1)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-10", "checkpoint-9"]
    checkpoints.remove_old(folder, keep=0)
    assert found(folder) == expected(folder, 9)


def test_the_best_checkpoint_stays_however_old(folder: Path) -> None:
    checkpoints.remove_old(folder, keep=1, best=str(folder / "checkpoint-2"))
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-10", "checkpoint-2"]


class TestAnotherModel:
    """Is refused in one line, before DeepSpeed prints pages of shapes."""

    def checkpoint(self, path: Path, **changes: int) -> Path:
        self.model(**changes).save_pretrained(path)
        return path

    def model(self, **changes: int) -> object:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(**{"vocab_size": 64, **sizes, **changes}))

    def test_the_same_one_passes(self, tmp_path: Path) -> None:
        same_model.check(self.checkpoint(tmp_path), self.model())

    @pytest.mark.parametrize(("name", "there"), [("num_hidden_layers", 3), ("vocab_size", 72)])
    def test_other_sizes_are_named(self, tmp_path: Path, name: str, there: int) -> None:
        with pytest.raises(JobError, match=f"{name} is {there} in the checkpoint, but"):
            same_model.check(self.checkpoint(tmp_path, **{name: there}), self.model())

    def test_other_shapes_are_named_where_no_config_tells(self, tmp_path: Path) -> None:
        checkpoint = self.checkpoint(tmp_path, intermediate_size=48)
        (tmp_path / "config.json").unlink()
        with pytest.raises(
            JobError, match=r"gate_proj\.weight has the shape \[48, 16\] in the checkpoint, but \[32, 16\] in this run"
        ):
            same_model.check(checkpoint, self.model())

    def test_a_whole_model_is_no_adapter(self, tmp_path: Path) -> None:
        from peft import LoraConfig, get_peft_model

        adapted = get_peft_model(self.model(), LoraConfig(r=2, target_modules=["q_proj"]))
        with pytest.raises(JobError, match="the checkpoint has a whole model, but this run trains a LoRA adapter"):
            same_model.check(self.checkpoint(tmp_path), adapted)
        adapted.save_pretrained(tmp_path / "adapter")
        same_model.check(tmp_path / "adapter", adapted)


class FakeTrainer:
    """What a checkpoint needs of transformers' Trainer."""

    def __init__(self, folder: Path) -> None:
        sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "deepspeed": None}
        length = {"max_steps": -1, "num_train_epochs": 0.5}
        self.args = SimpleNamespace(
            output_dir=str(folder), save_total_limit=None, save_strategy="steps", **sizes, **length
        )
        self.state = SimpleNamespace(global_step=3, max_steps=9, best_model_checkpoint=None)
        self.control = SimpleNamespace(should_training_stop=False, should_save=False, should_log=False)

    def _get_output_dir(self, trial: object = None) -> str:
        return self.args.output_dir

    def _save_checkpoint(self) -> None:
        folder = Path(self._get_output_dir()) / f"checkpoint-{self.state.global_step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text("{}")


def run_folder(path: Path) -> RunFolder:
    return RunFolder(path, path / "1", path / "flag", path / "cache", by_hand=False)


def test_a_checkpoint_gets_its_name_with_its_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it is hashed, it has a hidden name, which the next start removes: the disk does not fill."""
    hashing = threading.Event()
    digests = marker.digests
    monkeypatch.setattr(marker, "digests", lambda *words, **named: hashing.wait(600) and digests(*words, **named))
    run = run_folder(tmp_path)
    trainer, saver = FakeTrainer(tmp_path / "checkpoints"), checkpoints.CompleteCheckpoints(run, ALONE)
    saver.attach(trainer, 0)
    trainer._save_checkpoint()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".checkpoint-3.partial"]
    copy = tmp_path / "killed"
    shutil.copytree(tmp_path / "checkpoints", copy)
    hashing.set()
    saver._finish()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-3"]
    assert marker.missing_or_cut(tmp_path / "checkpoints" / "checkpoint-3") is None
    checkpoints.CompleteCheckpoints(run, ALONE).attach(FakeTrainer(copy), 0)
    assert list(copy.iterdir()) == []


class BestTrainer(FakeTrainer):
    """With --save_strategy best, as transformers 4.57 has it: after an evaluation, only a better model is saved."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.args.save_strategy, self.args.save_total_limit = "best", 1

    def _determine_best_metric(self, metrics: dict[str, float], trial: object) -> bool:
        return metrics["eval_loss"] < 2

    def step(self, number: int, loss: float | None, *, requested: bool = False) -> None:
        self.state.global_step, self.control.should_save = number, requested
        if loss is not None:
            self.control.should_save = self._determine_best_metric({"eval_loss": loss}, None)
        if self.control.should_save:
            self._save_checkpoint()


def test_saves_by_time_do_not_replace_the_best_checkpoint_nor_does_an_evaluation_forbid_them(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    trainer, saver = BestTrainer(tmp_path / "checkpoints"), checkpoints.CompleteCheckpoints(run, ALONE)
    saver.attach(trainer, 0)
    trainer.step(1, loss=1.0)
    trainer.step(2, loss=3.0)
    trainer.step(3, loss=None, requested=True)
    trainer.step(4, loss=3.0, requested=True)
    saver._finish()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint-1", "checkpoint-4"]
    state = json.loads((tmp_path / "checkpoints/checkpoint-4/trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoints/checkpoint-1")


def test_the_best_checkpoint_is_complete_when_the_training_ends(tmp_path: Path) -> None:
    """transformers loads it before `on_train_end`."""
    trainer, saver = BestTrainer(tmp_path / "checkpoints"), checkpoints.CompleteCheckpoints(run_folder(tmp_path), ALONE)
    saver.attach(trainer, 0)
    trainer.step(8, loss=1.0)
    trainer.step(9, loss=3.0)
    saver.on_epoch_end(trainer.args, trainer.state, trainer.control)  # type: ignore[arg-type]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-8"]


@pytest.mark.parametrize(("limit", "kept"), [(1, [10]), (0, [2, 3, 9, 10]), (-1, [2, 3, 9, 10])])
def test_a_limit_of_zero_or_less_keeps_all_checkpoints(folder: Path, limit: int, kept: list[int]) -> None:
    trainer, saver = FakeTrainer(folder), checkpoints.CompleteCheckpoints(run_folder(folder), ALONE)
    trainer.args.save_total_limit = limit
    saver.attach(trainer, 10)
    trainer._save_checkpoint()
    saver._finish()
    assert {path.name for path in resume.by_age(folder)} == {f"checkpoint-{step}" for step in kept}


def test_a_training_that_begins_anew_in_a_folder_resumes_from_its_own_checkpoints(folder: Path) -> None:
    """As with --overwrite_output_dir: the folder has later steps of an earlier training."""
    trainer, saver = FakeTrainer(folder), checkpoints.CompleteCheckpoints(run_folder(folder), ALONE)
    trainer.args.save_total_limit = 2
    saver.attach(trainer, 0)
    trainer._save_checkpoint()
    saver._finish()
    checkpoint = found(folder)
    assert checkpoint is not None and checkpoint.step == 3
    assert [path.name for path in resume.by_age(folder)] == ["checkpoint-3", "checkpoint-10"]
    again = checkpoints.CompleteCheckpoints(run_folder(folder), ALONE)
    again.attach(trainer := FakeTrainer(folder), checkpoint.step)
    trainer.state.global_step = 4
    trainer._save_checkpoint()
    again._finish()
    assert [path.name for path in resume.by_age(folder)] == ["checkpoint-4", "checkpoint-3", "checkpoint-10"]


@pytest.mark.parametrize("where", ["old", "false"])
def test_a_restart_does_not_begin_again_at_a_named_checkpoint_or_at_step_0(
    folder: Path, tmp_path: Path, where: str
) -> None:
    """The arguments of all attempts are the same; one that names another checkpoint begins there."""
    mine = tmp_path / "run" / "checkpoints"
    wanted = str(folder / "checkpoint-9") if where == "old" else where
    other = str(folder / "checkpoint-10")
    run = run_folder(tmp_path / "run")
    began = resume.began_at(run.path, wanted)

    def start(wanted: str) -> int:
        own = resume.find_own(mine, resume.began_at(run.path, wanted), ALONE)
        checkpoint = own or resume.find(mine, wanted, True, ALONE)
        return checkpoint.step if checkpoint else 0

    first = 9 if where == "old" else 0
    assert start(wanted) == first
    trainer, saver = FakeTrainer(mine), checkpoints.CompleteCheckpoints(run, ALONE)
    saver.attach(trainer, first, began)
    trainer.state.global_step = 11
    trainer._save_checkpoint()
    saver._finish()
    assert start(wanted) == 11
    assert start(other) == 10
    assert resume.began_at(run.path, "true") == resume.began_at(run.path, None) == []
    (mine / "checkpoint-11" / "trainer_state.json").unlink()
    assert start(wanted) == first


def test_a_checkpoint_that_is_being_replaced_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same step is saved again, and the job is killed before the new checkpoint has its name."""
    folder = tmp_path / "checkpoints"
    trainer, saver = FakeTrainer(folder), checkpoints.CompleteCheckpoints(run_folder(tmp_path), ALONE)
    saver.attach(trainer, 0)
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.parent.name.endswith(".partial"):
            raise KeyboardInterrupt
        return rename(path, target)

    for attempt in (1, 2):
        trainer._save_checkpoint()
        if attempt == 1:
            saver._finish()
    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        saver._finish()
    monkeypatch.undo()
    checkpoint = found(folder)
    assert checkpoint is not None and checkpoint.path == folder / "checkpoint-3"
    saver.attach(trainer, 0)
    assert [path.name for path in folder.iterdir()] == ["checkpoint-3"]


@pytest.mark.parametrize(("damaged", "model"), [(False, "2"), (True, "10")])
def test_started_again_after_its_end_a_run_keeps_its_best_model(folder: Path, damaged: bool, model: str) -> None:
    """With --load_best_model_at_end; the best checkpoint may have been removed by hand."""
    state = {"best_model_checkpoint": str(folder / "checkpoint-2")}
    (folder / "checkpoint-10" / "trainer_state.json").write_text(json.dumps(state))
    for step in (2, 10):
        (folder / f"checkpoint-{step}" / "model.safetensors").write_text(str(step))
        (folder / f"checkpoint-{step}" / marker.MARKER).unlink()
        written(folder / f"checkpoint-{step}", step)
    if damaged:
        (folder / "checkpoint-2" / "model.safetensors").unlink()
    trainer = FakeTrainer(folder)
    trainer.args = SimpleNamespace(output_dir=str(folder), max_steps=10, load_best_model_at_end=True)
    run = run_folder(folder)
    run.attempt.mkdir()
    final = Job("sft", run, ALONE, Heartbeat(run, ALONE)).save_final(trainer, found(folder))
    assert (final / "model.safetensors").read_text() == model


@pytest.mark.parametrize(
    ("before", "now", "finished"),
    [
        ({}, {}, True),
        ({}, {"num_train_epochs": 1}, False),
        ({"max_steps": 3}, {}, False),
        ({}, {"max_steps": 3}, True),
        ({}, {"max_steps": 4}, False),
    ],
)
def test_a_run_that_is_to_train_longer_is_not_finished(
    tmp_path: Path, before: dict[str, float], now: dict[str, float], finished: bool
) -> None:
    """transformers notes the epochs rounded up: half an epoch, a whole one, and steps within one look the same."""
    usual = {"max_steps": -1, "num_train_epochs": 0.5}
    trainer = FakeTrainer(tmp_path / "checkpoints")
    vars(trainer.args).update({**usual, **before})
    saver = checkpoints.CompleteCheckpoints(run_folder(tmp_path), ALONE)
    saver.attach(trainer, 0)
    trainer._save_checkpoint()
    saver._finish()
    checkpoint = found(tmp_path / "checkpoints")
    assert checkpoint is not None
    state = {"num_train_epochs": 1, "max_steps": 3}
    (checkpoint.path / "trainer_state.json").write_text(json.dumps(state))
    assert resume.is_finished(checkpoint, SimpleNamespace(**{**usual, **now})) == finished


def test_an_old_torch_resumes_only_where_the_user_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NGC 24.06: transformers would refuse with a traceback."""
    import torch
    import transformers.trainer

    resume.check_old_torch(allowed=False)
    monkeypatch.setattr(torch, "__version__", "2.4.0a0+f70bd71a48")
    monkeypatch.setattr(transformers.trainer, "check_torch_load_is_safe", lambda: 1 / 0)
    with pytest.raises(JobError, match="cannot resume") as caught:
        resume.check_old_torch(allowed=False)
    assert "--allow_old_torch_load" in caught.value.fix
    resume.check_old_torch(allowed=True)
    transformers.trainer.check_torch_load_is_safe()
