"""Two processes train on the CPU, stop when asked, and go on as if nothing had been."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.training

from tests.jobs import small  # noqa: E402
from tests.jobs.conftest import JOBS, STEPS, TRAIN, Attempt, Launcher, free_port, prebuilt  # noqa: E402


def test_the_loss_falls_and_every_step_is_written(whole: Attempt) -> None:
    losses = whole.losses
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert losses[STEPS] < losses[1] - 0.2


def test_the_output_shows_settings_batch_and_progress(whole: Attempt) -> None:
    before = whole.output.split("ready after")[0].split("sft: processes: 2, ")[1].splitlines()
    shown = [line for line in before[1:] if line.startswith(("model", "batch", "precision", "optimizer", "settings"))]
    assert len(shown) == 5
    assert "batch: 2 per process x 1 accumulation x 2 processes = 4 sequences per step of 32 tokens" in whole.output
    assert "learning_rate" in whole.output
    assert f"step {STEPS}/{STEPS} loss " in whole.output
    assert "\r" not in whole.output, "a line that redraws itself makes a log file unreadable"


def test_the_run_folder_holds_what_a_person_and_the_next_job_need(whole: Attempt) -> None:
    summary = json.loads((whole.run / "summary.json").read_text())
    assert (summary["steps"], summary["first_loss"], summary["last_loss"]) == (
        STEPS,
        whole.losses[1],
        whole.losses[STEPS],
    )
    assert summary["tokens_per_second"] > 0
    entry = next(
        line for line in map(json.loads, (whole.run / "metrics.jsonl").read_text().splitlines()) if "loss" in line
    )
    assert {"grad_norm", "learning_rate", "tokens_per_second_per_process", "memory_bytes", "seconds"} <= set(entry)
    assert entry["total_steps"] == STEPS
    final = Path(summary["final"])
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= {
        path.name for path in final.iterdir()
    }
    assert (whole.run / "loss.png").read_bytes()[:4] == b"\x89PNG"
    leftovers = [path for path in whole.run.rglob("*") if path.name.endswith((".partial", ".old"))]
    assert leftovers == []


def test_the_attempt_has_the_time_of_each_part_and_each_wait(whole: Attempt) -> None:
    """Between two entries, steps and saves are all the time; the waits of the last save have a line of their own."""
    lines = [line.split() for line in (whole.run / "attempts" / "1" / "times-rank-0").read_text().splitlines()]
    assert [event for _, event in lines] == ["imported", "loaded", "train", "first_step", "trained", "final"]
    times = [float(time) for time, _ in lines]
    assert times == sorted(times)
    entries = [json.loads(line) for line in (whole.run / "metrics.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if "loss" in entry]
    for before, after in pairwise(steps):
        passed = after["seconds"] - before["seconds"]
        assert passed == pytest.approx(after["step_seconds"] + after.get("saving_seconds", 0.0), abs=0.005)
    waited = sum(entry.get("checkpoint_wait_seconds", 0.0) for entry in entries)
    assert waited > 0
    assert sum(entry.get("saving_seconds", 0.0) for entry in entries) == pytest.approx(waited, abs=0.02)


def test_nothing_is_compiled_where_the_operators_are_built_into_the_image(whole: Attempt) -> None:
    """`whole` ran without a compiler on its PATH and without a home folder, so a compilation would have failed."""
    if not prebuilt():
        pytest.skip("DeepSpeed was installed here without prebuilt operators")
    assert not (whole.run / "extensions").exists()
    assert "deepspeed_shm_comm_op built successfully" in whole.output


def test_the_losses_are_those_of_trl(launcher: Launcher, whole: Attempt, tmp_path: Path) -> None:
    """The model's own loss, which is quicker, and TRL's: the same curve over updates of the weights."""
    of_trl = launcher.forked(tmp_path, *TRAIN, "--loss_path=trl")
    assert of_trl.code == 0, of_trl.output
    assert of_trl.losses == pytest.approx(whole.losses, abs=1e-4)


def test_asked_to_save_and_exit_it_goes_on_with_bitwise_the_same_losses(
    launcher: Launcher, whole: Attempt, tmp_path: Path
) -> None:
    process = launcher.start(tmp_path, *TRAIN)
    wait_for_step(tmp_path, 3, process)
    (tmp_path / "attempts" / "1" / "save-and-exit").touch()
    output, _ = process.communicate(timeout=600)
    note = json.loads((tmp_path / "attempts" / "1" / "continue").read_text())
    assert process.returncode != 0
    assert "exiting with code 75; start the run again to resume" in output
    assert 3 <= note["step"] < STEPS
    assert Path(note["checkpoint"], "complete.json").is_file()

    second = launcher.forked(tmp_path, *TRAIN, attempt=2)
    assert second.code == 0, second.output
    assert f"resuming from {note['checkpoint']} (step {note['step']})" in second.output
    assert second.losses == whole.losses and second.steps == whole.steps  # no step is taken twice
    assert json.loads((tmp_path / "summary.json").read_text())["attempts"] == 2


def test_a_damaged_newest_checkpoint_is_skipped_and_the_older_one_gives_the_same_losses(
    launcher: Launcher, whole: Attempt, tmp_path: Path
) -> None:
    """One is cut, one lacks a file, one has a flipped bit in it."""
    shutil.copytree(whole.run, tmp_path, dirs_exist_ok=True)
    cut, missing, flipped = (tmp_path / "checkpoints" / f"checkpoint-{step}" for step in (12, 9, 6))
    shard = next(cut.rglob("*optim_states.pt"))
    shard.write_bytes(shard.read_bytes()[:-1])
    next(missing.rglob("*model_states.pt")).unlink()
    shard = next(flipped.rglob("zero_pp_rank_1*optim_states.pt"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)

    second = launcher.forked(tmp_path, *TRAIN, "--verify_checkpoint", attempt=2)
    assert second.code == 0, second.output
    assert re.search(r"skipped .*/checkpoint-12: .* bytes, but \d+ were written", second.output)
    assert re.search(r"skipped .*/checkpoint-9: .*model_states\.pt is missing", second.output)
    assert re.search(r"skipped .*/checkpoint-6: .*zero_pp_rank_1.* has changed", second.output)
    assert f"resuming from {tmp_path}/checkpoints/checkpoint-3 (step 3)" in second.output
    assert second.losses == whole.losses


def test_a_run_that_had_ended_takes_no_further_step_and_mends_its_final_model(
    launcher: Launcher, whole: Attempt, tmp_path: Path
) -> None:
    """Killed between the last checkpoint and the final model, say."""
    shutil.copytree(whole.run, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / "final")
    second = launcher.forked(tmp_path, *TRAIN, attempt=2)
    assert second.code == 0, second.output
    assert second.losses == whole.losses
    assert f"step {STEPS} was the last step" in second.output
    weights = ("checkpoints", "final", "model.safetensors")
    assert tmp_path.joinpath(*weights).read_bytes() == whole.run.joinpath(*weights).read_bytes()
    assert (tmp_path / "checkpoints" / "final" / "chat_template.jinja").is_file()


def test_a_terminated_launcher_saves_first(launcher: Launcher, tmp_path: Path) -> None:
    process = launcher.start(tmp_path, *TRAIN, "--max_steps=500")
    wait_for_step(tmp_path, 2, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=600)
    note = json.loads((tmp_path / "attempts" / "1" / "continue").read_text())
    assert note["reason"] == "SIGTERM", output
    assert Path(note["checkpoint"], "complete.json").is_file()


def test_processes_that_another_launcher_has_ranked_leave_with_75(launcher: Launcher, tmp_path: Path) -> None:
    """One task per GPU under srun: no torchrun in between, so the code reaches the batch script."""
    environment = launcher.environment(tmp_path)
    Path(environment["RUNNER_SAVE_AND_EXIT"]).touch()
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    tasks = [
        subprocess.Popen(
            (sys.executable, str(JOBS / "sft.py"), *small.filled(TRAIN, launcher.cache)),
            env={**environment, **world, "RANK": rank, "LOCAL_RANK": rank, "SLURM_PROCID": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    outputs = [task.communicate(timeout=600)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [75, 75], outputs
    assert "processes: 2, launcher: srun" in outputs[0]
    assert f"step  1/{STEPS}" in outputs[0]
    assert "step " not in outputs[1]


def wait_for_step(run: Path, step: int, process: "subprocess.Popen[str]", seconds: float = 200) -> None:
    """Return once the metrics have the step."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        path = run / "metrics.jsonl"
        if path.is_file() and len(path.read_text().splitlines()) >= step:
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"no step {step} of {run}: {process.communicate()[0]}")
