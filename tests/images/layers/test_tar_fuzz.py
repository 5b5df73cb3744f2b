"""Damaged layers are taken or refused, quickly, and never anything else."""

from __future__ import annotations

import random
import time

import pytest

from tests.images.sources.mutations import CASES, taken
from tests.lab import parts

# the same cases each time, so that an old fault rejects no new work; new ones where every tier runs
SEEDS = {"fixed": (1, 60)}
if parts.every_tier():
    SEEDS["fresh"] = (random.SystemRandom().randrange(1 << 32), 2000)
LONGEST = 5.0  # CPU seconds; a case takes milliseconds


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize(("seed", "least"), SEEDS.values(), ids=SEEDS)
def test_a_damaged_layer_is_taken_or_refused(kind: str, seed: int, least: int) -> None:
    number, answers = 0, {True: 0, False: 0}
    while number < least or min(answers.values()) == 0:
        number += 1
        case = CASES[kind](random.Random(f"{seed}-{number}"))
        before = time.process_time()
        try:
            answers[taken(case)] += 1
        except Exception as error:
            raise AssertionError(f"case {seed}-{number} of {kind}") from error
        assert time.process_time() - before < LONGEST, f"case {seed}-{number} of {kind}"
