"""Train, convert, generate: three launches at once, each of which starts when the one before has ended well."""

import os
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Runner

SMALL = ("--max_steps", "2", "--per_device_train_batch_size", "1", "--global_batch_size", "1", "--max_length", "64")


@pytest.mark.training
def test_a_training_is_converted_and_asked_without_anybody_waiting(cluster: Runner) -> None:
    for package in ("torch", "trl", "deepspeed"):
        pytest.importorskip(package, reason=f"{package} is not installed beside the tests")
    path = f"{Path(sys.executable).parent}{os.pathsep}{cluster.environ['PATH']}"
    runner = Runner(cluster.project, {**cluster.environ, "PATH": path, "OMP_NUM_THREADS": "1"}, cluster.site)
    words = ("--env", "plain", "--engine", "host", "--time", "30", "--script")
    train = runner.launch(*words, "sft", "--launcher", "none", "--tasks-per-node", "1", "--", *SMALL)
    convert = runner.launch(*words, "convert", "--after", train.name, "--", "--dtype", "bfloat16")
    answer = runner.launch(
        *words, "generate", "--after", convert.name, "--", "--prompt", "json", "--max_new_tokens", "3"
    )
    ended = runner.wait(answer.name, lambda one: one["state"] not in ("PENDING", "RUNNING", "COMPLETING"), 900)
    logs = {folder.name: (folder / "job.log").read_text()[-3000:] for folder in (train, convert, answer)
            if (folder / "job.log").exists()}  # fmt: skip
    assert ended["state"] == "COMPLETED", logs
    assert (convert / "checkpoints/final/model.safetensors").is_file()
    assert not list(train.glob("model*")), "the run before is only read"
    assert f"{convert}/checkpoints/final" in logs[answer.name]
