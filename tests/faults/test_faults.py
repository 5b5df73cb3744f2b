"""Each fault once, on clusters that live side by side: the run completes, no checkpoint is lost, no node stays held."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.conftest import need
from tests.faults.case import SAVE_EVERY, Outcome, interrupted
from tests.faults.faults import FAULTS, strike
from tests.lab import parts

AT_ONCE = 6  # they wait nearly all the time


@pytest.fixture(scope="module")
def struck(request: pytest.FixtureRequest) -> Iterator[Mapping[str, Future[Outcome]]]:
    """The faults of the selected tests, all under way."""
    need(*parts.SLURM)
    here = (item for item in request.session.items if item.path == request.path)
    selected = [item.callspec.params["name"] for item in here if isinstance(item, pytest.Function)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            selected.sort(key=lambda name: -FAULTS[name].steps)  # those that take longest begin first
            yield {name: pool.submit(strike, name, 0) for name in selected}
        finally:
            interrupted.set()


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.uses(*FAULTS[name].uses)) for name in FAULTS])
def test_a_run_survives(struck: Mapping[str, Future[Outcome]], name: str) -> None:
    """By itself, unless a person has ended it: at most one save interval is done again."""
    if name == "disk_full" and os.geteuid():
        pytest.skip("a small disk is mounted by root alone")
    outcome = struck[name].result()
    assert outcome.completed, outcome.trouble
    assert (outcome.checkpoints_lost, outcome.nodes_held) == (0, 0), outcome.trouble
    assert outcome.steps_repeated <= SAVE_EVERY, outcome.trouble
    assert FAULTS[name].explains(outcome.causes), outcome.trouble
    assert not outcome.by_hand or FAULTS[name].by_hand, outcome.trouble
