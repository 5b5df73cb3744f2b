"""Each fault once, on clusters that live side by side: the run completes, no checkpoint is lost, no node stays held."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.conftest import need
from tests.faults.account import misplaced
from tests.faults.case import SAVE_EVERY, Outcome, interrupted
from tests.faults.faults import FAULTS, strike
from tests.lab import parts
from tests.waiting import slowness

Struck = Mapping[tuple[str, int], Future[tuple[Outcome, float]]]
AT_ONCE = 3  # more would slow each other down on a busy machine, and the account compares seconds
LATE_SECONDS = 4  # Slurm may notice the end of a job so much later while other tests use all cores; times slowness()


def strike_here(name: str, number: int) -> tuple[Outcome, float]:
    """The outcome, and how slow the machine was before or after, whichever is more."""
    before = slowness()
    return strike(name, number), max(before, slowness())


@pytest.fixture(scope="module")
def struck(request: pytest.FixtureRequest) -> Iterator[Struck]:
    """The faults of the selected tests, all under way."""
    need(*parts.SLURM)
    here = (item for item in request.session.items if item.path == request.path)
    params = [item.callspec.params for item in here if isinstance(item, pytest.Function)]
    selected = [(each["name"], each["number"]) for each in params]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            # those that take longest begin first: many steps, or time-outs of Slurm
            selected.sort(key=lambda each: (-FAULTS[each[0]].steps, not FAULTS[each[0]].config))
            yield {each: pool.submit(strike_here, *each) for each in selected}
        finally:
            interrupted.set()


@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param(name, number, marks=pytest.mark.uses(*fault.uses), id=f"{name}-{number}" if number else name)
        for name, fault in FAULTS.items()
        for number in range(fault.in_suite)
    ],
)
def test_a_run_survives(struck: Struck, name: str, number: int) -> None:
    """By itself, unless a person has ended it: at most one save interval is done again."""
    if name == "disk_full" and os.geteuid():
        pytest.skip("a small disk is mounted by root alone")
    outcome, slow = struck[name, number].result()
    print(outcome.trouble)  # pytest would shorten it
    assert outcome.completed or FAULTS[name].ends != "completed", outcome.trouble
    assert (outcome.checkpoints_lost, outcome.nodes_held) == (0, 0), outcome.trouble
    assert (outcome.given_back, outcome.late_steps) == (0, 0), outcome.trouble
    assert outcome.steps_repeated <= SAVE_EVERY, outcome.trouble
    assert not FAULTS[name].account or not misplaced(outcome.costs, LATE_SECONDS * slow), (
        slow,
        outcome.costs,
        outcome.trouble,
    )
    assert FAULTS[name].explains(outcome), (outcome.causes, outcome.rungs, outcome.stopped, outcome.trouble)
    assert not outcome.by_hand or FAULTS[name].by_hand, outcome.trouble
