"""Metrics are lines that a person and a program can read, over all attempts."""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.training

from tests.jobs.conftest import STEPS, TRAIN, Launcher  # noqa: E402
from training import arguments, flops, metrics, pictures, records  # noqa: E402
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
    assert "waits for data 25% of the time" in metrics.progress_line({**known, "data_wait_seconds": 0.5}, 9, 1)


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


def test_the_mfu_of_a_run_is_that_of_its_tokens_per_second() -> None:
    """A slow entry, such as the first one, which compiles, counts for as long as it took."""
    fast = {**entry(1, 9.0), "tokens_per_second": 100.0, "mfu": 0.5}
    slow = {**entry(2, 8.0), "tokens_per_second": 25.0, "mfu": 0.125}
    found = records.summarise([slow, fast])
    assert found["tokens_per_second"] == 40.0
    assert found["mfu"] == 0.2


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
    assert pictures.draw_loss(entries, tmp_path / "loss.png", "a run")
    content = (tmp_path / "loss.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(content[16:20], "big") >= 1000
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_there_is_no_picture_of_nothing(tmp_path: Path) -> None:
    assert not pictures.draw_loss([], tmp_path / "loss.png", "a run")
    assert list(tmp_path.iterdir()) == []


def test_an_attempt_names_what_its_figures_are_made_of(launcher: Launcher, tmp_path: Path) -> None:
    """Header, MFU by its formula, waiting, TensorBoard over both attempts; --peak_flops stands for a GPU's name."""
    more = (*TRAIN, "--peak_flops=1e11", "--save_steps=5", "--report_to", "tensorboard")
    first = launcher.forked(tmp_path, *more, "--max_steps=7")
    assert first.code == 0, first.output
    # the run was killed after step 7, its last checkpoint is that of step 5
    import shutil

    for name in ("checkpoint-7", "final"):
        shutil.rmtree(tmp_path / "checkpoints" / name)
    second = launcher.forked(tmp_path, *more, attempt=2)
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
    assert last["mfu_palm"] == pytest.approx(cost.flops_palm(128, 128 * 32) / seconds / 2e11, rel=0.01)
    assert 0 <= last["data_wait_seconds"] < 60 and last["step_seconds"] == pytest.approx(seconds, rel=0.01)
    saves = [each["step"] for each in records.lines(tmp_path / "metrics.jsonl") if each.get("checkpoint_seconds")]
    assert saves[0] == 5 and STEPS in saves

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    kept = dict(shown)  # steps 6 and 7 were taken twice
    assert sorted(kept) == list(range(1, STEPS + 1))
    assert [kept[step] for step in sorted(kept)] == pytest.approx([each["loss"] for each in found], rel=1e-5)
    assert "train/mfu" in events.Tags()["scalars"]


def prepared(tmp_path: Path, report_to: object) -> Settings:
    """Settings once the trackers are prepared; the environment is restored by the module's fixture."""
    from types import SimpleNamespace

    run = RunFolder(tmp_path / "sft-0007", tmp_path / "1", tmp_path / "flag", tmp_path / "cache", by_hand=False)
    settings = Settings({"report_to": report_to, "run_name": None}, {})
    arguments._prepare_trackers(settings, SimpleNamespace(run=run))
    return settings


def test_all_attempts_of_a_run_are_one_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own variables say so: an id that follows from the run's folder, and to resume it."""
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_DIR", "TENSORBOARD_LOGGING_DIR"):
        monkeypatch.delenv(name, raising=False)
    settings = prepared(tmp_path, ["wandb"])
    assert (os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"]) == ("sft-0007", "allow")
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "sft-0007" / "tensorboard")
    assert settings["run_name"] == "sft-0007"
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    prepared(tmp_path, "wandb")
    assert os.environ["WANDB_RUN_ID"] == "mine"


@pytest.mark.parametrize(
    ("gpu", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H800 PCIe", 756),
        ("NVIDIA GH200 120GB", 989.4),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GB300", 2500),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("Tesla V100-PCIE-32GB", 112),
        ("Tesla V100-SXM2-32GB", 125),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_a_gpu_is_known_by_the_name_that_torch_gives_it(gpu: str, teraflops: float) -> None:
    peak = flops.find_peak(gpu)
    assert peak is not None and peak.flops == pytest.approx(teraflops * 1e12) and peak.source


@pytest.mark.parametrize(
    "gpu", ["NVIDIA GeForce GT 710", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", ""]
)
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
    assert int(flops.squared_lengths({"input_ids": ids})) == 72
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
    assert int(flops.squared_lengths({"input_ids": ids, "attention_mask": mask})) == 9 + 25
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    assert int(flops.squared_lengths({"input_ids": ids[:1], "position_ids": positions})) == 9 + 4 + 1


def test_a_sliding_window_counts_what_it_sees() -> None:
    """A position attends to itself and to the window - 1 before it; padding and packed rows as above."""
    import torch

    def expected(length: int, window: int) -> int:
        return sum(2 * min(position, window - 1) + 1 for position in range(length))

    ids = torch.zeros(2, 6, dtype=torch.int64)
    assert int(flops.squared_lengths({"input_ids": ids}, 4)) == 2 * expected(6, 4)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
    found = flops.squared_lengths({"input_ids": ids, "attention_mask": mask}, 4)
    assert int(found) == expected(3, 4) + expected(5, 4)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0]])
    assert int(flops.squared_lengths({"input_ids": ids[:1], "position_ids": positions}, 4)) == expected(5, 4) + 1


def test_layers_with_a_window_are_counted_apart_and_palm_counts_all_in_full() -> None:
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    size = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    size |= {"head_dim": 16, "vocab_size": 64}
    shape = AutoConfig.for_model("gemma3_text", num_hidden_layers=6, sliding_window=8, **size)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(shape)
    cost = flops.of_model(model)
    assert (cost.attention, cost.windowed, cost.window) == (1 * 64, 5 * 64, 8)
    assert cost.flops(0, 100.0, 30.0) == 6 * (64 * 100 + 320 * 30)
    assert cost.flops_palm(0, 100.0) == 12 * 6 * 64 * 100


def test_the_attention_of_a_model_is_that_of_its_layers_and_heads() -> None:
    """Qwen3-Next has linear attention in three layers of four; DeepSeek's heads are wider than their rotary part."""
    from transformers import AutoConfig

    def width(name: str, **sizes: int) -> int:
        size = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4, **sizes}
        config = AutoConfig.for_model(name, **size)
        return flops._attention_layers(config) * flops._attention_width(config)

    assert width("llama") == 8 * 64
    assert width("qwen3_next", head_dim=16) == 2 * 64
    assert width("deepseek_v3") == 8 * 4 * (128 + 64 + 128) // 2


def test_of_deepseeks_experts_those_that_a_token_passes_count() -> None:
    from types import SimpleNamespace

    assert flops.active_share(SimpleNamespace(n_routed_experts=256, num_experts_per_tok=8)) == 8 / 256
    assert flops.active_share(SimpleNamespace(num_local_experts=8, num_experts_per_tok=2)) == 2 / 8
    assert flops.active_share(SimpleNamespace()) == 1.0


def test_4_bit_weights_are_counted_by_their_number_not_by_their_bytes() -> None:
    import torch

    class Params4bit(torch.nn.Parameter):
        """As bitsandbytes has it: two weights in each byte."""

    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **size))
    whole = flops.of_model(model)
    layer = model.model.layers[0].mlp.up_proj
    packed = torch.zeros(layer.weight.numel() // 2, 1, dtype=torch.uint8)
    layer.weight = torch.nn.Parameter._make_subclass(Params4bit, packed, False)
    found = flops.of_model(model)
    assert found.trained + found.frozen == whole.trained
