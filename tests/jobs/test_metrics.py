"""Metrics are lines that a person and a program can read, over all attempts."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.training

from tests.jobs.conftest import STEPS, TRAIN, Launcher  # noqa: E402
from training import flops, loss_picture, metrics, pictures, records, stretch, trackers  # noqa: E402
from training.errors import JobError  # noqa: E402
from training.run import RunFolder  # noqa: E402
from training.settings import Settings  # noqa: E402


def entry(step: int, loss: float, attempt: int = 1) -> dict[str, float]:
    return {"step": step, "loss": loss, "tokens": 100, "tokens_per_second": 50.0, "attempt": attempt}


def test_the_progress_line_is_plain_text() -> None:
    line = metrics.progress_line({"step": 3, "loss": 5.12345, "tokens_per_second": 1200.4}, 60, seconds_left=81)
    assert line == "step  3/60 loss 5.1235 1200 tok/s eta 1:21"
    assert metrics.progress_line({"step": 3, "loss": 5, "tokens_per_second": 1}, 60, 3723).endswith("eta 1:02:03")


def test_the_progress_line_speaks_of_the_peak_and_of_slow_data_where_there_is_something_to_say() -> None:
    known = {"step": 3, "loss": 5.0, "tokens_per_second": 100.0, "tokens": 200, "mfu": 0.4123, "memory_bytes": 3 << 30}
    assert metrics.progress_line({**known, "data_wait_seconds": 0.01}, 9, 1).endswith(
        "100 tok/s MFU 41.2% 3.0 GiB eta 0:01"
    )
    assert "waits 25% for data" in metrics.progress_line({**known, "data_wait_seconds": 0.5}, 9, 1)


def test_steps_after_the_one_that_a_later_attempt_began_at_are_void(tmp_path: Path) -> None:
    """Attempt 1 reached step 4, its last checkpoint was of step 1, and attempt 2 has reached step 2 only."""
    path = tmp_path / "metrics.jsonl"
    for line in (entry(1, 9.0), entry(2, 8.0), entry(3, 7.5), entry(4, 7.4), entry(2, 8.5, attempt=2)):
        records.append(path, line)
    assert [(found["step"], found["loss"]) for found in records.read(path)] == [(1, 9.0), (2, 8.5)]


def test_a_step_taken_again_counts_once_and_a_cut_line_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for line in (entry(1, 9.0), entry(2, 8.0), entry(3, 7.5), entry(3, 7.0, attempt=2)):
        records.append(path, line)
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [(found["step"], found["loss"]) for found in records.read(path)] == [(1, 9.0), (2, 8.0), (3, 7.0)]


def test_the_summary_covers_all_attempts() -> None:
    found = records.summarise([entry(1, 9.0), entry(2, 8.0), entry(3, 7.0, attempt=2)])
    assert found == {
        "steps": 3,
        "first_loss": 9.0,
        "last_loss": 7.0,
        "tokens": 300,
        "tokens_per_second": 50.0,
        "seconds": 6.0,
        "attempts": 2,
    }
    json.dumps(records.summarise([]))


def test_smoothing_keeps_the_ends_and_does_not_lag() -> None:
    line = [10.0 - step for step in range(60)]
    assert pictures.smooth(line) == pytest.approx(line)
    values = [9.0, 8.0, 8.5, 7.0] * 10
    smoothed = pictures.smooth(values)
    assert (smoothed[0], smoothed[-1]) == (9.0, 7.0)
    assert len(smoothed) == len(values)
    assert min(values) <= min(smoothed) <= max(smoothed) <= max(values)


def test_the_picture_is_a_png_of_a_useful_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    entries = [entry(step, 9 - step / 10, attempt=1 + step // 20) for step in range(1, 40)]
    assert loss_picture.draw(entries, tmp_path / "loss.png", "a run")
    content = (tmp_path / "loss.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(content[16:20], "big") >= 1000
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_there_is_no_picture_of_nothing(tmp_path: Path) -> None:
    assert not loss_picture.draw([], tmp_path / "loss.png", "a run")
    assert list(tmp_path.iterdir()) == []


def test_an_attempt_names_what_its_figures_are_made_of(launcher: Launcher, tmp_path: Path) -> None:
    """Header, MFU by its formula, waiting, TensorBoard without a step twice; --peak_flops stands for a GPU's name."""
    more = (*TRAIN, "--peak_flops=1e11", "--save_steps=5", "--report_to", "tensorboard")
    first = launcher.sft(tmp_path, *more, "--max_steps=7")
    assert first.code == 0, first.output
    # the run was killed after step 7, its last checkpoint is that of step 5
    import shutil

    for name in ("checkpoint-7", "final"):
        shutil.rmtree(tmp_path / "checkpoints" / name)
    second = launcher.sft(tmp_path, *more, attempt=2)
    assert second.code == 0, second.output
    one, two = records.headers(tmp_path / "metrics.jsonl")
    assert (one["attempt"], two["attempt"], two["processes"]) == (1, 2, 2)
    assert two["mfu"]["peak_flops"] == 1e11 and two["mfu"]["peak_source"] == "--peak_flops"
    assert two["mfu"]["formula"] == flops.FORMULA
    found = records.read(tmp_path / "metrics.jsonl")
    assert [each["step"] for each in found] == list(range(1, STEPS + 1))
    last = found[-1]
    # 4 rows of 32 tokens each step: no padding, so squared lengths are tokens x 32
    cost = flops.Cost(two["mfu"]["trained_weights"], two["mfu"]["frozen_weights"], two["mfu"]["layers_times_width"])
    seconds = last["tokens"] / last["tokens_per_second"]
    assert last["mfu"] == pytest.approx(cost.flops(128, 128 * 32) / seconds / 2e11, rel=0.01)
    assert 0 <= last["data_wait_seconds"] < 60 and last["step_seconds"] == pytest.approx(seconds, rel=0.01)
    saves = [each["step"] for each in records.lines(tmp_path / "metrics.jsonl") if each.get("checkpoint_seconds")]
    assert saves[0] == 5 and STEPS in saves

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert [step for step, _ in shown] == list(range(1, STEPS + 1))
    assert [value for _, value in shown] == pytest.approx([each["loss"] for each in found], rel=1e-5)
    assert "train/mfu" in events.Tags()["scalars"]


