"""Every check that a run has to pass fails on a run that it has to fail on."""

from dataclasses import replace

import pytest

from tests.faults import account
from tests.faults.account import Line
from tests.faults.case import Outcome
from tests.faults.faults import FAULTS

GOOD = Outcome(True, 0, 3, 0, ("node_failure", "done"), 30.0, rungs=("in_place",), detection=12.0, to_first_step=2.5)
STOPPED = replace(GOOD, completed=False, causes=("node_failure",), rungs=(), stopped="2 healthy nodes are needed")


def line(attempt: int, what: str, word: object, moment: float = 0.0, rank: int = 0) -> Line:
    return Line(attempt, rank, 100 + rank, what, str(word), moment, "nid001")


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
