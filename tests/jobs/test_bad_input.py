"""What a user gets wrong ends in one error from one process, with exit code 1, and nobody waits for the others."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.training

from types import SimpleNamespace  # noqa: E402

import sft  # noqa: E402
from tests.jobs.conftest import SMALL, Launcher  # noqa: E402
from training import processes  # noqa: E402
from training import run as run_folder  # noqa: E402
from training.errors import JobError  # noqa: E402

TWO = processes.Processes(0, 0, 2, 2, "torchrun")


def read(folder: Path, *words: str):
    run = run_folder.from_environment({"RUNNER_RUN": str(folder)}, "sft")
    return sft.read_arguments(words, SimpleNamespace(run=run, processes=TWO))


def rows(path: Path, *lines: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize(
    ("given", "what", "why"),
    [
        pytest.param(
            lambda folder: [f"--dataset_name={rows(folder / 'd.jsonl', {'txt': 'hello'})}"],
            "has no column to train on (did you mean 'txt'?)",
            "it has 'txt', but needs 'messages'",
            id="wrong column, found after the process group is there",
        ),
        pytest.param(
            lambda folder: ["--per_device_train_batch_size=4", "--global_batch_size=12"],
            "a global batch of 12 sequences cannot be split evenly",
            "4 per process x 2 processes = 8 per pass",
            id="batch that does not divide, found before",
        ),
    ],
)
def test_one_rank_says_it_and_all_end_with_1(
    launcher: Launcher, tmp_path: Path, given: Callable[[Path], list[str]], what: str, why: str
) -> None:
    attempt = launcher.sft(tmp_path, *SMALL, *given(tmp_path), seconds=150)
    assert attempt.code == 1
    assert attempt.output.count("because:") == 1, attempt.output
    assert attempt.output.count("sft: ") <= 2, "the start-up line and the error"
    assert what in attempt.output
    assert why in attempt.output
    assert "sft.py FAILED" in attempt.output, "torchrun says so too"
    assert not list(tmp_path.glob("**/checkpoint-*"))
    assert what in (tmp_path / "attempts" / "1" / "error.txt").read_text()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--deepspeed=zero22"], "no DeepSpeed preset or file 'zero22' (did you mean 'zero2'?)"),
        (["--deepspeed={folder}/ds.json"], "is not valid JSON"),
        (["--global_batch_size=8", "--gradient_accumulation_steps=2"], "are both given"),
        (["--learning_rte=1"], "did you mean '--learning_rate'?"),
        (["--dataset=x"], "did you mean '--dataset_name'?"),
        (["--model=x"], "did you mean '--model_name_or_path'?"),
        (["--chat_template=x"], "did you mean '--chat_template_path'?"),
        (["--packing_strategy=best"], "invalid choice"),
        (["--dataset_name="], "no dataset is given"),
        (["--model_name_or_path="], "no model is given"),
    ],
)
def test_arguments_are_refused_before_any_process_waits_for_another(
    tmp_path: Path, words: list[str], expected: str
) -> None:
    (tmp_path / "ds.json").write_text("{")
    with pytest.raises(JobError) as caught:
        read(tmp_path, *SMALL, *(word.format(folder=tmp_path) for word in words))
    assert expected in caught.value.what


def test_the_demo_is_what_no_arguments_mean(tmp_path: Path) -> None:
    settings, batch = read(tmp_path)
    assert (settings["model_name_or_path"], settings["dataset_name"]) == ("tiny-llama", "python-docs")
    assert settings["deepspeed"].endswith("jobs/deepspeed/zero2.json")
    assert settings.sources["deepspeed"] == "demo default 'zero2'"
    assert (batch.sequences, batch.tokens) == (4, 512)
    assert settings["output_dir"] == str(tmp_path / "checkpoints")


def test_nothing_of_the_demo_reaches_a_training_of_the_users_own(tmp_path: Path) -> None:
    settings, _ = read(tmp_path, "--model_name_or_path=some/model", "--dataset_name=some/data")
    assert [name for name, source in settings.sources.items() if source.startswith("demo")] == []
    assert (settings["deepspeed"], settings["max_length"], settings["packing"]) == (None, 1024, False)
