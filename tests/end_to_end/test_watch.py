"""`runner status` and `runner watch` on a real cluster: one question to Slurm for any number of runs."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Runner, environment, write

COUNTED = ("squeue", "sacct", "scontrol")


@pytest.fixture
def counted(cluster: Runner, tmp_path: Path) -> tuple[dict[str, str], Callable[[], list[str]]]:
    """The environment in which each question to Slurm is written down, and what was written since the last look."""
    write(cluster.project, {"edf/plain.toml": environment(None)})
    calls = tmp_path / "calls"
    for name in COUNTED:
        real = shutil.which(name)
        assert real, name
        write(tmp_path / "bin", {name: f'#!/bin/sh\necho {name} >>{calls}\nexec {real} "$@"\n'})
        (tmp_path / "bin" / name).chmod(0o755)

    def asked() -> list[str]:
        found = calls.read_text().split() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return found

    return {"PATH": f"{tmp_path / 'bin'}:{cluster.environ['PATH']}"}, asked


def launch(cluster: Runner, *command: str) -> Path:
    return cluster.launch("--engine", "host", "--env", "plain", "--name", "seen", "--", *command)


def test_any_number_of_runs_takes_two_questions(
    cluster: Runner, counted: tuple[dict[str, str], Callable[[], list[str]]]
) -> None:
    """A thousand runs, nearly all of jobs that Slurm has forgotten: one question about their jobs, one about jobs that
    were submitted by hand in their folders."""
    environ, asked = counted
    real = launch(cluster, "sleep", "600")
    record = json.loads((real / "run.json").read_text())
    for number in range(1000, 2000):
        copy = {**record, "name": f"gone-{number}", "created": "2026-01-01T00:00:00+00:00", "job_ids": [f"77{number}"]}
        write(cluster.runs / f"gone-{number}", {"run.json": json.dumps(copy)})
    found = json.loads(cluster("status", "--all", "--json", extra_environ=environ).stdout)
    assert asked() == ["squeue", "squeue"]
    assert len(found) == 1001 and {each["state"] for each in found[:-1]} == {"LOST"}
    assert found[-1]["run"] == real.name and found[-1]["state"] in ("PENDING", "CONFIGURING", "RUNNING")
    cluster("status", "gone-1000", extra_environ=environ)
    assert asked() == ["squeue", "squeue"]
    cluster("cancel", real.name)


def test_progress_stands_beside_the_state_and_watch_ends_with_the_run(
    cluster: Runner, counted: tuple[dict[str, str], Callable[[], list[str]]]
) -> None:
    """The watch asks every two seconds at most, and once more at the end: about jobs that were submitted by hand."""
    environ, asked = counted
    entries = [{"step": step, "total_steps": 40, "loss": 2.5, "tokens_per_second": 1200.0, "attempt": 1,
                "time": time.time() + step} for step in (10, 20)]  # fmt: skip
    text = "".join(json.dumps(entry) + "\n" for entry in entries)
    run = launch(
        cluster,
        "sh",
        "-c",
        f"printf %s '{text}' >\"$RUNNER_RUN/metrics.jsonl\"; until [ -e ../go ]; do sleep 0.2; done",
    )
    status = cluster.wait(run.name, lambda status: status["step"] == 20)
    assert (status["state"], status["attempt"], status["total_steps"], status["loss"]) == ("RUNNING", 1, 40, 2.5)
    assert status["tokens_per_second"] == 1200.0 and status["estimated_end"] > status["created"]
    shown = cluster("status", run.name).stdout.splitlines()
    assert shown[0].split() == ["RUN", "JOB", "ID", "ATTEMPT", "STATE", "AGE", "EXIT", "STEP", "LOSS", "TOKENS/S",
                                "END", "ELAPSED", "LEFT", "NODES", "REASON"]  # fmt: skip
    assert "20/40  2.5000  1,200" in shown[1]
    started = time.monotonic()
    watch = Runner(cluster.project, {**cluster.environ, **environ}, cluster.site).start("watch", run.name)
    assert watch.stdout is not None
    watched = [watch.stdout.readline(), watch.stdout.readline()]  # the job goes on until its state was seen
    (run / "go").touch()
    watched += watch.communicate(timeout=600)[0].splitlines()
    took, questions = time.monotonic() - started, asked()
    assert (
        set(questions) == {"squeue"} and 2 <= len(questions) <= took / 2 + 2
    )  # one more about jobs by hand, once it has ended
    assert "COMPLETED" in watched[-1] and "RUNNING" in watched[1]
