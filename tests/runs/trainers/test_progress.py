"""A program that knows nothing of runner has progress: its steps and losses are read from its log."""

import json
import subprocess
from pathlib import Path
from typing import Any

from runner.project import Project
from runner.runs import metrics, trainer
from tests.runs.scripts import run_locally, shell_job, write_run

QUICK = {"RUNNER_WATCH_SECONDS": "1"}
NO_PROJECT = Project(None, Path("/none"), Path("/none"))


def trainer_run(folder: Path, text: str, chosen: str | None = None, **fields: Any) -> Path:
    """A run folder of a shell job, with the patterns of the chosen trainer, or of all."""
    run = write_run(folder, shell_job(text, **fields))
    (run / trainer.FILE).write_text(trainer.render(chosen, NO_PROJECT))
    return run


def start(run: Path) -> int:
    """Run the job as the site `local` does, with its output in job.log. Returns the exit code."""
    with (run / "job.log").open("ab") as log:
        done = run_locally(run, extra_environ=QUICK, capture_output=False, stdout=log, stderr=subprocess.STDOUT)
    return done.returncode


def entries(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_plain_loop_that_prints(tmp_path: Path) -> None:
    text = 'for n in 1 2 3; do echo "step $n/30 | loss: 2.$n | lr 1e-4"; sleep 0.6; done'
    run = trainer_run(tmp_path, text)
    assert start(run) == 0
    assert [(entry["step"], entry["total_steps"], entry["loss"]) for entry in entries(run)] == [
        (1, 30, 2.1), (2, 30, 2.2), (3, 30, 2.3)]  # fmt: skip
    found = metrics.read_progress(run / "metrics.jsonl")
    assert found is not None and (found.steps_text, found.loss) == ("3/30", 2.3)
    assert (run / "attempts/1/trainer").read_text() == "generic\n"
