"""A DeepSpeed configuration agrees with the command line, or the job does not start."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import small
from tests.jobs.conftest import JOBS, SMALL, Launcher, prebuilt
from training import batch as batches
from training import deepspeed as deepspeed_config
from training.errors import JobError
from training.run import RunFolder
from training.settings import Settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "deepspeed.md"
STAGES = {
    **{"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3, "zero2-offload": 2, "zero3-offload": 3},
    **{"zero3-offload-optimizer": 3, "zero3-offload-param": 3, "alps-zero3": 3},
}
SHIPPED = {**STAGES, "alps-deepspeed": 3}  # the last has numbers, as its authors wrote them


def test_these_are_the_presets() -> None:
    assert deepspeed_config.presets() == tuple(sorted(SHIPPED))


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


OFFLOADED = ("zero2-offload", "zero3-offload-optimizer", "zero3-offload")
SECTIONS = {
    "alps-deepspeed": ("alps-deepspeed",),
    "Every preset": STAGES,
    "Stages 1, 2 and 3": [name for name, stage in STAGES.items() if stage > 0],
    "Stages 1 and 2": [name for name, stage in STAGES.items() if stage in (1, 2)],
    "Stages 2 and 3": [name for name, stage in STAGES.items() if stage in (2, 3)],
    "Stage 3": [name for name, stage in STAGES.items() if stage == 3],
    "Optimizer offload": OFFLOADED,
    "Weight offload": ("zero3-offload-param", "zero3-offload"),
    "alps-zero3": ("alps-zero3",),
}


def explained(preset: str) -> dict[str, str]:
    """The lines of a preset that the page explains, each with a reason, and its stage."""
    page = PAGE.read_text()
    stage = re.search(rf"^\| `{preset}` \| `(\d)` \| .{{10,}} \|$", page, re.MULTILINE)
    found = {"zero_optimization.stage": stage[1] if stage else ""}
    for heading in (heading for heading, presets in SECTIONS.items() if preset in presets):
        section = page.split(f"\n### {heading}\n", 1)[1].split("\n### ", 1)[0].split("\n## ", 1)[0]
        if preset != "zero2-offload":
            section = section.split("\nOnly `zero2-offload`", 1)[0]
        rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| (.+) \|$", section, re.MULTILINE)
        assert rows and all(len(why) > 10 for _, _, why in rows)
        found |= {key: value for key, value, _ in rows}
    return found


@pytest.mark.parametrize("name", SHIPPED)
def test_the_page_explains_every_line_of_every_preset(name: str) -> None:
    config = json.loads(deepspeed_config.resolve(name).read_text())
    assert explained(name) == dict(lines(config))


def test_a_preset_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(JobError) as caught:
        deepspeed_config.resolve("zero22")
    assert "did you mean 'zero2'?" in caught.value.what
    assert "zero0, zero1, zero2, zero2-offload, zero3" in caught.value.why


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"train_batch_size": 8,}', "is not valid JSON"),
        ("[]", "is not a JSON object"),
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
    with pytest.raises(
        JobError, match="sets train_batch_size = 64, but the settings and the number of processes result in 8"
    ):
        deepspeed_config.batch_conflict(path, {"train_batch_size": 64}, {"train_batch_size": 8})
    deepspeed_config.batch_conflict(path, {"train_batch_size": "auto"}, {"train_batch_size": 8})


def test_keys_that_are_not_known_are_noted(tmp_path: Path) -> None:
    """DeepSpeed ignores most of them: a typo would change nothing without a word."""
    notes = deepspeed_config.unknown_keys(tmp_path / "ds.json", {"zero_optimisation": {}, "steps_per_print": 1})
    assert notes == ["ds.json: DeepSpeed may not know the key 'zero_optimisation' (did you mean 'zero_optimization'?)"]


@pytest.mark.training
def test_the_installed_deepspeed_is_asked_for_the_keys_of_zero(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    config = {"zero_optimization": {"stage": 2, "overlap_com": True}}
    (note,) = deepspeed_config.unknown_keys(tmp_path / "ds.json", config)
    assert "'zero_optimization.overlap_com' (did you mean 'overlap_comm'?)" in note


@pytest.mark.training
@pytest.mark.parametrize("name", SHIPPED)
def test_no_key_of_a_preset_is_noted(name: str) -> None:
    pytest.importorskip("torch")
    path = deepspeed_config.resolve(name)
    assert deepspeed_config.unknown_keys(path, deepspeed_config.read(path)) == []


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


ALPS = json.loads((JOBS / "deepspeed" / "alps-deepspeed.json").read_text())


def test_keys_that_would_break_a_restart_are_left_out_with_a_note_each(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    config = {**ALPS, "checkpoint": {**ALPS["checkpoint"], "tag_validation": "Warn"}}
    path.write_text(json.dumps(config))
    chosen = settings(tmp_path, deepspeed=str(path))
    notes = deepspeed_config.settle(chosen, BATCH, run_folder(tmp_path))
    for key in ("load_universal", "use_node_local_storage"):
        assert len([note for note in notes if f"checkpoint.{key} is ignored" in note]) == 1
    used = json.loads(Path(chosen["deepspeed"]).read_text())
    assert used == {**config, "checkpoint": {"tag_validation": "Warn"}}
    assert json.loads(path.read_text()) == config


@pytest.mark.parametrize(("default", "said"), [(0.0, "are not clipped"), (2.0, "are clipped to 2"), (1.0, "")])
def test_gradients_are_clipped_as_the_argument_says_where_the_file_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default: float, said: str
) -> None:
    """The trainer leaves it to DeepSpeed, whose own default depends on its version."""
    monkeypatch.setattr(deepspeed_config, "default_clipping", lambda: default)
    path = tmp_path / "ds.json"
    path.write_text("{}")
    chosen = settings(tmp_path, deepspeed=str(path))
    notes = deepspeed_config.settle(chosen, BATCH, run_folder(tmp_path))
    assert len(notes) == bool(said) and said in "".join(notes) and chosen["deepspeed"] == str(path)
    chosen = settings(tmp_path, deepspeed=str(path), max_grad_norm=0.5)
    assert deepspeed_config.settle(chosen, BATCH, run_folder(tmp_path)) == ()
    assert json.loads(Path(chosen["deepspeed"]).read_text()) == {"gradient_clipping": 0.5}
    assert path.read_text() == "{}"


def test_an_argument_sets_what_the_section_of_an_optimizer_or_scheduler_leaves_out(tmp_path: Path) -> None:
    """DeepSpeed's defaults would count: a learning rate of 0.001, for one."""
    path = tmp_path / "ds.json"
    optimizer = {"type": "AdamW", "params": {"lr": 1e-5}}
    clip = {"gradient_clipping": 1.0}
    path.write_text(json.dumps({"optimizer": optimizer, "scheduler": {"type": "WarmupLR"}, **clip}))
    chosen = settings(tmp_path, deepspeed=str(path), weight_decay=0.1, adam_beta2=0.95, warmup_steps=10)
    deepspeed_config.settle(chosen, BATCH, run_folder(tmp_path))
    assert json.loads(Path(chosen["deepspeed"]).read_text()) == {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        **clip,
    }
    path.write_text(json.dumps({"optimizer": {"type": "SGD"}, **clip}))
    chosen = settings(tmp_path, deepspeed=str(path), adam_beta2=0.95)
    deepspeed_config.settle(chosen, BATCH, run_folder(tmp_path))
    assert chosen["deepspeed"] == str(path)


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (ALPS, {"activation_checkpointing.partition_activations", "zero_optimization.allgather_bucket_size",
                "activation_checkpointing.contiguous_memory_optimization"}),
        ({"zero_optimization": {"stage": 2, "allgather_bucket_size": 10}}, set()),
        ({"activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": True}},
         {"activation_checkpointing.cpu_checkpointing"}),
    ],
)  # fmt: skip
def test_keys_without_effect_give_one_note_each(tmp_path: Path, config: dict[str, Any], keys: set[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    notes = deepspeed_config.settle(settings(tmp_path, deepspeed=str(path)), BATCH, run_folder(tmp_path))
    found = [note.split()[1] for note in notes if "has no effect: " in note]
    assert sorted(found) == sorted(keys)


def taken(tmp_path: Path, config: Mapping[str, Any], **values: Any) -> Settings:
    """The settings after the file's values have become arguments; `values` are given on the command line."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    defaults: dict[str, Any] = {
        "bf16": False, "fp16": False, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
        "global_batch_size": None, "learning_rate": 5e-5, "micro_batch": None, "adam_beta2": 0.999,
    }  # fmt: skip
    chosen = Settings({**settings(tmp_path).values, **defaults, **values, "deepspeed": str(path)}, {})
    chosen.sources |= {name: "command line" for name in (*values, "deepspeed")}
    deepspeed_config.take_arguments(chosen)
    return chosen


def test_values_of_the_file_become_the_arguments(tmp_path: Path) -> None:
    """The trainer refuses a difference; nobody has to repeat on the command line what the file says."""
    chosen = taken(
        tmp_path, {**ALPS, "gradient_clipping": 0.5, "optimizer": {"params": {"lr": 1e-5, "betas": [0.9, 0.95]}}}
    )
    found = {
        name: chosen[name]
        for name in ("bf16", "per_device_train_batch_size", "max_grad_norm", "learning_rate", "adam_beta2")
    }
    assert found == {
        "bf16": True, "per_device_train_batch_size": 1, "max_grad_norm": 0.5, "learning_rate": 1e-5, "adam_beta2": 0.95
    }  # fmt: skip
    assert chosen.sources["bf16"] == "DeepSpeed file ds.json: bf16.enabled"
    chosen.default({"bf16": False}, "script: no GPU")
    assert chosen["bf16"] is True, "a value of the file counts as one of the user's"


@pytest.mark.parametrize(
    ("config", "words", "expected"),
    [
        ({"train_batch_size": 64}, {}, {"global_batch_size": 64, "gradient_accumulation_steps": 1}),
        ({"train_batch_size": 64}, {"gradient_accumulation_steps": 4}, {"global_batch_size": None}),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, {}, {"global_batch_size": None}),
        ({"gradient_accumulation_steps": 4}, {"global_batch_size": 64}, {"gradient_accumulation_steps": 1}),
        ({"train_micro_batch_size_per_gpu": 2}, {"micro_batch": "2"}, {"per_device_train_batch_size": 8}),
    ],
)
def test_the_files_numbers_of_the_batch_do_not_exclude_each_other(
    tmp_path: Path, config: dict[str, Any], words: dict[str, Any], expected: dict[str, Any]
) -> None:
    chosen = taken(tmp_path, config, **words)
    assert {name: chosen[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("config", "words", "what"),
    [
        ({"bf16": {"enabled": True}}, {"bf16": False}, "sets bf16.enabled = true, but --bf16 is False"),
        ({"train_micro_batch_size_per_gpu": 1}, {"per_device_train_batch_size": 4}, "per_device_train_batch_size is 4"),
        ({"fp16": {"enabled": True}}, {"bf16": True}, "sets fp16.enabled = true, but --bf16 is True"),
        ({"train_micro_batch_size_per_gpu": 1}, {"micro_batch": "4"}, "= 1, but --micro_batch is 4"),
        ({"train_batch_size": 64}, {"micro_batch": "auto"}, "= 64, but --micro_batch is auto"),
        ({"optimizer": {"params": {"lr": 1e-5}}}, {"learning_rate": 1e-4}, "= 1e-05, but --learning_rate is 0.0001"),
    ],
)  # fmt: skip
def test_an_argument_that_the_file_sets_to_another_value_is_refused(
    tmp_path: Path, config: dict[str, Any], words: dict[str, Any], what: str
) -> None:
    with pytest.raises(JobError) as caught:
        taken(tmp_path, config, **words)
    assert what in caught.value.what and '"auto"' in caught.value.fix


@pytest.mark.training
@pytest.mark.parametrize("script", ["clm.py", "sft.py"])
def test_the_file_from_alps_trains_as_it_is(script: str, launcher: Launcher, tmp_path: Path) -> None:
    """No other argument names bf16 or the batch. The final model, which this file leaves in shards, answers."""
    own = (
        "--per_device",
        "--gradient_ch",
        "--activation_ch",
        *(() if script == "sft.py" else ("--pack", "--max_l", "--dataset")),
    )
    typed = [word for word in (*SMALL, "--max_steps=2", "--save_steps=2") if not word.startswith(own)]
    of_clm = (f"--dataset_name={small.TEXTS}", "--block_size=32", "--save_strategy=no")
    typed += ["--deepspeed=alps-deepspeed", *(() if script == "sft.py" else of_clm)]
    attempt = replace(launcher, script=script).finish(tmp_path, *typed)
    assert attempt.code == 0, attempt.output
    assert (attempt.output.count("is ignored: "), attempt.output.count("has no effect: ")) == (2, 3)
    assert "precision: bf16" in attempt.output and "batch: 1 per process x 1 accumulation x 2" in attempt.output
    assert "activations: recomputed" in attempt.output
    assert len(attempt.losses) == 2
    assert_shards_answer(launcher, tmp_path)
    if script == "sft.py":  # started again after its last step, without its final model: the shards are copied
        final = tmp_path / "checkpoints" / "final"
        shards = {path.relative_to(final) for path in final.rglob("*.pt")}
        shutil.rmtree(final)
        again = launcher.finish(tmp_path, *typed, "--allow_old_torch_load=true", attempt=2)
        assert again.code == 0 and "step 2 was the last step" in again.output, again.output
        assert {path.relative_to(final) for path in final.rglob("*.pt")} == shards != set()


def assert_shards_answer(launcher: Launcher, run: Path) -> None:
    """The final model of the run consists of shards, and generates text."""
    asked = (sys.executable, str(JOBS / "generate.py"), str(run), "--prompt=a", "--max_new_tokens=2")
    done = subprocess.run(asked, env=launcher.environment(run), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "ZeRO checkpoint" in done.stderr, done.stderr


HEAVIER = ("zero3-offload", "alps-zero3")
OTHERS = tuple(sorted(set(STAGES) - set(HEAVIER)))
TWO_STEPS = (*SMALL, "--max_steps=2", "--save_strategy=no")


@pytest.mark.training
@pytest.mark.parametrize("name", [*HEAVIER, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_preset_takes_two_steps_of_two_processes(name: str, launcher: Launcher, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    if "offload" in name and not prebuilt("cpu_adam"):
        pytest.skip("DeepSpeed would compile its Adam for CPUs first: minutes on both cores; images have it built")
    attempt = launcher.forked(tmp_path, *TWO_STEPS, f"--deepspeed={name}")
    assert attempt.code == 0, attempt.output
    assert sorted(attempt.losses) == [1, 2]
    assert attempt.losses[2] < attempt.losses[1] + 0.5
