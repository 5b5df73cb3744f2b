"""The account of a run: each second of each node has one class, and damaged files only make it less precise."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from runner.runs.account import NAMES, Account, account
from runner.runs.advice import advice
from runner.runs.run import Run, save

T = 1_700_000_000.0  # when the allocation begins
LATER = T + 1e6
CREATED = "2023-11-14T22:00:00+00:00"  # 800 s before T

Events = Sequence[tuple[float, str]]


def make_run(folder: Path, *, nodes: int = 2) -> Run:
    folder.mkdir(parents=True)
    run = Run(folder.name, folder, "sft", "lab", "slurm", CREATED, "submitted", ("7",), environment="cpu", nodes=nodes)
    save(run)
    return run


def add_attempt(run: Run, events: Events, *, number: int = 1, job: str = "7", cause: str = "done", code: str = "0",
                nodes: str = "nid[001-002]", held: str = "", gpus: int = 8, rung: str = "") -> Path:  # fmt: skip
    """Write attempts/N. The times of events are relative to T; `event K` is one of node K."""
    folder = run.folder / "attempts" / str(number)
    folder.mkdir(parents=True)
    lines = [f"started x\njob {job}\nnodes {nodes}\ncpus 16\ngpus {gpus}\ncheckpoint 0\n"]
    (folder / "started").write_text("".join([*lines, f"held {held}\n" if held else ""]))
    for at, event in events:
        name, _, node = event.partition(" ")
        of_node = node and name != "left"
        with (folder / (f"times-node-{node}" if of_node else "times")).open("a") as file:
            file.write(f"{T + at:.3f} {event}\n")
    for name, text in (("cause", cause), ("exit_code", code), ("next", rung)):
        if text:
            (folder / name).write_text(f"{text}\n")
    return folder


def add_metrics(run: Run, *entries: dict[str, object]) -> None:
    lines = [{"attempt": 1, "loss": 1.0, **entry, "time": T + float(str(entry["time"]))} for entry in entries]
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)


def steps(first: int, last: int, begin: float, seconds: float, **others: object) -> list[dict[str, object]]:
    """One entry per step; the first step begins at `begin`."""
    return [
        {"step": step, "time": begin + (step - first + 1) * seconds, "step_seconds": seconds, **others}
        for step in range(first, last + 1)
    ]


def of_both(*events: tuple[float, str]) -> Events:
    return [(at, f"{event} {node}") for at, event in events for node in (0, 1)]


START = (-60.0, "submitted"), (0.0, "held"), (3.0, "started"), (5.0, "step")
HEAD = *START, *of_both((15, "task"), (16, "preflight"), (20, "preflight_end"), (21, "program"))
OURS = (30.0, "imported"), (40.0, "loaded"), (42.0, "train")


def rounded(classes: dict[str, float]) -> dict[str, float]:
    return {name: round(seconds, 3) for name, seconds in classes.items() if round(seconds, 3)}


def check(found: Account) -> None:
    for classes in (found.classes, *found.nodes.values(), *(attempt.classes for attempt in found.attempts)):
        assert all(seconds >= 0 for seconds in classes.values())
        assert classes.keys() <= NAMES.keys()
    assert sum(node.held for node in found.nodes.values()) == pytest.approx(found.classes.held)


def test_a_run_without_faults(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sft-0001")
    end = (72.0, "trained"), (80.0, "final"), *of_both((81, "program_end")), (82.0, "step_end"), (84.0, "ended")
    add_attempt(run, [*HEAD, *OURS, (50, "first_step"), *end])
    # ten steps of 2 s, the first took 8 s; the training stood still for a save (1 s) and an evaluation (2 s)
    saved = {"step": 10, "time": 71.0, "step_seconds": 2.0, "saving_seconds": 1.0, "evaluation_seconds": 2.0}
    add_metrics(run, {"step": 1, "time": 50.0, "step_seconds": 8.0}, *steps(2, 9, 50, 2), saved)
    found = account(run, LATER)
    check(found)
    assert found.notes == ()
    assert found.classes.held == 8 * 84
    assert rounded(found.classes) == {
        "useful": 8 * (2 + 16 + 2 + 1), "import": 8 * 10, "preflight": 8 * 4, "start": 8 * 7, "imports": 8 * 9,
        "loading": 8 * 12, "warm_up": 8 * 6, "saving": 8 * 9, "evaluation": 8 * 2, "after_end": 8 * 4,
        "queue": 8 * 60,
    }  # fmt: skip
    assert found.record()["ratio"] == pytest.approx(21 / 84)


def test_a_hang_a_lost_node_and_its_spare(tmp_path: Path) -> None:
    """In place: nid002 hangs and leaves, nid003 takes its place, and steps 6 to 10 run again."""
    run = make_run(tmp_path / "sft-0001")
    fault = (80.0, "stalled"), (95.0, "detected"), (96.0, "step_end"), (97.0, "ended")
    add_attempt(run, [*HEAD, *OURS, (46, "first_step"), *fault], cause="hang", code="1", gpus=12,
                        held="nid[001-003]", rung="in_place\nnid003 for nid002")  # fmt: skip
    again = (100.0, "started"), (102.0, "step"), *of_both((103, "task"), (104, "program")), (110.0, "imported")
    end = (150.0, "trained"), *of_both((152, "program_end")), (153.0, "step_end"), (154.0, "ended")
    add_attempt(run, [*again, (112, "train"), (114, "first_step"), *end], number=2, gpus=8, nodes="nid[001,003]",
                held="nid[001,003]")  # fmt: skip
    started = run.folder / "attempts/2/started"
    started.write_text(started.read_text().replace("checkpoint 0", "checkpoint 5"))
    add_metrics(run, *steps(1, 10, 42, 3.6), *steps(6, 18, 112, 2, attempt=2))
    found = account(run, LATER)
    check(found)
    assert found.classes.held == 4 * (154 + 100 + 154)
    assert rounded(found.nodes["nid002"])["hang"] == 4 * 15
    assert rounded(found.nodes["nid003"])["spare"] == 4 * 100
    assert rounded(found.nodes["nid001"]) == {
        "useful": 4 * (35.6 + 28), "repeated": 4 * (2 + 10), "import": 4 * 11, "preflight": 4 * 4, "start": 4 * 8,
        "imports": 4 * 15, "loading": 4 * 14, "warm_up": 4 * 0.4, "hang": 4 * 15, "restart_gap": 4 * 7,
        "saving": 4 * 2, "after_end": 4 * 2,
    }  # fmt: skip
    costs: dict[str, float] = {}
    for cause, classes in found.by_cause():
        costs[cause] = costs.get(cause, 0.0) + sum(classes.values())
    assert costs.keys() == {"hang", "done"}
    assert [attempt.rung for attempt in found.attempts] == ["in_place", ""]


def test_a_lost_batch_script_counts_until_slurm_requeued_the_job(tmp_path: Path) -> None:
    """A requeue sets the submit time of the job. The wait before the second start is not charged."""
    run = make_run(tmp_path / "sft-0001")
    first = add_attempt(run, [*HEAD, *OURS, (44, "first_step")], cause="node_failure", code="")
    (first / "alive").touch()
    os.utime(first / "alive", (T + 60, T + 60))
    again = (90.0, "submitted"), (120.0, "held"), (121.0, "started"), (122.0, "step"), (130.0, "step_end")
    add_attempt(run, [*again, (130, "ended")], number=2, cause="cancelled", code="1")
    add_metrics(run, *steps(1, 8, 42, 2))
    found = account(run, LATER)
    check(found)
    assert found.classes.held == 8 * (90 + 10)
    assert rounded(found.attempts[0].classes)["hang"] == 8 * 30
    assert rounded(found.attempts[0].classes)["repeated"] == 8 * 2  # from the last entry to the last sign of life
    assert found.classes["queue"] == 8 * (60 + 30)
    assert any("attempt 1 did not record its end" in note for note in found.notes)


def test_attempts_in_one_allocation_hold_it_once_although_the_disk_was_too_full_to_record_how_they_follow(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "sft-1")
    add_attempt(run, [*HEAD, (100.0, "step_end"), (100.0, "ended")], cause="", code="")
    second = [(-60.0, "submitted"), (0.0, "held"), (110.0, "started"), (112.0, "step"), (200.0, "ended")]
    add_attempt(run, second, number=2)
    assert account(run, LATER).classes.held == 200 * 8


def test_a_preempted_attempt_does_not_hang(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sft-0001")
    add_attempt(run, [*HEAD, *OURS, (44, "first_step")], cause="preemption", code="")
    add_attempt(run, [(70, "submitted"), (80, "held"), (81, "started"), (82, "ended")], number=2, cause="", code="1")
    add_metrics(run, *steps(1, 8, 42, 2))
    found = rounded(account(run, LATER).attempts[0].classes)
    assert "hang" not in found and found["restart_gap"] == 8 * 12


def test_a_killed_rank_hangs_until_its_launcher_notices(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sft-1")
    ends = [(80.0, "step_end"), (80.0, "detected"), (81.0, "ended")]
    add_attempt(run, [*HEAD, *OURS, (43.0, "first_step"), *of_both((80, "program_end")), *ends], cause="script_failure")
    add_metrics(run, *steps(1, 18, 42.0, 1.0))
    assert rounded(account(run, LATER).classes)["hang"] == 19 * 8


def test_a_node_that_is_lost_in_silence_hangs_from_the_last_step(tmp_path: Path) -> None:
    """Slurm needs its time to notice. Nobody noted the fault: it came at most one pause after the last step."""
    run = make_run(tmp_path / "sft-0001")
    end = (88.0, "step_end"), (88.0, "detected"), (89.0, "ended")
    add_attempt(run, [*HEAD, *OURS, (44, "first_step"), *end], cause="node_failure", code="137")
    add_metrics(run, *steps(1, 8, 42, 2))
    found = rounded(account(run, LATER).classes)
    assert (found["hang"], found["repeated"], found["useful"]) == (8 * 28, 8 * 2, 8 * 16)


def test_a_node_that_had_ended_its_work_is_no_fault(tmp_path: Path) -> None:
    """Without a launcher, node 1 ends well at once; node 0 trains on, and fails."""
    run = make_run(tmp_path / "sft-0001")
    ends = [(32, "program_end 1"), (70, "program_end 0"), (72, "step_end"), (72, "detected"), (73, "ended")]
    folder = add_attempt(run, [*HEAD, *OURS, (44, "first_step"), *ends], cause="script_failure", code="1")
    (folder / "first_failure").write_text("1 task 0 node 0\n")
    add_metrics(run, *steps(1, 14, 42, 2))
    found = rounded(account(run, LATER).classes)
    assert (found["useful"], found["hang"]) == (8 * 28, 8 * 2)


def test_a_failure_in_the_last_save_was_no_hang(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sft-0001")
    ends = [(70, "trained"), (130, "program_end 0"), (132, "step_end"), (132, "detected"), (133, "ended")]
    folder = add_attempt(run, [*HEAD, *OURS, (44, "first_step"), *ends], cause="script_failure", code="1")
    (folder / "first_failure").write_text("1 task 0 node 0\n")
    add_metrics(run, *steps(1, 14, 42, 2))
    found = rounded(account(run, LATER).classes)
    assert (found["useful"], found["saving"], found["hang"]) == (8 * 28, 8 * 60, 8 * 2)


def test_a_step_that_was_started_once_more_has_its_own_fault(tmp_path: Path) -> None:
    """The first one failed before a task began (attempt.sh: run_step)."""
    run = make_run(tmp_path / "sft-0001")
    first = [*START, (6, "step_end"), (6, "detected"), (7, "step")]
    tasks = of_both((15, "task"), (16, "preflight"), (20, "preflight_end"), (21, "program"))
    ends = [(78, "stalled"), (90, "detected"), (91, "step_end"), (92, "ended")]
    add_attempt(run, [*first, *tasks, *OURS, (44, "first_step"), *ends], cause="hang", code="1")
    add_metrics(run, *steps(1, 18, 42, 2))
    found = rounded(account(run, LATER).classes)
    assert (found["useful"], found["hang"], found["after_end"]) == (8 * 36, 8 * 12, 8 * 2)


def test_what_a_save_took_counts_once(tmp_path: Path) -> None:
    """The training waited 4 s; the checkpoint was complete, and noted, when later steps had been logged."""
    run = make_run(tmp_path / "sft-0001")
    end = (74.0, "trained"), (74.0, "final"), *of_both((74, "program_end")), (74.0, "step_end"), (74.0, "ended")
    add_attempt(run, [*HEAD, *OURS, (44, "first_step"), *end])
    saved = {"step": 5, "checkpoint_seconds": 15.0, "checkpoint_wait_seconds": 4.0, "time": 67.0}
    steps_after = steps(6, 14, 56, 2)
    steps_after[0]["saving_seconds"] = 4.0
    add_metrics(run, *steps(1, 5, 42, 2), *steps_after)
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"attempt": 1, **saved, "time": T + 67.0}) + "\n")
    found = rounded(account(run, LATER).classes)
    assert (found["useful"], found["saving"]) == (8 * 28, 8 * 4)


def test_an_evaluation_at_the_last_step_is_not_also_one_of_the_last_save(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sft-0001")
    end = (90.0, "trained"), (120.0, "final"), *of_both((120, "program_end")), (120.0, "step_end"), (120.0, "ended")
    add_attempt(run, [*HEAD, *OURS, (44, "first_step"), *end])
    add_metrics(run, *steps(1, 14, 42, 2))
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"attempt": 1, "step": 14, "evaluation_seconds": 20.0, "time": T + 90.1}) + "\n")
    found = rounded(account(run, LATER).classes)
    assert (found["useful"], found["evaluation"], found["saving"]) == (8 * 28, 8 * 20, 8 * 30)


def test_a_training_that_has_stopped_to_log_takes_no_useful_step_while_it_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sft-0001")
    folder = add_attempt(run, [*HEAD, *OURS, (44, "first_step")], cause="", code="")
    (folder / "alive").touch()
    os.utime(folder / "alive", (T + 600, T + 600))
    add_metrics(run, *steps(1, 8, 42, 2))
    found = rounded(account(run, T + 610).classes)
    assert (found["useful"], found["unknown"]) == (8 * 18, 8 * (610 - 60))


@pytest.mark.parametrize(("resumed", "useful", "repeated"), [(25, 50, 4), (27, 54, 0), (30, 54, 0), (20, 40, 14)])
def test_what_was_saved_but_not_logged_is_not_repeated(
    tmp_path: Path, resumed: int, useful: int, repeated: int
) -> None:
    """A log line per 10 steps: of the 7 steps after the last line, those after the save are repeated."""
    run = make_run(tmp_path / "sft-0001")
    ends = [(96, "detected"), (96, "step_end"), (97, "ended")]
    add_attempt(run, [*HEAD, *OURS, (44, "first_step"), *ends], cause="preemption", code="")
    again = [(100, "submitted"), (110, "held"), (111, "started"), (112, "step"), (113, "step_end"), (114, "ended")]
    started = add_attempt(run, again, number=2) / "started"
    started.write_text(started.read_text().replace("checkpoint 0", f"checkpoint {resumed}"))
    add_metrics(run, *({"step": step, "time": 42.0 + 2 * step, "step_seconds": 2.0} for step in (10, 20)))
    found = rounded(account(run, LATER).attempts[0].classes)
    assert (found.get("useful"), found.get("repeated", 0)) == (8 * useful, 8 * repeated)


def test_each_fault_costs_what_followed_it(tmp_path: Path) -> None:
    """The wait after the second fault is not one of the first, and lines without `attempt` belong to theirs."""
    run = make_run(tmp_path / "sft-0001")
    first = [*HEAD, *OURS, (44, "first_step"), (60, "stalled"), (70, "detected"), (70, "step_end"), (71, "ended")]
    add_attempt(run, first, cause="hang", code="1", rung="in_place")
    second = [(75, "started"), (76, "step"), *of_both((77, "task"), (78, "program")), (80, "imported"), (81, "train")]
    second += [(83, "first_step"), (100, "stalled"), (104, "detected"), (104, "step_end"), (140, "ended")]
    add_attempt(run, second, number=2, cause="node_failure", code="1", rung="requeue")
    add_attempt(run, [(150, "submitted"), (160, "held"), (161, "started"), (162, "ended")], number=3, cause="cancelled")
    for number, at in ((1, 3), (2, 75), (3, 161)):
        os.utime(run.folder / f"attempts/{number}/started", (T + at, T + at))
    lines = [*steps(1, 8, 42, 2), *steps(5, 12, 81, 2)]
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"loss": 1.0, **line, "time": T + float(str(line["time"]))}) + "\n" for line in lines
        )
    costs: dict[str, dict[str, float]] = {}
    for cause, classes in account(run, LATER).by_cause():
        for name, seconds in classes.items():
            costs.setdefault(cause, {}).setdefault(name, 0.0)
            costs[cause][name] += seconds / 8
    assert rounded(costs["hang"])["repeated"] == 2 + 8
    assert rounded(costs["node_failure"])["restart_gap"] == 36
    assert costs["node_failure"]["queue"] == 10


def test_a_job_has_its_nodes_only_once(tmp_path: Path) -> None:
    """The batch script's node was cut off: Slurm has requeued the job, while the old attempt still ran there."""
    run = make_run(tmp_path / "sft-0001")
    add_attempt(run, [*HEAD, (200, "step_end"), (200, "ended")], cause="node_failure", code="1")
    again = [(100, "submitted"), (110, "held"), (111, "started"), (112, "step"), (300, "step_end"), (300, "ended")]
    add_attempt(run, again, number=2)
    assert account(run, LATER).classes.held == 8 * 300


