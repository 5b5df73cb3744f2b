"""A DeepSpeed configuration is checked key by key before anything slow starts."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.conftest import JOBS, SMALL, Launcher, prebuilt
from training import batch as batches
from training import deepspeed as deepspeed_config
from training import deepspeed_contradictions as contradictions
from training import known_keys
from training.errors import JobError
from training.run import RunFolder
from training.settings import Settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "deepspeed.md"
STAGES = {
    **{"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3, "zero2-offload": 2, "zero3-offload": 3},
    **{"zero3-offload-optimizer": 3, "zero3-offload-param": 3, "alps-zero3": 3},
}


def test_these_are_the_presets() -> None:
    assert deepspeed_config.presets() == tuple(sorted(STAGES))


@pytest.mark.parametrize(("name", "stage"), STAGES.items())
def test_each_preset_is_valid_and_of_its_stage(name: str, stage: int) -> None:
    config = deepspeed_config.read(deepspeed_config.resolve(name))
    assert deepspeed_config.stage(config) == stage
    assert {config[key] for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping")} == {
        "auto"
    }


def lines(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, value as JSON) of every line of a configuration."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from lines(value, f"{prefix}{key}.")
        else:
            yield prefix + key, json.dumps(value)


def explained(heading: str) -> dict[str, str]:
    """The lines that the page explains below a heading; each has a reason."""
    section = PAGE.read_text().split(f"\n### {heading}\n", 1)[1].split("\n### ", 1)[0]
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| (.+) \|$", section, re.MULTILINE)
    assert all(len(why) > 10 for _, _, why in rows)
    return {key: value for key, value, _ in rows}


@pytest.mark.parametrize("name", STAGES)
def test_the_page_explains_every_line_of_every_preset(name: str) -> None:
    config = json.loads(deepspeed_config.resolve(name).read_text())
    assert {**explained("Every preset"), **explained(name)} == dict(lines(config))


@pytest.mark.training
def test_the_keys_that_are_accepted_are_those_that_deepspeed_reads() -> None:
    """Every key that we let pass occurs as a word in DeepSpeed's own sources."""
    pytest.importorskip("torch")
    from packaging.version import Version

    import deepspeed

    if Version(deepspeed.__version__) < Version("0.19.8"):
        pytest.skip(f"the list is DeepSpeed 0.19.8's, this is the older {deepspeed.__version__}")
    sources = "\n".join(path.read_text() for path in Path(deepspeed.__file__).parent.rglob("*.py"))
    assert [
        key for key in known_keys.TOP_LEVEL_KEYS.union(*known_keys.SECTION_KEYS.values()) if key not in sources
    ] == []


def test_a_preset_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(JobError) as caught:
        deepspeed_config.resolve("zero22")
    assert "did you mean 'zero2'?" in caught.value.what
    assert "zero0, zero1, zero2, zero2-offload, zero3" in caught.value.why


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"train_batch_size": 8,}', "is not JSON"),
        ("[]", "holds no JSON object"),
        ('{"zero_optimisation": {}}', "did you mean 'zero_optimization'?"),
        ('{"bf16": {"enabled": true}, "fp16": {"enabled": true}}', "both bf16 and fp16"),
        ('{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}', "offload_param with stage 2"),
        ('{"zero_optimization": {"stage": 4}}', "stage is 4"),
        ('{"zero_optimization": true}', "zero_optimization is True, no table"),
        ('{"bf16": {"enabled": "yes"}}', "bf16.enabled is 'yes'"),
        ('{"bf16": {"enable": true}}', "no key 'bf16.enable' (did you mean 'enabled'?)"),
        ('{"fp16": {"los_scale": 0}}', "(did you mean 'loss_scale'?)"),
        ('{"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}', "no key 'optimizer.params.learning_rate'"),
        ('{"train_batch_size": 8, "train_batch_size": 8}', "stands twice"),
        ('{"train_batch_size": "8"}', "train_batch_size is '8'"),
        (
            '{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}',
            "10 is no multiple of 4 x 1",
        ),
        ('{"load_universal": true}', "load_universal stands in the top level; DeepSpeed reads it in checkpoint"),
        ('{"checkpoint": {"load_universal": true}}', "checkpoint.load_universal is set"),
        (
            '{"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}',
            "offload_optimizer with stage 0",
        ),
        (
            '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
            "offload_optimizer without an optimizer section",
        ),
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}',
            "nvme_path is missing",
        ),
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pinned": true}}}',
            "no key 'zero_optimization.offload_param.pinned'",
        ),
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


