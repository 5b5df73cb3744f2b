"""Every check that a run has to pass fails on a run that it has to fail on."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.faults import account
from tests.faults.__main__ import left, load
from tests.faults.account import Allocation, Cost, Line
from tests.faults.case import Outcome
from tests.faults.faults import FAULTS
from tests.faults.report import table

GOOD = Outcome(True, 0, 3, 0, ("node_failure", "done"), 30.0, rungs=("in_place",), detection=12.0, to_first_step=2.5)
STOPPED = replace(GOOD, completed=False, causes=("node_failure",), rungs=(), stopped="2 healthy nodes are needed")


def line(attempt: int, what: str, word: object, moment: float = 0.0, rank: int = 0) -> Line:
    return Line(attempt, rank, 100 + rank, what, str(word), moment, f"nid00{rank + 1}")


def test_a_good_run_passes() -> None:
    assert FAULTS["node_lost_spare"].passed(GOOD)
    assert FAULTS["no_nodes_left"].passed(STOPPED)
    assert FAULTS["helper_killed"].passed(GOOD) and FAULTS["helper_killed"].passed(STOPPED)


@pytest.mark.parametrize(
    "bad",
    [
        {"completed": False},
        {"completed": False, "stopped": "2 healthy nodes are needed"},
        {"checkpoints_lost": 1},
        {"steps_repeated": 9},
        {"nodes_held": 1},
        {"given_back": 1},
        {"late_steps": 1},
        {"causes": ("script_failure", "done")},
        {"causes": ("node_failure", "script_failure")},
        {"rungs": ("requeue",)},
        {"rungs": ("-",)},
        {"costs": {"held": Cost(300.0, 306.1, 3.0)}},
        {"costs": {"hang": Cost(30.0, 24.9, 2.0)}},
        {"rungs": ("in_place", "submit"), "causes": ("node_failure", "node_failure", "done")},
    ],
)
def test_a_bad_run_fails(bad: dict[str, object]) -> None:
    assert not FAULTS["node_lost_spare"].passed(replace(GOOD, **bad))  # type: ignore[arg-type]


def test_a_run_that_has_to_stop_fails_if_it_does_not_or_if_it_does_not_say_why() -> None:
    assert not FAULTS["no_nodes_left"].passed(GOOD)
    assert not FAULTS["no_nodes_left"].passed(replace(STOPPED, stopped=""))
    assert not FAULTS["helper_killed"].passed(replace(STOPPED, stopped=""))


def test_steps_of_an_attempt_after_a_later_one_has_begun_are_counted() -> None:
    first = [line(1, "begins", 0), line(1, "step", 1)]
    second = [line(2, "begins", 0), line(2, "step", 1)]
    assert account.late([*first, *second]) == 0
    assert account.late([*first, *second, line(1, "step", 2), line(1, "saved", 2)]) == 2


def test_the_time_to_the_first_step_is_the_longest_of_all_restarts() -> None:
    steps = [(1, 1, 10.0), (1, 2, 11.0), (2, 2, 20.5), (2, 3, 21.0), (3, 3, 40.0)]
    lines = [line(attempt, "step", step, moment) for attempt, step, moment in steps]
    assert account.to_first_step(lines, {}) is None
    assert account.to_first_step(lines, {1: 15.0}) == 5.5
    assert account.to_first_step(lines, {1: 15.0, 2: 30.0}) == 10.0
    assert account.to_first_step(lines, {3: 50.0}) is None, "no step follows"


def test_what_a_fault_cost_is_measured_from_what_the_ranks_and_slurm_tell() -> None:
    """A hang of 10 s, 4 s until the next step, and a step that is taken again; a node has left within the 4 s."""
    first = [line(1, "begins", 0, 2.0), line(1, "begins", 0, 2.0, 1), line(1, "step", 1, 3.0), line(1, "step", 2, 4.0)]
    second = [
        line(2, "begins", 1, 18.0),
        line(2, "begins", 1, 18.0, 2),
        line(2, "step", 2, 19.0),
        line(2, "step", 3, 20.0),
    ]
    lines = sorted([*first, *second], key=lambda each: each.time)
    held = [Allocation(0.0, 21.0, {"nid001": 21.0, "nid002": 15.0, "nid003": 21.0})]
    found = {
        name: cost for name, (cost, _) in account.costs(lines, held, {2: 16.0}, {1: 14.0}, ("hang", "done")).items()
    }
    assert found == {"held": 57.0, "hang": 20.0, "restart": 7.0, "repeated": 2.0}


def test_a_restart_has_no_cost_while_the_job_waits_for_nodes() -> None:
    lines = [line(1, "begins", 0, 2.0), line(1, "step", 1, 3.0), line(2, "begins", 0, 31.0), line(2, "step", 1, 32.0)]
    held = [Allocation(0.0, 5.0, {"nid001": 5.0}), Allocation(30.0, 33.0, {"nid001": 33.0})]
    found = account.costs(lines, held, {}, {}, ("preemption", "done"))
    assert {name: cost for name, (cost, _) in found.items()} == {
        "held": 8.0,
        "hang": 0.0,
        "restart": 3.0,
        "repeated": 1.0,
    }


def entry(fault: str, number: int, commit: str) -> dict[str, object]:
    told = {"fault": fault, "number": number, "machine": "m", "commit": commit, "date": "2026-11-23", "passed": True}
    return {**told, "as_expected": True, "misplaced": [], **asdict(replace(GOOD, seconds=20.0 + number))}


def test_a_table_that_is_measured_in_parts_has_the_outcomes_of_one_commit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "outcomes.jsonl"
    runs = [("node_lost_spare", 0, "a"), ("node_lost_spare", 1, "a"), ("rank_killed", 0, "a"), ("rank_hung", 0, "b")]
    file.write_text("".join(json.dumps(entry(*run)) + "\n" for run in runs))
    found = load(file, {"machine": "m", "commit": "a"})
    assert "left out: 1" in capsys.readouterr().err
    assert left(("node_lost_spare", "rank_hung"), 2, found) == [("rank_hung", 0), ("rank_hung", 1)]
    place, _, *lines = table(found)
    assert place == "m; commit a; 2026-11-23; 3 runs"
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [[row[0], row[2]] for row in cells[2:]] == [["node lost spare", "2 / 2"], ["rank killed", "1 / 1"]]
    assert len({len(row) for row in cells}) == 1