def test_wandb_has_one_run_over_all_attempts_and_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, as on a node without network: what its own files hold is read back."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    identities, steps = set(), []
    for attempt, span in ((1, range(1, 8)), (2, range(6, 11))):
        folder = tmp_path / "attempts" / str(attempt)
        run = RunFolder(tmp_path, folder, folder / "save-and-exit", tmp_path / "cache", by_hand=False)
        settings = Settings({"report_to": ["wandb"]}, {})
        (tracker,) = trackers.make(settings, run)
        records.append(run.metrics, {"header": {"attempt": attempt, "trackers": ["wandb"]}})
        tracker.start(span[0] - 1)
        assert not tracker.failed
        identities.add(tracker.identity)
        for step in span:
            records.append(run.metrics, entry(step, 9 - step / 10, attempt))
            tracker.write(step, entry(step, 9 - step / 10, attempt))
        tracker.close()
    for path in sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb")):
        steps += logged_steps(path)
    assert len(identities) == 1
    assert steps == list(range(1, 11))
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"wandb_run_id": identities.pop()}


def logged_steps(path: Path) -> list[int]:
    """The steps in a file of wandb's, by wandb's own reader."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    store = DataStore()
    store.open_for_scan(str(path))
    steps = []
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for item in record.history.item:
            if (item.key or "/".join(item.nested_key)) == "train/global_step":
                steps.append(int(float(item.value_json)))
    return steps


def test_a_tracker_that_cannot_work_is_refused_at_the_start() -> None:
    wanted = Settings({"report_to": ["wandb"]}, {})
    with pytest.raises(JobError, match="wandb"):
        trackers.check(wanted, {"HOME": "/nonexistent"})
    trackers.check(Settings({"report_to": ["none"]}, {}), {})
    trackers.check(Settings({"report_to": "tensorboard"}, {}), {})


def test_what_a_tracker_raises_ends_no_training(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tensorboard = trackers.TensorBoard(tmp_path / "tensorboard")
    (tmp_path / "tensorboard").write_text("a file where a folder should be")
    tensorboard.start(0)
    tensorboard.write(1, {"loss": 1.0})
    tensorboard.close()
    said = capsys.readouterr().out
    assert said.count("tensorboard is told nothing more") == 1


@pytest.mark.parametrize(
    ("gpu", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GH200 120GB", 989.4),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_a_gpu_is_known_by_the_name_that_torch_gives_it(gpu: str, teraflops: float) -> None:
    peak = flops.find_peak(gpu)
    assert peak is not None and peak.flops == pytest.approx(teraflops * 1e12) and peak.source


@pytest.mark.parametrize("gpu", ["NVIDIA GeForce GT 710", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", ""])
def test_of_an_unknown_gpu_or_a_slice_of_one_no_peak_is_made_up(gpu: str) -> None:
    assert flops.find_peak(gpu) is None


@pytest.mark.parametrize(
    ("config", "length", "giga"),
    [
        ({"model_type": "gpt2", "n_positions": 1024}, 1024, 0.80),
        (
            {"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
             "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True},
            4096, 8.2,
        ),
        (
            {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
             "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
            4096, 48.3,
        ),
    ],
    ids=["gpt2-124m", "llama-1b", "llama-8b"],
)  # fmt: skip
def test_what_a_token_costs_is_what_is_published(config: dict[str, object], length: int, giga: float) -> None:
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.tie_weights()
    assert flops.of_model(model).flops(1, length) / 1e9 == pytest.approx(giga, rel=0.01)


def test_lengths_are_those_of_documents_padding_and_neighbours_left_out() -> None:
    import torch

    ids = torch.zeros(2, 6, dtype=torch.int64)
    assert int(stretch.squared_lengths({"input_ids": ids})) == 72
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
    assert int(stretch.squared_lengths({"input_ids": ids, "attention_mask": mask})) == 9 + 25
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    assert int(stretch.squared_lengths({"input_ids": ids[:1], "position_ids": positions})) == 9 + 4 + 1
