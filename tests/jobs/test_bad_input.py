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
from training import arguments, processes  # noqa: E402
from training import run as run_folder  # noqa: E402
from training.errors import JobError  # noqa: E402

TWO = processes.Processes(0, 0, 2, 2, "torchrun")


def read(folder: Path, *words: str) -> SimpleNamespace:
    """Return the job once its arguments are read."""
    run = run_folder.from_environment({"RUNNER_RUN": str(folder), "RUNNER_CACHE": str(folder / "cache")}, "sft")
    job = SimpleNamespace(script="sft", run=run, processes=TWO)
    sft.read_arguments(arguments.or_demo(words, job), job)
    return job


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
    """Its config is that of a file which anybody could have written; other arguments than model and data beat it."""
    job = read(tmp_path, "--max_steps=7", "--micro_batch=4")
    settings = job.settings
    folder = Path(settings["model_name_or_path"]).parent
    assert folder.parent == tmp_path / "cache"
    assert Path(settings["model_name_or_path"], "model.safetensors").is_file()
    assert settings["dataset_name"] == str(folder / "python-docs.jsonl")
    assert settings["deepspeed"].endswith("jobs/deepspeed/zero2.json")
    assert settings.sources["deepspeed"] == f"config {folder}/sft.yaml 'zero2'"
    assert (settings["max_steps"], settings.sources["max_steps"]) == (7, "command line")
    assert (job.batch.sequences, job.batch.tokens) == (8, 1024)
    assert settings["output_dir"] == str(tmp_path / "checkpoints")


@pytest.mark.parametrize("given", ["--model_name_or_path=some/model", "--dataset-name=some/data"])
def test_with_half_of_what_a_training_needs_it_is_not_the_demo(tmp_path: Path, given: str) -> None:
    with pytest.raises(JobError, match=r"no (model|dataset) is given"):
        read(tmp_path, given)
    assert not (tmp_path / "cache").exists()


def test_nothing_of_the_demo_reaches_a_training_of_the_users_own(tmp_path: Path) -> None:
    settings = read(tmp_path, "--model_name_or_path=some/model", "--dataset_name=some/data").settings
    assert {source.split(":")[0] for source in settings.sources.values()} <= {
        "command line", "library default", "script", "RUNNER_RUN"}  # fmt: skip
    assert (settings["deepspeed"], settings["max_length"], settings["packing"]) == (None, 1024, False)
