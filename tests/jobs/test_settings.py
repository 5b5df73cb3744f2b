"""Each value of a job has one source, and a mistake in its name is told with the nearest right one."""

import argparse
import json
from pathlib import Path

import pytest

from training import settings
from training.errors import JobError


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    made.add_argument("--learning_rate", "--learning-rate", type=float, default=0.1)
    made.add_argument("--max_steps", type=int, default=5)
    made.add_argument("--hub_token", default=None)
    made.add_argument("--dtype", choices=["bfloat16", "float32"])
    made.add_argument("--save_strategy", choices=["no", "steps"], default="steps")
    made.add_argument("--variables", nargs="+", default=[])
    made.add_argument("--no_packing", dest="packing", action="store_false", default=True)
    return made


def test_the_command_line_beats_the_config_and_the_config_beats_defaults(tmp_path: Path) -> None:
    config = tmp_path / "sft.yaml"
    config.write_text("learning_rate: 0.5\nmax_steps: 7\n")
    found = settings.parse(parser(), ["--config", str(config), "--max_steps=9"])
    found.default({"max_steps": 1, "packing": False, "unheard_of": 1}, "script")
    assert (found["learning_rate"], found["max_steps"], found["packing"]) == (0.5, 9, False)
    assert found.sources == {
        "learning_rate": f"config {config}",
        "max_steps": "command line",
        "packing": "script",
        **dict.fromkeys(("hub_token", "dtype", "save_strategy", "variables"), "library default"),
    }


def test_what_the_user_negates_stays_negated() -> None:
    found = settings.parse(parser(), ["--no_packing"])
    found.default({"packing": True}, "script")
    assert found["packing"] is False


def test_settings_are_written_with_their_sources_and_without_secrets(tmp_path: Path) -> None:
    found = settings.parse(parser(), ["--hub_token", "hf_abc", "--learning-rate", "1"])
    found.write(tmp_path / "settings.json")
    text = (tmp_path / "settings.json").read_text()
    written = json.loads(text)
    assert written["learning_rate"] == {"value": 1.0, "source": "command line"}
    assert written["hub_token"] == {"value": "(hidden)", "source": "command line"}
    assert "hf_abc" not in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--learning_rte", "1"], "did you mean '--learning_rate'?"),
        (["--max_steps", "many"], "invalid int value: 'many'"),
        (["stray"], "unknown argument 'stray'"),
        (["--config"], "argument --config: expected one argument"),
        (["--config=/nowhere.yaml"], "cannot read the config '/nowhere.yaml'"),
    ],
)
def test_a_bad_command_line_is_an_error_not_a_usage_text(words: list[str], expected: str) -> None:
    with pytest.raises(JobError) as caught:
        settings.parse(parser(), words)
    assert expected in caught.value.what


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_step: 3", "did you mean 'max_steps'?"),
        ("- 1", "not a mapping"),
        ("a: [", "is not valid YAML"),
        ("dtype: bf16", "dtype cannot be 'bf16' (did you mean 'bfloat16'?)"),
        ("dtype: false", "dtype cannot be False"),
        ("max_steps: 2.5", "max_steps cannot be 2.5"),
        ("max_steps: ten", "invalid int value: 'ten'"),
    ],
)
def test_a_bad_config_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    config = tmp_path / "sft.yaml"
    config.write_text(text)
    with pytest.raises(JobError) as caught:
        settings.parse(parser(), ["--config", str(config)])
    assert expected in caught.value.what


def test_a_value_of_a_config_means_what_it_means_on_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "sft.yaml"
    lines = ("save_strategy: no", "max_steps: 1.0e+3", "variables: EPOCHS=num_train_epochs", "learning_rate: 1e-4")
    config.write_text("\n".join(lines))
    found = settings.parse(parser(), ["--config", str(config)])
    expected = {"save_strategy": "no", "max_steps": 1000, "variables": ["EPOCHS=num_train_epochs"]}
    assert {name: found[name] for name in expected} == expected
    assert isinstance(found["max_steps"], int) and found["learning_rate"] == 1e-4


def test_a_command_line_overrides_what_a_config_says_by_another_name(tmp_path: Path) -> None:
    config = tmp_path / "sft.yaml"
    config.write_text("max_steps: 7\n")
    found = settings.parse(parser(), ["--config", str(config), "--learning_rate=1"])
    assert found.overrides("learning_rate", "max_steps")
    assert not found.overrides("max_steps", "learning_rate")
    assert not found.overrides("learning_rate", "hub_token"), "it is not given"