def test_a_clock_in_the_future_holds_no_node_of_a_killed_attempt(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sft-0001")
    folder = add_attempt(run, [*HEAD, (86400, "imported")], cause="node_failure", code="")
    (folder / "alive").touch()
    os.utime(folder / "alive", (T + 60, T + 60))
    found = account(run, T + 3600)
    assert found.classes.held == 8 * 60
    assert "attempts/1: `imported` is outside the attempt, and is left out: was a clock wrong?" in found.notes


@pytest.mark.parametrize(("pause", "unknown"), [(30.0, 30.0), (9.0, 0.0)])
def test_a_training_that_stands_still_takes_no_useful_step(tmp_path: Path, pause: float, unknown: float) -> None:
    """The run folder's file system did not answer; a step of a few seconds may just be a long one."""
    run = make_run(tmp_path / "sft-0001")
    end = (100.0, "trained"), (100.0, "final"), *of_both((100, "program_end")), (100.0, "step_end"), (100.0, "ended")
    add_attempt(run, [*HEAD, *OURS, (44, "first_step"), *end])
    add_metrics(run, *steps(1, 8, 42, 2), *steps(9, 14, 58 + pause, 2))
    found = rounded(account(run, LATER).classes)
    assert found.get("unknown", 0) == 8 * unknown
    assert found["useful"] == 8 * (58 - unknown)


def test_other_trainers_as_far_as_their_logs_tell(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sft-0001")
    end = (*of_both((122, "program_end")), (123.0, "step_end"), (124.0, "ended"))
    folder = add_attempt(run, [*HEAD, *end], gpus=0)
    (folder / "saved").write_text("10 /x/iter_10\n")
    entries = [{"step": step, "time": 50.0 + 4 * step + (6 if step > 8 else 0)} for step in range(2, 15, 2)]
    add_metrics(run, *entries)
    found = account(run, LATER)
    check(found)
    assert found.unit == "cpu" and found.classes.held == 32 * 124
    known = rounded(found.classes)
    # 14 steps of 4 s, from 50 s on; after the last entry, the training may go on for one more pause (8 s)
    assert (known["useful"], known["saving"]) == (32 * (14 * 4 + 8), 32 * 6)
    assert known["unknown"] == 32 * (29 + 2)


def test_a_running_attempt_counts_until_now(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sft-0001")
    add_attempt(run, [*HEAD, *OURS, (44, "first_step")], cause="", code="")
    add_metrics(run, *steps(1, 8, 42, 2))
    found = account(run, T + 70)
    check(found)
    assert (found.classes.held, found.attempts[0].cause, found.notes) == (8 * 70, "running", ())
    assert rounded(found.classes)["useful"] == 8 * 28
    silent = account(run, T + 3600)
    assert silent.classes.held == 8 * 58 and "did not record its end" in silent.notes[0]


def test_a_users_own_batch_script_is_one_program(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sft-0001")
    folder = add_attempt(run, [*START, (100, "step_end"), (101, "ended")])
    (folder / "log_bytes").write_text("0\n")
    (folder / "job.log").write_text("")
    assert rounded(account(run, LATER).classes) == {
        "start": 8 * 5, "unknown": 8 * 95, "after_end": 8, "queue": 8 * 60,
    }  # fmt: skip


def test_a_wrong_clock_gives_a_note(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sft-0001")
    jumped = (3640.0, "loaded"), (42.0, "train"), (35.0, "imported")
    add_attempt(run, [*HEAD, *jumped, (60, "trained"), (50, "final"), (70, "step_end"), (71, "ended")])
    found = account(run, LATER)
    check(found)
    assert found.classes.held == 8 * 71
    assert rounded(found.classes)["loading"] == 8 * 7
    assert "attempts/1: `loaded` is outside the attempt, and is left out: was a clock wrong?" in found.notes


def test_a_clock_that_jumps_by_a_day_holds_no_node_for_a_day(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sft-0001")
    folder = add_attempt(run, [*START, *of_both((6, "program")), (86470, "step_end"), (86471, "ended")])
    (folder / "ended").touch()
    for name, at in (("started", 3), ("ended", 71)):
        os.utime(folder / name, (T + at, T + at))
    found = account(run, LATER)
    assert found.classes.held == 8 * 71
    assert "attempts/1: `ended` is outside the attempt, and is left out: was a clock wrong?" in found.notes


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sft-0001")
    folder = add_attempt(run, [*HEAD, (90, "ended")])
    (folder / "times-node-0").write_bytes(b"\xff\0\xff 12\nnan task 0\n-4 task 0\n17000000")
    (folder / "times-node-1").unlink()
    (folder / "times-node-1").mkdir()
    (run.folder / "metrics.jsonl").mkdir()
    add_attempt(run, [(95, "started")], number=2, cause="", code="")
    (run.folder / "attempts/2/times").unlink()
    (run.folder / "attempts/2/started").unlink()
    found = account(run, LATER)
    check(found)
    assert found.classes.held == 8 * 90
    text = "\n".join(found.notes)
    assert "attempts/1/times-node-0: damaged lines are left out (4)" in text
    assert "cannot read attempts/1/times-node-1: Is a directory" in text
    assert "cannot read metrics.jsonl" in text and "attempts/2/started is missing" in text


EVENTS = ("submitted", "held", "started", "step", "task", "preflight", "preflight_end", "program", "program_end",
          "imported", "loaded", "train", "first_step", "trained", "final", "stalled", "detected", "step_end", "ended",
          "left", "nonsense", "")  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_random_files_never_break_the_sum(tmp_path: Path, seed: int) -> None:
    """Whatever the files say: no error, nothing negative, and the nodes and the attempts have the same sum."""
    chance = random.Random(seed)
    run = make_run(tmp_path / "sft-0001", nodes=chance.randint(0, 4))
    for number in range(1, chance.randint(1, 4) + 1):
        begin = chance.choice((0, 300 * number, -1e9, 1e9))
        names = chance.choices(EVENTS, k=chance.randint(0, 25))
        nodes = [chance.choice(("", " 0", " 1", " nid001", " 7")) for _ in names]
        events = [(begin + chance.uniform(-10, 400), f"{name}{node}") for name, node in zip(names, nodes, strict=True)]
        folder = add_attempt(
            run, events, number=number, job=chance.choice(("7", "8", "local-1", "")), gpus=chance.choice((0, 3)),
            cause=chance.choice(("done", "hang", "cancelled", "")), code=chance.choice(("0", "1", "", "x")),
            nodes=chance.choice(("nid[001-002]", "a[1-3,7]b,c", "", "[", "x[9-1]", "n[0-]")),
            held=chance.choice(("", "nid[001-004]", "]")), rung=chance.choice(("in_place", "requeue", "")),
        )  # fmt: skip
        victim = chance.choice(list(folder.iterdir()))
        kind = chance.randrange(4)
        if kind == 0:
            victim.unlink()
        elif kind == 1:
            victim.write_bytes(victim.read_bytes()[: chance.randint(0, 40)] + chance.randbytes(chance.randint(0, 30)))
    values = (None, -1, 0, 5, 1e400, "x", [], True, chance.uniform(T - 10, T + 1500))
    keys = ("step", "time", "loss", "attempt", "step_seconds", "saving_seconds", "evaluation_seconds", "eval_runtime")
    with (run.folder / "metrics.jsonl").open("w") as file:
        for _ in range(chance.randint(0, 60)):
            usual = {"step": chance.randint(0, 30), "time": T + chance.uniform(-10, 1300), "attempt": 1, "loss": 1}
            changed = {key: chance.choice(values) for key in chance.sample(keys, chance.randint(0, 3))}
            file.write(json.dumps(usual | changed)[: chance.choice((None, None, None, 20))] + "\n")
    found = account(run, chance.choice((T, T + 500, LATER)))
    check(found)
    json.dumps(found.record(), allow_nan=False)


def runner(runs: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RUNNER_SITE": "local", "RUNNER_RUNS": str(runs), "COLUMNS": "200"}
    command = (sys.executable, "-m", "runner", "account", *words)
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, gpus in (("sft-0001", 8), ("sft-0002", 8), ("sft-0003", 0)):
        run = make_run(folder / name)
        ends = *of_both((81, "program_end")), (82.0, "step_end"), (84.0, "ended")
        add_attempt(run, [*HEAD, *OURS, (44, "first_step"), (70, "trained"), (80, "final"), *ends], gpus=gpus)
        add_metrics(run, *steps(1, 14, 42, 2))
    return folder


def test_the_command_prints_losses_and_classes(runs: Path) -> None:
    done = runner(runs, "sft-0001")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "0.19 GPU hours held; effective training time ratio 33.3%"
    assert lines[1] == "loss 1: loading of model and data, 0.03 GPU hours"
    assert lines[4] == "" and lines[5].split() == ["CLASS", "GPU", "HOURS", "SHARE"]
    assert lines[-1].split() == ["queue", "0.13", "not", "charged"]


SAVE_AUTO = '[job.env]\nRUNNER_SAVE_EVERY = "auto"\n'
OWN_SCRIPT = '[job]\nbatch = "train.sbatch"\nhang_seconds = 600\n'
NOT_HERE = '[revisions]\n"model x" = "(not here yet)"\n'


@pytest.mark.parametrize(
    ("name", "lock", "setting"),
    [
        ("import", '[image]\nreference = "nvcr.io#nvidia/pytorch:25.06-py3"\n', "runner import"),
        ("import", '[image]\nreference = "nvcr.io#nvidia/pytorch:25.06-py3"\nsha256 = "12"\n', ""),
        ("import", '[image]\nreference = "/images/a.sqsh"\nsize_bytes = 12\n', ""),
        ("imports", "", ""),
        ("loading", NOT_HERE, "runner prefetch"),
        ("loading", f'{NOT_HERE}[job.env]\nHF_HUB_OFFLINE = "1"\n', ""),
        ("loading", '[revisions]\n"model x" = "1234"\n', ""),
        ("warm_up", "", ""),
        ("repeated", "", 'save more often: save_every = "auto", or the option of your trainer'),
        ("repeated", OWN_SCRIPT, "save more often: the option of your trainer"),
        ("repeated", SAVE_AUTO, ""),
        ("saving", "", 'save less often: save_every = "auto"'),
        ("saving", SAVE_AUTO, ""),
        ("hang", "[job]\nhang_seconds = 600\n", "detect it earlier: hang_seconds in the job file (it was 600)"),
        ("hang", OWN_SCRIPT, "detect it earlier: launch --hang-seconds (it was 600)"),
        ("spare", "[job.resources]\nspare_nodes = 2\n", "spare_nodes in [resources] (it was 2)"),
        ("spare", "[job.resources]\nmin_nodes = 2\n", ""),
        ("unknown", "", ""),
        ("queue", "", "another partition"),
    ],
)
def test_advice_is_given_where_it_holds(tmp_path: Path, name: str, lock: str, setting: str) -> None:
    run = make_run(tmp_path / "sft-0001")
    ends = [(60, "stalled"), (80, "detected"), (80, "step_end"), (81, "ended")]
    folder = add_attempt(run, [*HEAD, *OURS, (44, "first_step"), *ends], cause="hang", code="1")
    (folder / "hang").write_text("no progress for 20 s\n")
    add_metrics(run, *steps(1, 6, 42, 2), {"step": 7, "time": 58.0, "step_seconds": 2.0, "saving_seconds": 2.0})
    (run.folder / "lock.toml").write_text(lock)
    given = advice(name, account(run, LATER))
    assert setting in given and bool(setting) == bool(given)


def test_what_only_some_runs_lose_is_not_advised_to_all(tmp_path: Path) -> None:
    """A final save that cannot be left out; a failure that no hang_seconds notices; a stall of a program that tells."""
    run = make_run(tmp_path / "sft-0001")
    ends = [(60, "trained"), (75, "final"), *of_both((76, "program_end")), (76, "step_end"), (77, "ended")]
    add_attempt(run, [*HEAD, *OURS, (44, "first_step"), *ends], cause="script_failure", code="1")
    add_metrics(run, *steps(1, 9, 42, 2))
    (run.folder / "lock.toml").write_text("[job]\nhang_seconds = 600\n")
    found = account(run, LATER)
    assert found.classes["saving"] > 0
    assert [advice(name, found) for name in ("saving", "hang", "unknown", "after_end")] == ["", "", "", ""]


def test_setup_is_named_if_it_is_most_of_the_start(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sft-0001")
    setup = of_both((15, "task"), (16, "setup"), (76, "setup_end"), (77, "program"))
    add_attempt(run, [*START, *setup, (80, "imported"), (90, "step_end"), (91, "ended")])
    assert advice("start", account(run, LATER)) == "shorten `setup` in the job file"


GAP = [(30, "detected"), (30, "step_end"), (60, "ended")]


@pytest.mark.parametrize(
    ("cause", "rung", "lock", "setting"),
    [
        ("hang", "in_place", "", "see why the attempts failed: runner why"),
        ("hang", "local", "", "see why the attempts failed: runner why"),
        ("hang", "requeue", "", "in_place = true in [restart]"),
        ("node_failure", "requeue", "", "spare_nodes in [resources]"),
        ("node_failure", "requeue", "[job.resources]\nspare_nodes = 1\n", "in_place = true in [restart]"),
        ("script_failure", "requeue", "[job.restart]\nin_place = true\n", "see why the attempts failed: runner why"),
        ("preemption", "requeue", "", ""),
    ],
)
def test_no_loss_names_a_setting_that_is_in_use(tmp_path: Path, cause: str, rung: str, lock: str, setting: str) -> None:
    run = make_run(tmp_path / "sft-0001")
    add_attempt(run, [*HEAD, *GAP], cause=cause, code="1", rung=rung)
    queue = [(61, "submitted"), (70, "held")] if rung == "requeue" else []
    add_attempt(run, [*queue, (80, "started"), (81, "step"), (82, "step_end"), (83, "ended")], number=2)
    (run.folder / "lock.toml").write_text(lock)
    given = advice("restart_gap", account(run, LATER))
    assert setting in given and bool(setting) == bool(given)


def test_of_several_runs_the_one_with_the_largest_loss_is_named(tmp_path: Path) -> None:
    for number, gap in ((1, 60), (2, 90)):
        run = make_run(tmp_path / f"sft-000{number}")
        add_attempt(run, [*HEAD, *GAP[:-1], (gap, "ended")], cause="hang", code="1", rung="in_place")
        add_attempt(run, [(gap + 1, "started"), (gap + 2, "step"), (gap + 3, "ended")], number=2)
    (line,) = [
        line for line in runner(tmp_path, "--since", "2023-01-01").stdout.splitlines() if "restart gap, " in line
    ]
    assert line.endswith(", most in sft-0002: see why the attempts failed: runner why")


def test_several_runs_have_a_line_each_and_units_are_not_added(runs: Path) -> None:
    out = runner(runs, "--since", "2023-01-01").stdout
    assert "0.37 GPU hours held" in out and "0.75 CPU hours held" in out
    assert [line.split()[0] for line in out.splitlines() if line.startswith("sft-")] == ["sft-0001", "sft-0002"]
    total = json.loads(runner(runs, "--since", "2023-01-01", "--by", "env", "--json").stdout)["total"]
    assert total["gpu"]["held_seconds"] == 2 * 8 * 84 and total["cpu"]["by"].keys() == {"cpu"}
    for by, name in (("cause", "done"), ("node", "nid001"), ("user", "you")):
        assert f"\n{name} " in runner(runs, "--since", "2023-01-01", "--by", by).stdout


def test_refusals_say_what_to_try(runs: Path) -> None:
    for words, code, hint in (
        (("--by", "node"), 2, "runner account --since 30d --by node"),
        (("--since", "3d", "--by", "colour"), 2, "choose from"),
        (("sft-0001", "--since", "3d"), 2, "leave out one"),
        (("--since", "soon"), 2, "--since 7d"),
        (("sft-0009",), 1, "sft-0001"),
    ):
        done = runner(runs, *words)
        assert done.returncode == code and "because:" in done.stderr and hint in done.stderr, done.stderr
    assert "no run has had a node" in runner(runs, "--since", "1m").stderr


def test_a_damaged_run_is_no_error(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sft-0001")
    assert runner(tmp_path, "last").returncode == 0
    (run.folder / "attempts/1").mkdir(parents=True)
    save(replace(run, tags=("x",)))
    done = runner(tmp_path, "sft-0001", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["total"] == {}
    assert "attempts/1/started is missing" in done.stderr


def test_the_picture_has_a_bar_per_run(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    done = runner(runs, "--since", "2023-01-01", "--png", str(tmp_path / "account.png"))
    assert done.stdout.strip() == str(tmp_path / "account.png"), done.stderr
    assert (tmp_path / "account.png").read_bytes().startswith(b"\x89PNG")
