"""A DeepSpeed configuration is checked key by key before anything slow starts."""

import json
from pathlib import Path

import pytest

from training.errors import JobError
from training.zero import deepspeed_config


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_preset_is_valid_and_of_its_stage(stage: int) -> None:
    config = deepspeed_config.read(deepspeed_config.resolve(f"zero{stage}"))
    assert deepspeed_config.stage(config) == stage
    assert {config[key] for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping")} == {
        "auto"
    }


@pytest.mark.training
def test_the_keys_that_are_accepted_are_those_that_deepspeed_reads() -> None:
    """Every key that we let pass occurs as a word in DeepSpeed's own sources."""
    pytest.importorskip("torch")
    import deepspeed

    sources = "\n".join(path.read_text() for path in Path(deepspeed.__file__).parent.rglob("*.py"))
    assert [key for key in deepspeed_config.TOP_LEVEL_KEYS if key not in sources] == []


def test_a_preset_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(JobError) as caught:
        deepspeed_config.resolve("zero22")
    assert "did you mean 'zero2'?" in caught.value.what
    assert "zero0, zero1, zero2, zero3" in caught.value.why


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"train_batch_size": 8,}', "is not JSON"),
        ("[]", "holds no JSON object"),
        ('{"zero_optimisation": {}}', "did you mean 'zero_optimization'?"),
        ('{"bf16": {"enabled": true}, "fp16": {"enabled": true}}', "both bf16 and fp16"),
        ('{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}', "offload_param with stage 2"),
    ],
)
def test_a_broken_configuration_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(JobError) as caught:
        deepspeed_config.read(path)
    assert expected in caught.value.what


def test_a_number_that_the_command_line_makes_another_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    with pytest.raises(JobError, match="train_batch_size = 64, the command line makes it 8"):
        deepspeed_config.batch_conflict(path, {"train_batch_size": 64}, {"train_batch_size": 8})
    deepspeed_config.batch_conflict(path, {"train_batch_size": "auto"}, {"train_batch_size": 8})


@pytest.mark.training
def test_an_unknown_zero_key_is_refused_by_the_installed_deepspeed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, "overlap_com": True}}))
    with pytest.raises(JobError, match=r"zero_optimization\.overlap_com' \(did you mean 'overlap_comm'\?\)"):
        deepspeed_config.read(path)