@pytest.mark.training
def test_a_key_in_the_wrong_place_is_told_its_place(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "ds.json"
    path.write_text('{"overlap_comm": true}')
    with pytest.raises(JobError, match="reads it in zero_optimization"):
        deepspeed_config.read(path)


BATCH = batches.plan(1, 1, 1, 128, None)


def settings(tmp_path: Path, **values: Any) -> Settings:
    defaults = {"max_grad_norm": 1.0, "activation_checkpointing": False, "output_dir": str(tmp_path / "checkpoints")}
    return Settings({**defaults, **values}, {name: "command line" for name in values})


def run_folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path, tmp_path / "attempts" / "1", tmp_path / "flag", tmp_path / "cache", by_hand=False)


def test_the_alps_preset_turns_activation_checkpointing_on_unless_told_otherwise(tmp_path: Path) -> None:
    chosen = settings(tmp_path, deepspeed="alps-zero3")
    assert deepspeed_config.settle(chosen, BATCH, run_folder(tmp_path)) == ()
    assert chosen["activation_checkpointing"] is True
    assert chosen.sources["activation_checkpointing"] == "alps-zero3.json: activation_checkpointing"
    told = settings(tmp_path, deepspeed="alps-zero3", activation_checkpointing=False)
    deepspeed_config.settle(told, BATCH, run_folder(tmp_path))
    assert told["activation_checkpointing"] is False


def test_shards_on_the_nodes_disks_are_refused_in_a_run_that_restarts(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"checkpoint": {"use_node_local_storage": true}}')
    run = run_folder(tmp_path)
    with pytest.raises(JobError, match="use_node_local_storage, and checkpoints go to /scratch-of-a-node"):
        deepspeed_config.settle(settings(tmp_path, deepspeed=str(path), output_dir="/scratch-of-a-node"), BATCH, run)
    # In the run folder every node's shards are seen by the next attempt; by hand nothing restarts.
    deepspeed_config.settle(settings(tmp_path, deepspeed=str(path)), BATCH, run)
    by_hand = replace(run, by_hand=True)
    deepspeed_config.settle(settings(tmp_path, deepspeed=str(path), output_dir="/scratch-of-a-node"), BATCH, by_hand)


def test_what_changes_nothing_is_said() -> None:
    config = {"activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": False}}
    assert [line.split()[0] for line in contradictions.without_effect(config)] == [
        "activation_checkpointing.cpu_checkpointing"
    ]


HEAVIER = ("zero3-offload", "alps-zero3")
OTHERS = tuple(sorted({path.stem for path in (JOBS / "deepspeed").glob("*.json")} - set(HEAVIER)))
TWO_STEPS = (*SMALL, "--max_steps=2", "--save_strategy=no")


@pytest.mark.training
@pytest.mark.parametrize("name", [*HEAVIER, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_preset_takes_two_steps_of_two_processes(name: str, launcher: Launcher, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    if "offload" in name and not prebuilt("cpu_adam"):
        pytest.skip("DeepSpeed would compile its Adam for CPUs first: minutes on both cores; images have it built")
    attempt = launcher.sft(tmp_path, *TWO_STEPS, f"--deepspeed={name}")
    assert attempt.code == 0, attempt.output
    assert sorted(attempt.losses) == [1, 2]
    assert attempt.losses[2] < attempt.losses[1] + 0.5
