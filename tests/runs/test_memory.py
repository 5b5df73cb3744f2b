"""`runner memory` tells a model's size from its config alone; the parts of an estimate follow the rules of ZeRO."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from runner.cli import run
from runner.errors import RunnerError
from runner.memory.estimate import Plan, Zero, estimate
from runner.memory.shape import GIB, count_weights, find_config, make_shape, memory_bytes, parse_size
from tests.schemas import check

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
# The counts that the publishers give for their weights.
KNOWN = {
    "Llama-3.1-8B": (LLAMA, 8_030_261_248),
    "Llama-2-7b": (
        {**LLAMA, "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000}, 6_738_415_616,
    ),
    "Mistral-7B": ({**LLAMA, "model_type": "mistral", "vocab_size": 32000}, 7_241_732_096),
    "gpt2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024},
        124_439_808,
    ),
    "Qwen2-7B": (
        {**LLAMA, "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
         "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064},
        7_615_616_512,
    ),
    "gemma-2b": (
        {"model_type": "gemma", "hidden_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 8,
         "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 16384, "vocab_size": 256000},
        2_506_172_416,
    ),
    "gpt-neox-20b": (
        {"model_type": "gpt_neox", "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
         "intermediate_size": 24576, "vocab_size": 50432},
        20_554_567_680,
    ),
    "phi-2": (
        {"model_type": "phi", "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32,
         "intermediate_size": 10240, "vocab_size": 51200, "hidden_act": "gelu_new"},
        2_779_683_840,
    ),
    "Phi-3-mini": (
        {"model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 32, "intermediate_size": 8192, "vocab_size": 32064},
        3_821_079_552,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_are_counted_exactly(name: str) -> None:
    config, expected = KNOWN[name]
    assert count_weights(make_shape(config, name)).total == expected


def test_a_config_is_found_as_file_as_folder_and_by_name_in_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--meta-llama--Llama-3.1-8B" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    expected = folder / "config.json"
    assert find_config(str(expected), {}) == expected
    assert find_config(str(folder), {}) == expected
    assert find_config("meta-llama/Llama-3.1-8B", {"HF_HOME": str(tmp_path)}) == expected
    with pytest.raises(RunnerError, match="there is no model 'gpt9'"):
        find_config("gpt9", {"HF_HOME": str(tmp_path)})


@pytest.mark.parametrize(
    ("model", "fix"),
    [
        ("gpt9", "hf download gpt9 config.json"),
        ("a/gpt-9.1", "hf download a/gpt-9.1 config.json"),
        *((path, "check the path") for path in ("./nope/config.json", "/nope", "~/nope", "a/b/config.json", "nope/")),
    ],
)
def test_only_a_model_of_the_hub_can_be_downloaded(tmp_path: Path, model: str, fix: str) -> None:
    with pytest.raises(RunnerError) as raised:
        find_config(model, {"HF_HOME": str(tmp_path)})
    assert raised.value.fix == f"{fix}, or give flags such as --hidden_size instead"


def test_a_prefetched_model_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`runner prefetch` downloads into the shared cache of the runs, unless HF_HOME or RUNNER_CACHE is set."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "RUNNER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RUNNER_RUNS", str(tmp_path / "runs"))
    words = ["memory", "--site", "local", "meta-llama/Llama-3.1-8B"]
    assert run(words) == 1
    looked_in = capsys.readouterr().err
    for name, home in (("", tmp_path / "runs/.cache/huggingface"), ("RUNNER_CACHE", tmp_path / "shared/huggingface")):
        folder = home / "hub/models--meta-llama--Llama-3.1-8B/snapshots/abc"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(LLAMA))
        if name:
            monkeypatch.setenv(name, str(home.parent))
        else:
            assert f"no config.json of such a model in {tmp_path}/.cache/huggingface/hub or {home}/hub" in looked_in
        assert run(words) == 0
        assert "8,030,261,248 parameters" in capsys.readouterr().err
        (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": "mamba"}, "cannot estimate the memory of"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"hidden_size": None}, "does not set hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers cannot be -1"),
    ],
)
def test_what_no_paper_covers_is_refused(change: dict[str, object], expected: str) -> None:
    with pytest.raises(RunnerError, match=expected):
        make_shape({**LLAMA, **change}, "a model")


SHAPE = make_shape(LLAMA, "Llama-3.1-8B")
PLAN = Plan(gpus=8, micro_batch=1, length=4096)
WEIGHTS = 8_030_261_248


def test_states_are_split_as_each_stage_says() -> None:
    """Mixed precision: 2 bytes of weights, 12 of optimizer per parameter, and what the stage splits over 8 GPUs."""
    of = {
        stage: estimate(SHAPE, Zero(f"zero{stage}", stage=stage, reduce_bucket=1, persistence=0), PLAN)
        for stage in range(4)
    }
    assert of[0].optimizer == 12 * WEIGHTS
    assert {of[stage].optimizer for stage in (1, 2, 3)} == {12 * WEIGHTS // 8}
    assert {of[stage].weights for stage in (0, 1, 2)} == {2 * WEIGHTS}
    assert of[3].weights < 2 * WEIGHTS / 4
    assert of[3].total < of[2].total <= of[1].total < of[0].total


def test_offload_moves_states_to_the_host() -> None:
    plain = estimate(SHAPE, Zero("zero3", stage=3), PLAN)
    moved = estimate(SHAPE, Zero("zero3-offload", stage=3, offload_optimizer=True, offload_param=True), PLAN)
    assert moved.optimizer == 0
    assert moved.host >= 12 * WEIGHTS // 8
    assert moved.total < plain.total - 11 * WEIGHTS // 8


def test_activations_grow_with_the_micro_batch_and_shrink_with_checkpointing() -> None:
    zero = Zero("zero3", stage=3)
    one, two = (estimate(SHAPE, zero, replace(PLAN, micro_batch=micro)) for micro in (1, 2))
    assert two.activations == 2 * one.activations
    assert estimate(SHAPE, zero, replace(PLAN, checkpointing=True)).activations < one.activations / 10
    eager = estimate(SHAPE, zero, replace(PLAN, attention="eager"))
    assert eager.activations - one.activations > 32 * 32 * 4096 * 4096 * 6


def test_lora_trains_a_part() -> None:
    zero = Zero("zero2", stage=2, reduce_bucket=1)
    assert count_weights(SHAPE, lora_r=16).lora == 41_943_040  # what peft counts for rank 16 on all linear layers
    assert estimate(SHAPE, zero, replace(PLAN, lora_r=16)).optimizer == 12 * 41_943_040 // 8


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("H100", 79),
        ("NVIDIA A10G", 22),
        ("NVIDIA GH200", 94),
        ("A100-80GB", 79),
        ("NVIDIA A100 80GB", 79),
        ("A100", 39),
    ],
)
def test_a_gpu_is_known_by_its_name(name: str, gib: int) -> None:
    assert memory_bytes(name) == gib * GIB


def test_sizes_are_read() -> None:
    assert parse_size("80") == parse_size("80GiB") == parse_size("80 G") == 80 * GIB
    assert parse_size("80GB") == 80 * 10**9
    with pytest.raises(RunnerError):
        parse_size("much")


def test_the_answer_is_a_table_or_json_and_says_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    words = ["memory", str(config), "--gpus", "8", "--gpu", "H100", "--length", "4096", "--micro-batch", "1,2"]
    assert run([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["parameters"] == WEIGHTS
    assert [(each["zero"], each["micro_batch"]) for each in answer["estimates"]] == [
        (f"zero{stage}", micro) for stage in range(4) for micro in (1, 2)
    ]
    assert [each["fits"] for each in answer["estimates"] if each["stage"] in (0, 3)] == [False, False, True, False]
    assert run(words) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[-1] == "FITS"
    assert len(out) == 9
    assert run([*words, "--gpu_memory", "10GiB"]) == 1


def test_shape_flags_stand_for_a_config_or_change_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [word for name, value in LLAMA.items() if name != "model_type" for word in (f"--{name}", str(value))]
    assert run(["memory", *flags, "--json", "--micro_batch", "1"]) == 0
    assert check("memory", capsys.readouterr().out)["parameters"] == WEIGHTS
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    assert run(["memory", str(config), "--num_hidden_layers", "16", "--json", "--micro_batch", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 16 * 218_112_000 + 2 * 128256 * 4096 + 4096


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--length", "9000"], "too long for the model"),
        (["--micro-batch", "1,x"], "is not a list of numbers"),
        (["--deepspeed", "zero9"], "zero9"),
        (["--gpus", "0"], "--gpus 0"),
        (["--gpu", "Voodoo"], "does not know the memory size of GPU 'Voodoo'"),
    ],
)
def test_bad_words_are_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    assert run(["memory", str(config), *words]) in (1, 2)
    assert expected in capsys.readouterr().err
